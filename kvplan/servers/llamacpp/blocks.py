"""The parts that llama.cpp builds its models' graphs from: attention, feed-forward, experts, recurrent layers.

Source: llama.cpp at commit 0c1e57098, src/llama-graph.cpp, src/models/mamba-base.cpp, src/models/delta-net-base.cpp.
The graph is the one it reserves memory for: a full micro-batch over a full cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from kvplan.core.errors import UnsupportedModelError
from kvplan.models.ggml_types import row_bytes
from kvplan.servers.llamacpp.cache import layer_cells, v_width, window_cells
from kvplan.servers.llamacpp.graph import HOST, PINNED, Graph, Tensor, dims
from kvplan.servers.llamacpp.placement import Placement, quantized
from kvplan.servers.llamacpp.settings import Context, Settings
from kvplan.servers.llamacpp.shape import Shape, TensorLike

SIGMOID: Final = 2  # of the router, in a file's metadata
WEIGHTED: Final = 3  # softmax over the chosen experts only
ROTATED: Final = 64  # heads of a quantized cache are rotated by matrices of at least so many elements


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of a graph: all of them, per sequence, and those whose logits are kept."""

    tokens: int
    per_seq: int
    seqs: int
    outputs: int


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a layer's attention reads besides its own tokens."""

    mask: Tensor
    k_rows: Tensor
    v_rows: Tensor | None
    k_rotation: Tensor | None
    v_rotation: Tensor | None


