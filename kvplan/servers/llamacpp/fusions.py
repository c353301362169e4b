"""What CUDA's pass over a split keeps in memory for longer, so that it can run several operations as one.

Source: ggml 0.25.3 (llama.cpp at commit 0c1e57098), `ggml_backend_cuda_graph_optimize`: the weighted sum over experts
and the router's steps.
"""

from collections.abc import Sequence
from typing import Final

from kvplan.servers.llamacpp.graph import Tensor

Kept = dict[int, list[Tensor]]
NORMALIZE: Final = ("RESHAPE", "SUM_ROWS", "CLAMP", "DIV", "RESHAPE")
ROUTED_TOGETHER: Final = (288, 576)  # numbers of experts that are no power of two and have a kernel
MOST_EXPERTS: Final = 512
MOST_SUMMED: Final = 15


def kept_alive(nodes: Sequence[Tensor]) -> Kept:
    """Tensors that must outlive a node: id of the node -> tensors."""
    alive: Kept = {}
    i = 0
    while i < len(nodes):
        i = _weighted_sum(nodes, i, alive) or _router(nodes, i, alive) or i + 1
    return alive


def _keep(alive: Kept, until: Tensor, *tensors: Tensor) -> None:
    known = alive.setdefault(id(until), [])
    known += [t for i, t in enumerate(tensors) if not any(t is other for other in (*known, *tensors[:i]))]


def _weighted_sum(nodes: Sequence[Tensor], i: int, alive: Kept) -> int | None:
    """Experts' results times their weights, added up: the index behind them, or None."""
    product = nodes[i]
    used = product.ne[1]
    if product.op != "MUL" or product.kind != "F32" or not 2 <= used <= MOST_SUMMED or not product.contiguous:
        return None
    pair = next(((e, w) for e, w in (product.src, product.src[::-1]) if _experts(product, e, w)), None)
    if pair is None:
        return None
    views = adds = 0
    end = i + 1
    while end < len(nodes) and views + adds < 2 * used - 1:
        node = nodes[end]
        if node.op == "VIEW" and node.src[0] is product:
            views += 1
        elif node.op == "ADD" and node.kind == "F32":
            adds += 1
        else:
            break
        end += 1
    if (views, adds) != (used, used - 1):
        return None
    _keep(alive, nodes[end - 1], *pair)
    return end


def _experts(product: Tensor, experts: Tensor, weights: Tensor) -> bool:
    """True if the sources of a product are the experts' results and their weights."""
    both = experts.kind == weights.kind == "F32" and experts.contiguous and weights.contiguous
    return both and experts.ne == product.ne and weights.ne == (1, *product.ne[1:])


def _router(nodes: Sequence[Tensor], i: int, alive: Kept) -> int | None:
    """Activation, reshape, bias, sort, view, rows, normalization, scale: the index behind them, or None."""
    first = nodes[i]
    soft = first.op == "SOFT_MAX" and len(first.src) == 1
    if not soft and (first.op, first.name) != ("UNARY", "sigmoid"):
        return None
    j = i + 1

    def follows(op: str) -> bool:
        return j < len(nodes) and nodes[j].op == op

    if not follows("RESHAPE") or nodes[j].src[0] is not first:
        return None
    j += 1
    if follows("ADD") and nodes[j].src[0] is first:
        j += 1
    if not follows("ARGSORT"):
        return None
    experts = nodes[j].ne[0]
    if [node.op for node in nodes[j + 1 : j + 3]] != ["VIEW", "GET_ROWS"]:
        return None
    j += 3
    if (experts & (experts - 1) or experts > MOST_EXPERTS) and experts not in ROUTED_TOGETHER:
        return None
    if tuple(node.op for node in nodes[j : j + len(NORMALIZE)]) == NORMALIZE:
        j += len(NORMALIZE)
    if follows("SCALE"):
        j += 1
    if j >= len(nodes):
        return None
    for node in nodes[i:j]:
        _keep(alive, nodes[j], node, *node.src)
    return j
