"""Speed of one request: the bytes that a token reads on each place over that place's bandwidth.

Decoding is a read of all active weights and of the cache, and a fixed time per layer that does not depend on its size
(kernels start one after the other). Shares of bandwidth, times and ranges come from llama-bench results of
tests/facts/llama_bench.jsonl (205 results of 69 machines); `tests/servers/llamacpp/test_pace.py` makes them again and
measures how often a machine's results lie in the range of the other machines'.
"""

from collections import defaultdict
from math import prod
from typing import TYPE_CHECKING, Final

from kvplan.models.ggml_types import row_bytes
from kvplan.servers.llamacpp.cache import v_width
from kvplan.servers.plans.plan import Rate, SlotSpeed

if TYPE_CHECKING:
    from kvplan.hardware.gpu import GpuSpec
    from kvplan.servers.llamacpp.size import Started
    from kvplan.servers.plans.plan import Request


SHARE: Final = 0.85  # of a GPU's bandwidth that a large enough read reaches
LAYER: Final = {"nvidia": 50e-6, "apple": 160e-6, "amd": 110e-6}  # seconds of a layer, whatever its size
# Measured over computed speed at 5% and 95% of the results, each machine counted once.
RANGE: Final = 0.70, 1.16
OTHER_LAYER, OTHER_RANGE = 105e-6, (0.46, 1.34)  # of all vendors together, for one of which too few machines are known
HOST_SHARE: Final = Rate(0.20, 0.45, 0.65)  # of a host's bandwidth
# FLOP/s of a multiprocessor, compute unit or core in prompts of a dense model, at 5%, 50% and 95% of the results.
PROMPTS: Final = {
    "nvidia": Rate(0.22e12, 0.82e12, 1.29e12), "apple": Rate(0.17e12, 0.22e12, 0.29e12),
    "amd": Rate(0.27e12, 0.42e12, 0.67e12),
}  # fmt: skip
FEW: Final = 0.01  # share of the read bytes below which the host's bandwidth does not matter
# "Hold": a machine's results lie in the range that the results of the other machines have.
HOW: Final = (
    "from bytes read and bandwidth; such ranges hold for 87% of 154 llama-bench results, of prompts for 72% of 43"
)


def speed(run: "Started", request: "Request", tokens: int) -> SlotSpeed:
    """Tokens per second of one request, with an empty cache and with so many tokens in it."""
    gpu = request.gpu
    bandwidth = gpu.memory_bandwidth if run.server.devices else None
    host = request.host_bandwidth or (bandwidth if gpu.unified else None)
    drafts = request.draft is not None or run.own.mtp_tokens > 0
    lacks = "how many drafted tokens are accepted is not known" if drafts else ""
    reads = read_bytes(run, 1)
    if not lacks and run.server.devices and bandwidth is None:
        lacks = "the bandwidth of this GPU is not known"
    elif not lacks and host is None and reads.get(None, 0) > FEW * sum(reads.values()):
        lacks = "the host's bandwidth is not known: state --host-bandwidth 90GB/s (two channels of DDR5-5600)"
    if lacks:
        return SlotSpeed(tokens, None, None, None, lacks, "")
    empty, full = (decoding(run, gpu.vendor, bandwidth, host, count) for count in (1, tokens))
    return SlotSpeed(tokens, empty, full, prompts(run, gpu), "", HOW)


def decoding(run: "Started", vendor: str, bandwidth: int | None, host: int | None, tokens: int) -> Rate:
    """Tokens per second of a request with so many tokens in the cache; both bandwidths in bytes per second.

    GPUs work one after the other, and so does the host.
    """
    layer, (low, high) = (LAYER[vendor], RANGE) if vendor in LAYER else (OTHER_LAYER, OTHER_RANGE)
    reads = read_bytes(run, tokens)
    on_host = reads.pop(None, 0) / host if host else 0.0
    layers = sum(place is not None for place in run.measured.placement.layers[: run.server.shape.num_layers])
    on_gpus = sum(reads.values()) / (bandwidth * SHARE) + layers * layer if bandwidth else 0.0
    ends = zip((low, 1.0, high), HOST_SHARE, strict=True)
    return Rate(*(1 / (on_gpus / ratio + on_host / share) for ratio, share in ends))


def prompts(run: "Started", gpu: "GpuSpec") -> Rate | None:
    """Tokens per second of a long prompt; None for what no results say: experts, layers on the host, several GPUs."""
    shape, where = run.server.shape, run.measured.placement
    rates, whole = PROMPTS.get(gpu.vendor), where.gpu_layers > shape.num_blocks
    if rates is None or gpu.sm_count is None or shape.num_experts or not whole or len(where.devices) != 1:
        return None
    params = sum(
        prod(tensor.shape) for tensor, place in where.tensors if place is not None and tensor.layer is not None
    )
    return Rate(*(rate * gpu.sm_count / (2 * params) for rate in rates))


def read_bytes(run: "Started", tokens: int) -> dict[int | None, int]:
    """Bytes read for a token of a request of so many, by device (None: the host): the weights that it activates, the
    keys and values of the tokens before it, and the states of layers that keep one.

    Of the experts of a layer a token reads `experts_used`; of the embedding one row, unless it is the output, too.
    """
    shape, where = run.server.shape, run.measured.placement
    totals: dict[int | None, int] = defaultdict(int)
    tied = all(tensor.name != "output.weight" for tensor, _ in where.tensors)
    names = [tensor.name for tensor, _ in where.tensors]
    for tensor, place in where.tensors:
        size = tensor.nbytes
        if "_exps" in tensor.name:
            size = size * shape.experts_used // shape.num_experts
        elif tensor.name == "token_embd.weight":
            is_output = tied and (names.count(tensor.name) == 1 or place == where.output)
            size = size if is_output else row_bytes(tensor.kind, tensor.shape[0])
        elif tensor.name == "per_layer_token_embd.weight":
            size = row_bytes(tensor.kind, tensor.shape[0])
        totals[place] += size
    for layer in range(shape.num_layers):
        place = where.layers[layer] if run.own.offload_cache else None
        if shape.attends(layer):
            cells = min(tokens, shape.window) if shape.windowed[layer] else tokens
            k, v = shape.kv_widths(layer)[0], v_width(shape, layer, run.own)
            totals[place] += cells * (row_bytes(run.own.cache_k, k) + (row_bytes(run.own.cache_v, v) if v else 0))
        if shape.keeps_state(layer):
            totals[place] += 2 * 4 * (shape.conv_state + shape.scan_state)  # read and written
    return {None if place is None else where.devices[place]: size for place, size in totals.items() if size}