class Blocks(Graph):
    """A graph under construction for one model, placed, with its context and its batch."""

    def __init__(self, shape: Shape, placement: Placement, context: Context, settings: Settings, batch: Batch,
                 flash: bool) -> None:  # fmt: skip
        super().__init__()
        self.shape, self.placement, self.context, self.settings = shape, placement, context, settings
        self.batch, self.flash = batch, flash
        # V is stored by element if it is known from the start that there is no flash attention.
        self.by_element = settings.flash == "off"
        self.host = PINNED if placement.devices else HOST
        self.assigned: dict[int, int] = {}  # tensors that the server pins to a place
        self.attentions: list[tuple[int, Tensor]] = []  # (layer, flash attention)
        self._file: dict[str, tuple[TensorLike, int | None]] = {}
        for tensor, where in reversed(placement.tensors):
            self._file[tensor.name] = tensor, where
        self._weights: dict[str, Tensor] = {}
        self._pairs = [  # not marked as weights: an operation on them is placed by its neighbors
            {tensor.name: self.stored(tensor, where, weight=False) for tensor, where in file}
            for file in placement.adapters
        ]
        self._caches: dict[tuple[str, int], Tensor] = {}

    # --- what already lies somewhere --------------------------------------------------------------------------------

    def stored(self, tensor: TensorLike, where: int | None, *, weight: bool = True) -> Tensor:
        buffer = self.host if where is None else where
        return Tensor("NONE", tensor.kind, dims(*tensor.shape), buffer=buffer, weight=weight, name=tensor.name)

    def find(self, name: str) -> Tensor | None:
        """A tensor of the file, or None if it has none of that name."""
        if name not in self._weights:
            if name not in self._file:
                return None
            self._weights[name] = self.stored(*self._file[name])
        return self._weights[name]

    def weight(self, name: str) -> Tensor:
        tensor = self.find(name)
        if tensor is None:
            problem = f"has no tensor {name}, which llama.cpp's {self.shape.arch} needs"
            raise UnsupportedModelError("GGUF file", problem, "fetch it again")
        return tensor

    def of(self, layer: int, name: str) -> Tensor:
        return self.weight(f"blk.{layer}.{name}")

    def maybe(self, layer: int, name: str) -> Tensor | None:
        return self.find(f"blk.{layer}.{name}")

    def head(self) -> Tensor:
        """The output matrix, or the embedding's copy beside the output."""
        if (own := self.find("output.weight")) is not None:
            return own
        tensor = self._file["token_embd.weight"][0]
        copies = [where for t, where in self.placement.tensors if t.name == "token_embd.weight"]
        if copies[-1] is None:
            return self.weight("token_embd.weight")
        return self.stored(tensor, copies[-1])

    def rope_factors(self, layer: int) -> Tensor | None:
        """Rope factors beside a layer: the short ones while a sequence stays within what they were made for."""
        for name in ("rope_freqs.weight", "rope_factors_long.weight"):
            if name in self._file:
                key = f"{name}@{self.placement.layers[layer]}"
                if key not in self._weights:
                    self._weights[key] = self.stored(self._file[name][0], self.placement.layers[layer])
                return self._weights[key]
        return None

    def cache_buffer(self, layer: int) -> int:
        where = self.placement.layers[layer] if self.settings.offload_cache else None
        return HOST if where is None else where

    def cache(self, what: str, layer: int) -> Tensor:
        """A layer's K or V cache, its convolution ("r") or its recurrent state ("s")."""
        key = what, layer
        if key not in self._caches:
            shape, cells = self.shape, layer_cells(self.shape, layer, self.context, self.settings)
            streams, slots = self.context.streams, self.context.slots
            match what:
                case "k":
                    kind, ne = self.settings.cache_k, dims(shape.kv_widths(layer)[0], cells, streams)
                case "v":
                    kind, ne = self.settings.cache_v, dims(v_width(shape, layer, self.settings), cells, streams)
                case "r":
                    kind, ne = "F32", dims(shape.conv_state, slots * self.context.states)
                case _:
                    kind, ne = "F32", dims(shape.scan_state, slots * self.context.states)
            self._caches[key] = Tensor("NONE", kind, ne, buffer=self.cache_buffer(layer), name=f"{what}{layer}")
        return self._caches[key]

    # --- matrices with adapters ---------------------------------------------------------------------------------------

    def adapted(self, w: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The two matrices of each adapter beside a weight."""
        for file in self._pairs if w.weight else ():
            if (first := file.get(f"{w.name}.lora_a")) is not None:
                yield first, file[f"{w.name}.lora_b"]

    def mul_mat(self, w: Tensor, x: Tensor) -> Tensor:
        out = super().mul_mat(w, x)
        for first, second in self.adapted(w):
            out = self.add(out, self.scale(super().mul_mat(second, super().mul_mat(first, x))))
        return out

    def mul_mat_id(self, w: Tensor, x: Tensor, ids: Tensor) -> Tensor:
        out = super().mul_mat_id(w, x, ids)
        for first, second in self.adapted(w):
            out = self.add(out, self.scale(super().mul_mat_id(second, super().mul_mat_id(first, x, ids), ids)))
        return out

    # --- input and norms --------------------------------------------------------------------------------------------

    def embedded(self) -> Tensor:
        """The tokens' embeddings, and the input of embeddings that a batch of tokens leaves unused."""
        tokens = self.input("I32", self.batch.tokens)
        vectors = self.input("F32", self.shape.hidden_size, self.batch.tokens)
        rows = self.expand(self.get_rows(self.weight("token_embd.weight"), tokens))
        self.expand(vectors)
        if self.shape.embedding_scale:
            rows = self.scale(rows)
        return self.expand(rows)

    def positions(self) -> Tensor:
        return self.input("I32", self.batch.tokens * self.shape.positions)

    def output_rows(self) -> Tensor:
        return self.input("I32", self.batch.outputs)

    def norm(self, x: Tensor, weight: Tensor | None, layer: int | None, *, bias: Tensor | None = None,
             op: str = "RMS_NORM") -> Tensor:  # fmt: skip
        """A norm, on its layer's place, times its weight, plus its bias."""
        x = self.same(op, x)
        if weight is not None and layer is not None:
            self.pin(x, layer)
        if weight is not None:
            x = self.mul(x, weight)
        return x if bias is None else self.add(x, bias)

    def pin(self, x: Tensor, layer: int) -> None:
        """Keep a norm on its layer's place, as the server does for few tokens or if all layers are on devices."""
        if self.batch.tokens >= 32 and self.placement.gpu_layers <= self.shape.num_blocks:
            return
        where = self.placement.layers[layer]
        self.assigned[id(x)] = len(self.placement.devices) if where is None else where

    def rope(self, x: Tensor, positions: Tensor, factors: Tensor | None = None) -> Tensor:
        return self.same("ROPE", x, positions, *([] if factors is None else [factors]))

    def linear(self, weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = self.mul_mat(weight, x)
        return x if bias is None else self.add(x, bias)

    # --- attention --------------------------------------------------------------------------------------------------

    def attention_inputs(self, *, windowed: bool = False, only_k: bool = False) -> Inputs:
        """Mask and cache rows of the layers with a window, or of those without."""
        shape, batch, settings = self.shape, self.batch, self.settings
        cells = window_cells(shape, self.context, settings) if windowed else self.context.cells
        k_rows = self.input("I64", batch.tokens)
        v_rows = None
        if not only_k:
            widest = v_width(shape, 0, settings) if self.by_element else 1
            v_rows = self.input("I64", batch.tokens * widest)
        streams = self.context.streams
        mask = self.input("F16" if self.flash else "F32", cells, batch.tokens // streams, 1, streams)
        k_rotation = v_rotation = None
        layers = [i for i in shape.running if shape.attends(i)]
        if not only_k and shape.has_windows:
            layers = [i for i in layers if shape.windowed[i] == windowed]
        k_heads, v_heads = ({shape.head_dims(i)[j] for i in layers} for j in (0, 1))
        if not only_k and quantized(settings.cache_k) and len(k_heads) == 1 and shape.k_head % ROTATED == 0:
            side, head = ROTATED, k_heads.pop()
            while head % (side * 2) == 0:
                side *= 2
            k_rotation = self.input("F32", side, side)
        if not only_k and quantized(settings.cache_v) and len(v_heads) == 1 and shape.v_head % ROTATED == 0:
            v_rotation = self.input("F32", ROTATED, ROTATED)
        return Inputs(mask, k_rows, v_rows, k_rotation, v_rotation)

    def rotated(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        if rotation is None:
            return x
        side = rotation.ne[0]
        flat = (self.reshape if x.contiguous else self.cont)(x, side, x.elements // side)
        return self.reshape(self.mul_mat(rotation, flat), *x.ne)

    def qkv(self, layer: int, x: Tensor, heads: tuple[int, int, int], head_dims: tuple[int, int, int], *,
            split: bool = True) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Q, K and V of a layer; `split` shapes them by head."""
        tokens, widths = self.batch.tokens, [n * d for n, d in zip(heads, head_dims, strict=True)]
        if (fused := self.maybe(layer, "attn_qkv.weight")) is not None:
            joint = self.linear(fused, x, self.maybe(layer, "attn_qkv.bias"))
            if split:
                parts = [
                    self.view(joint, dims(d, n, tokens), (4 * d, joint.nb[1]))
                    for n, d in zip(heads, head_dims, strict=True)
                ]
            else:
                parts = [self.cont(self.view(joint, dims(width, tokens), (joint.nb[1],))) for width in widths]
            return parts[0], parts[1], parts[2]
        parts = [
            self.linear(self.of(layer, f"attn_{name}.weight"), x, self.maybe(layer, f"attn_{name}.bias"))
            for name in "qkv"
        ]
        if split:
            parts = [self.reshape(p, d, n, tokens) for p, n, d in zip(parts, heads, head_dims, strict=True)]
        return parts[0], parts[1], parts[2]

    def attend(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, inputs: Inputs, *,
               reuse: int | None = None, keys_first: bool = False, sinks: Tensor | None = None) -> Tensor:  # fmt: skip
        """Attention over a layer's cache, after the batch's own K and V are stored in it.

        reuse       the layer whose cache it reads, if it has none
        keys_first  the graph computes K before V, as the models with windows do
        """
        if inputs.k_rotation is not None:
            q, k = self.rotated(q, inputs.k_rotation), k and self.rotated(k, inputs.k_rotation)
        v = v and self.rotated(v, inputs.v_rotation)
        order = (q, k, v) if keys_first else (q, v, k)
        for tensor in order:
            if tensor is not None:
                self.expand(tensor)
        owner = layer if reuse is None else reuse
        if k is not None and v is not None:
            self.store_k(owner, k, inputs)
            self.store_v(owner, v, inputs)
        x = self.heads(layer, q, self.k_cells(owner), self.v_cells(owner), inputs.mask, sinks=sinks)
        return self.rotated(x, inputs.v_rotation)

    def attend_latent(self, layer: int, q: Tensor, k: Tensor, v: Tensor, inputs: Inputs, unfold: Tensor) -> Tensor:
        """Attention whose V is the first part of K (MLA)."""
        for tensor in (q, v, k):
            self.expand(tensor)
        self.store_k(layer, k, inputs)
        keys = self.k_cells(layer)
        values = self.view(keys, dims(v.ne[0], *keys.ne[1:]), keys.nb[1:])
        return self.heads(layer, q, keys, values, inputs.mask, unfold=unfold)

    def store_k(self, layer: int, k: Tensor, inputs: Inputs) -> None:
        width, tokens = k.ne[0] * k.ne[1], k.ne[2]
        flat = self.view(k, dims(width, tokens), (k.nb[2],))
        cache = self.cache("k", layer)
        if cache.ne[2] > 1:
            cache = self.reshape(cache, width, cache.ne[1] * cache.ne[2])
        self.expand(self.set_rows(cache, flat, inputs.k_rows))

    def store_v(self, layer: int, v: Tensor, inputs: Inputs) -> None:
        assert inputs.v_rows is not None
        width, tokens, cache = v.ne[0] * v.ne[1], v.ne[2], self.cache("v", layer)
        if not self.by_element:
            flat = self.view(v, dims(width, tokens), (v.nb[2],))
            if cache.ne[2] > 1:
                cache = self.reshape(cache, width, cache.ne[1] * cache.ne[2])
            self.expand(self.set_rows(cache, flat, inputs.v_rows))
            return
        whole = row_bytes(v.kind, width) == v.nb[2]
        flat = self.reshape(v, width, tokens) if whole else self.cont(v, width, tokens)
        if width < cache.ne[0]:
            flat = self.pad(flat, cache.ne[0] - width)
        cells = self.reshape(cache, 1, cache.elements)
        self.expand(self.set_rows(cells, self.reshape(flat, 1, flat.elements), inputs.v_rows))

    def k_cells(self, layer: int) -> Tensor:
        cache, head = self.cache("k", layer), self.shape.head_dims(layer)[0]
        ne = dims(head, self.shape.kv_heads[layer], cache.ne[1], cache.ne[2])
        return self.view(cache, ne, (row_bytes(cache.kind, head), cache.nb[1], cache.nb[2]))

    def v_cells(self, layer: int) -> Tensor:
        cache, head = self.cache("v", layer), self.shape.head_dims(layer)[1]
        heads, cells, streams = self.shape.kv_heads[layer], cache.ne[1], cache.ne[2]
        if not self.by_element:
            nb = row_bytes(cache.kind, head), cache.nb[1], cache.nb[2]
            return self.view(cache, dims(head, heads, cells, streams), nb)
        nb = row_bytes(cache.kind, cells * head), row_bytes(cache.kind, cells), cache.nb[2]
        return self.view(cache, dims(cells, heads, head, streams), nb)

    def heads(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, *, unfold: Tensor | None = None,
              sinks: Tensor | None = None) -> Tensor:  # fmt: skip
        """Scores, softmax and weighted values: one operation with flash attention, several without."""
        transposed = v.nb[1] > v.nb[2]
        streams = k.ne[3]
        tokens = q.ne[2] // streams
        q = self.view(q, dims(q.ne[0], q.ne[1], tokens, streams), (q.nb[1], q.nb[2], q.nb[2] * tokens))
        q, k, v = (self.permute(x, 0, 2, 1, 3) for x in (q, k, v))
        if self.flash:
            k, v = (self.cast(x, "F16") if x.kind == "F32" else x for x in (k, v))
            x = self.flash_attention(q, k, v, mask, sinks)
            self.attentions.append((layer, x))
            if unfold is not None:
                x = self.mul_mat(unfold, self.permute(x, 0, 2, 1, 3))
                x = self.cont(self.permute(x, 0, 2, 1, 3))
            return self.expand(self.reshape(x, x.ne[0] * x.ne[1], x.ne[2] * x.ne[3]))
        scores = self.mul_mat(k, q)
        if self.shape.softcap:
            scores = self.scale(self.unary(self.scale(scores)))
        scores = self.soft_max(scores, mask, sinks)
        if not transposed:
            v = self.cont(self.transpose(v))
        x = self.mul_mat(v, scores)
        if unfold is not None:
            x = self.mul_mat(unfold, x)
        x = self.permute(x, 0, 2, 1, 3)
        x = self.cont(x, x.ne[0] * x.ne[1], x.ne[2] * x.ne[3])
        if not self.settings.offload_cache:
            self.assigned[id(x)] = len(self.placement.devices)
        return self.expand(x)

    # --- feed-forward and experts -----------------------------------------------------------------------------------

    def feed_forward(self, layer: int, x: Tensor, *, gated: bool = True, halves: bool = False, squared: bool = False,
                     suffix: str = "") -> Tensor:  # fmt: skip
        """A feed-forward layer: gated by a matrix of its own, by halves of one, or not at all."""
        up = self.linear(self.of(layer, f"ffn_up{suffix}.weight"), x, self.maybe(layer, f"ffn_up{suffix}.bias"))
        if halves:
            hidden = self.glu(up)
        elif gated:
            gate = self.linear(
                self.of(layer, f"ffn_gate{suffix}.weight"), x, self.maybe(layer, f"ffn_gate{suffix}.bias")
            )
            hidden = self.glu(gate, up)
        else:
            hidden = self.unary(up)
            hidden = self.same("SQR", hidden) if squared else hidden
        return self.linear(
            self.of(layer, f"ffn_down{suffix}.weight"), hidden, self.maybe(layer, f"ffn_down{suffix}.bias")
        )

    def selected(self, probs: Tensor, bias: Tensor | None) -> Tensor:
        """The experts of each token, chosen within the best groups where the model has groups."""
        shape, tokens = self.shape, probs.ne[1]
        scores = probs if bias is None else self.add(probs, bias)
        if shape.expert_groups > 1:
            per_group = shape.num_experts // shape.expert_groups
            groups = self.reshape(scores, per_group, shape.expert_groups, tokens)
            best = self.top_k(groups, 2)
            best = self.get_rows(self.reshape(groups, 1, *groups.ne[:3]), best)
            best = self.sum_rows(self.reshape(best, *best.ne[1:]))
            chosen = self.top_k(self.reshape(best, *best.ne[1:3]), shape.groups_used)
            rows = self.get_rows(groups, chosen)
            rows = self.set_rows(self.same("FILL", groups), rows, chosen)
            scores = self.reshape(rows, shape.num_experts, tokens)
        return self.top_k(scores, shape.experts_used)

    def routed(self, layer: int, logits: Tensor, gating: int, normalize: bool,
               scaled: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The chosen experts and their weights."""
        shape, tokens = self.shape, logits.ne[1]
        used = shape.experts_used
        probs = logits
        if gating == SIGMOID:
            probs = self.unary(logits, "sigmoid")
        elif gating != WEIGHTED:
            probs = self.soft_max(logits)
        chosen = self.selected(probs, self.maybe(layer, "exp_probs_b.bias"))
        weights = self.get_rows(self.reshape(probs, 1, shape.num_experts, tokens), chosen)
        if gating == WEIGHTED:
            weights = self.soft_max(self.reshape(weights, used, tokens))
            weights = self.reshape(weights, 1, used, tokens)
        if normalize:
            weights = self.reshape(weights, used, tokens)
            total = self.same("CLAMP", self.sum_rows(weights))
            weights = self.reshape(self.same("DIV", weights, total), 1, used, tokens)
        if scaled:
            weights = self.scale(weights)
        return chosen, self.expand(weights)

    def experts(self, layer: int, x: Tensor, *, gating: int = 1, normalize: bool = True, logits: Tensor | None = None,
                gated: bool = True, squared: bool = False, scaled: bool | None = None) -> Tensor:  # fmt: skip
        """The chosen experts' results, weighted and added up."""
        hidden, tokens = x.ne[0], x.ne[1]
        if logits is None:
            logits = self.mul_mat(self.of(layer, "ffn_gate_inp.weight"), x)
        if (bias := self.maybe(layer, "ffn_gate_inp.bias")) is not None:
            logits = self.add(logits, bias)
        if scaled is None:
            scaled = self.shape.weight_scale not in (0.0, 1.0)
        chosen, weights = self.routed(layer, logits, gating, normalize, scaled)
        x = self.reshape(x, hidden, 1, tokens)
        if (joint := self.maybe(layer, "ffn_gate_up_exps.weight")) is not None:
            both = self.mul_mat_id(joint, x, chosen)
            half = dims(both.ne[0] // 2, *both.ne[1:])
            gate, up = self.view(both, half, both.nb[1:3]), self.view(both, half, both.nb[1:3])
        else:
            up = self.expert_matrix(layer, "up", x, chosen)
            gate = self.expert_matrix(layer, "gate", x, chosen) if gated else up
        inner = self.glu(gate, up) if gated else self.unary(up)
        if squared:
            inner = self.same("SQR", inner)
        results = self.mul(self.expert_matrix(layer, "down", inner, chosen), weights)
        self.expand(results)
        parts = [
            self.expand(self.view(results, dims(hidden, tokens), (results.nb[2],)))
            for _ in range(self.shape.experts_used)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = self.expand(self.add(total, part))
        return self.cont(total) if len(parts) == 1 else total

    def expert_matrix(self, layer: int, name: str, x: Tensor, chosen: Tensor) -> Tensor:
        out = self.mul_mat_id(self.of(layer, f"ffn_{name}_exps.weight"), x, chosen)
        if (bias := self.maybe(layer, f"ffn_{name}_exps.bias")) is not None:
            out = self.same("ADD_ID", out, bias, chosen)
        return out
