"""The parts of a decoder layer, each holding this rank's share of its weights.

Layers are built by a Builder, which allocates a tensor, has the weight source fill it, and remembers it; nothing is
allocated later. `kernels` is a backend module of engine.kernels.
"""

from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import ModuleType

import torch
import torch.nn.functional as F

from engine import experts, quantized
from engine.experts import EXPERT_NAMES, Experts
from engine.kv_cache import HeadKV, LatentKV, LayerKV
from engine.loader import WeightSource
from engine.quantized import Matrix, Piece
from engine.step import StepTensors
from engine.tp import TensorParallel
from kvplan.models.quant import scheme_of
from kvplan.models.spec import GatedMlp, HeadAttention, LatentHeads, MoeMlp, Quantization, Scheme

LATENT_NORM_EPS = 1e-6  # DeepSeek's own code and transformers' norm latents with it, whatever rms_norm_eps says
VOCAB_PAD = 64  # rows of a vocabulary table are padded to a multiple of this, so that GEMMs stay aligned
ALL = slice(None)


@dataclass(slots=True)
class Builder:
    """Allocates and fills weights for one rank; linear layers as `quantization` stores them."""

    source: WeightSource
    tp: TensorParallel
    kernels: ModuleType
    dtype: torch.dtype
    device: torch.device
    quantization: Quantization | None = None
    weights: list[torch.Tensor] = field(default_factory=list)  # every tensor made here that a checkpoint holds
    buffers: list[torch.Tensor] = field(default_factory=list)  # and those that are made of one

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)
        self.weights.append(tensor)
        return tensor

    def buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        self.buffers.append(torch.empty(*shape, dtype=dtype, device=self.device))
        return self.buffers[-1]

    def vector(self, name: str, size: int, part: slice = ALL, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = self.empty(len(range(size)[part]), dtype=dtype)
        self.source.fill(tensor, name, (size,), (part,))
        return tensor

    def norm(self, name: str, size: int) -> torch.Tensor:
        return self.vector(f"{name}.weight", size)

    def outputs(
        self, rows: list[tuple[str, int, slice]], inputs: int, *, bias: bool = False, quantizable: bool = True
    ) -> "Linear":
        """A linear layer fused from several; of each (name, outputs, part) this rank has the rows `part`."""
        pieces = [Piece(name, outputs, inputs, part) for name, outputs, part in rows]
        weight = self._matrix(pieces, quantizable=quantizable)
        counts = [len(piece.local_rows) for piece in pieces]
        offset = self.empty(sum(counts)) if bias else None
        if offset is not None:
            for view, piece in zip(offset.split(counts), pieces, strict=True):
                self.source.fill(view, f"{piece.name}.bias", (piece.outputs,), (piece.rows,))
        return Linear(weight, offset, self.kernels)

    def inputs(self, name: str, outputs: int, inputs: int, part: slice, *, bias: bool = False) -> "SummedLinear":
        """A linear layer of which this rank has the columns `part`; results are summed over the ranks."""
        pieces = [Piece(name, outputs, inputs, columns=part)]
        weight = self._matrix(pieces)
        offset = self.vector(f"{name}.bias", outputs) if bias else None
        return SummedLinear(weight, offset, self.kernels, self.tp)

    def widened(self, name: str, outputs: int, part: slice, inputs: int) -> "Linear":
        """The rows `part` of a layer, dequantized to the model's dtype.

        What is made of a quantized matrix is a buffer, and the matrix is gone.
        """
        pieces = [Piece(name, outputs, inputs, part)]
        scheme = self._scheme(pieces)
        if scheme is None:
            return self.outputs([(name, outputs, part)], inputs)
        weight = self.buffer(len(pieces[0].local_rows), inputs, dtype=self.dtype)
        matrix = quantized.load(scheme, self.method, pieces, self.source, self._forgotten, self._forgotten)
        return Linear(quantized.widen(matrix, weight), None, self.kernels)

    def _forgotten(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)

    def experts(self, name: str, facts: MoeMlp, hidden: int, mine: slice) -> Experts:
        """All experts, of each the inner channels `mine`; the checkpoint's name is mlp.experts."""
        layer = name.removeprefix("model.layers.").partition(".")[0]
        pieces = [Piece(f"model.layers.{layer}.mlp.experts.0.{part}_proj", 0, 0) for part in ("gate", "up", "down")]
        return experts.load(self, name, facts, hidden, mine, self._scheme(pieces), self.method)

    def _matrix(self, pieces: list[Piece], *, quantizable: bool = True) -> Matrix:
        """The pieces, stacked by rows."""
        scheme = self._scheme(pieces) if quantizable else None
        return quantized.load(scheme, self.method, pieces, self.source, self.empty, self.buffer)

    @property
    def method(self) -> str:
        return "" if self.quantization is None else self.quantization.method

    def _scheme(self, pieces: list[Piece]) -> Scheme | None:
        """How the checkpoint quantizes these layers; None if it does not."""
        if self.quantization is None:
            return None
        names = [piece.name.removeprefix("model.layers.").partition(".") for piece in pieces]
        return scheme_of(self.quantization, int(names[0][0]), tuple(name for _, _, name in names))


@dataclass(frozen=True, slots=True)
class Linear:
    """x [num_tokens, inputs] -> [num_tokens, outputs]."""

    weight: Matrix
    bias: torch.Tensor | None
    kernels: ModuleType

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return quantized.product(self.kernels, x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class SummedLinear:
    """A linear layer whose inputs are split over the ranks; the bias is added once, after the sum."""

    weight: Matrix
    bias: torch.Tensor | None
    kernels: ModuleType
    tp: TensorParallel

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tp.all_reduce(quantized.product(self.kernels, x, self.weight, None))
        return y if self.bias is None else y + self.bias


# --- vocabulary -------------------------------------------------------------------------------------------------------


class Vocabulary:
    """A table [vocab_size, hidden], padded to 64 rows and split by rows: the embedding, the head, or both."""

    def __init__(self, builder: Builder, name: str, vocab_size: int, hidden: int, *, bias: bool = False) -> None:
        self.tp, self.vocab_size = builder.tp, vocab_size
        padded = -(-vocab_size // (VOCAB_PAD * self.tp.size)) * VOCAB_PAD * self.tp.size
        rows = self.tp.share(padded, "padded vocabulary rows")
        self.first = rows.start
        real = max(0, min(rows.stop, vocab_size) - rows.start)  # the others are padding, and 0
        self.weight = builder.empty(rows.stop - rows.start, hidden)
        self.weight[real:] = 0
        if real:
            part = (slice(rows.start, rows.start + real), ALL)
            builder.source.fill(self.weight[:real], f"{name}.weight", (vocab_size, hidden), part)
        self.bias = builder.empty(rows.stop - rows.start) if bias else None
        if self.bias is not None and real:
            builder.source.fill(self.bias[:real], f"{name}.bias", (vocab_size,), part[:1])

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden]."""
        if self.tp.size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.first
        mine = (local >= 0) & (local < self.weight.shape[0])
        rows = F.embedding(local.where(mine, 0), self.weight)
        return self.tp.all_reduce(rows * mine[:, None])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden] -> [num_tokens, vocab_size]."""
        return self.tp.all_gather(F.linear(hidden, self.weight, self.bias))[:, : self.vocab_size]


# --- attention --------------------------------------------------------------------------------------------------------


class GroupedAttention:
    """Attention over K and V heads (MHA, GQA, MQA), full or in a window, over the paged cache."""

    def __init__(
        self,
        builder: Builder,
        name: str,
        facts: HeadAttention,
        hidden: int,
        heads: tuple[int, int, int, int],
        window: int | None,
        rotary: torch.Tensor | None,
        norm_eps: float,
        unit_offset: bool,
    ) -> None:
        """heads: (num_heads, num_kv_heads, head_dim, head_dim_v); rotary: the table this layer's positions turn by."""
        num_heads, num_kv_heads, self.head_dim, self.head_dim_v = heads
        self.facts, self.kernels, self.window, self.rotary = facts, builder.kernels, window, rotary
        self.norm_eps, self.unit_offset, self.tp = norm_eps, unit_offset, builder.tp
        mine, kv = builder.tp.share(num_heads, "heads"), builder.tp.share_kv_heads(num_kv_heads)
        self.num_heads, self.num_kv_heads = mine.stop - mine.start, kv.stop - kv.start
        per_query = 2 * self.head_dim if facts.gated else self.head_dim  # a head's gate lies beside its query
        rows = [
            (f"{name}.q_proj", num_heads * per_query, _times(mine, per_query)),
            (f"{name}.k_proj", num_kv_heads * self.head_dim, _times(kv, self.head_dim)),
            (f"{name}.v_proj", num_kv_heads * self.head_dim_v, _times(kv, self.head_dim_v)),
        ]
        self.qkv_proj = builder.outputs(
            _joined(f"{name}.qkv_proj", rows) if facts.joined else rows, hidden, bias=facts.qkv_bias
        )
        width = num_heads * self.head_dim_v
        self.o_proj = builder.inputs(
            f"{name}.{facts.names[0]}", hidden, width, _times(mine, self.head_dim_v), bias=facts.out_bias
        )
        self.q_norm = self._norm(builder, f"{name}.{facts.names[1]}", num_heads, mine)
        self.k_norm = self._norm(builder, f"{name}.{facts.names[2]}", num_kv_heads, kv)
        self.sinks = builder.vector(f"{name}.sinks", num_heads, mine) if facts.sinks else None

    def __call__(self, x: torch.Tensor, step: StepTensors, kv: LayerKV) -> torch.Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]; writes the tokens' K and V into their slots."""
        assert isinstance(kv, HeadKV)
        q_width, k_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        gate = None
        if self.facts.gated:
            q, k, v = self.qkv_proj(x).split([2 * q_width, k_width, self.num_kv_heads * self.head_dim_v], -1)
            q, gate = q.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)
        else:
            q, k, v = self.qkv_proj(x).split([q_width, k_width, self.num_kv_heads * self.head_dim_v], -1)
            q = q.unflatten(-1, (-1, self.head_dim))
        k = k.unflatten(-1, (-1, self.head_dim))
        q = self._store(q, k, v.unflatten(-1, (-1, self.head_dim_v)), step, kv)
        out = self._attend(q, step, kv)
        return self.o_proj((out if gate is None else out * gate.sigmoid()).flatten(1))

    def _norm(self, builder: Builder, name: str, num_heads: int, mine: slice) -> torch.Tensor | None:
        """The weights of a norm of q or k; of one over all heads a rank uses those of its own."""
        match self.facts.qk_norm:
            case "":
                return None
            case "head":
                return builder.norm(name, self.head_dim)
            case "full":
                return builder.norm(name, num_heads * self.head_dim)[_times(mine, self.head_dim)]
            case "split":
                return builder.vector(f"{name}.weight", num_heads * self.head_dim, _times(mine, self.head_dim))
            case "around_mean":
                weight = builder.empty(mine.stop - mine.start, self.head_dim)
                builder.source.fill(weight, f"{name}.weight", (num_heads, self.head_dim), (mine, ALL))
                return weight

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """q or k [num_tokens, heads, head_dim], normalized by heads or over all of them, also other ranks'."""
        kind = self.facts.qk_norm
        if kind == "around_mean":
            return (F.layer_norm(x.float(), x.shape[-1:], eps=self.norm_eps) * weight.float()).to(x.dtype)
        rows = x if kind == "head" else x.flatten(1)
        if kind == "head" or self.tp.size == 1:
            y: torch.Tensor = self.kernels.rms_norm(rows, weight, self.norm_eps, unit_offset=self.unit_offset)
            return y.view(x.shape)
        squares = self.tp.all_reduce(rows.float().pow(2).mean(-1, keepdim=True)) / self.tp.size
        return (rows.float() * torch.rsqrt(squares + self.norm_eps)).to(x.dtype).mul_(weight).view(x.shape)

    def _store(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: StepTensors, kv: HeadKV) -> torch.Tensor:
        """Apply norms and rotary embedding to q and k, write k and v to their slots, and return q."""
        slots, scales = step.groups[kv.group].slot_mapping, {"k_scale": kv.scale, "v_scale": kv.scale}
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is not None and k_norm is not None and (self.rotary is None or self.facts.qk_norm != "head"):
            q, k, q_norm, k_norm = self._normed(q, q_norm), self._normed(k, k_norm), None, None
        if self.rotary is not None and self.facts.rotary is not None:
            turned: torch.Tensor = self.kernels.rotate_and_store(
                q, k, v, self.rotary, step.positions, kv.k, kv.v, slots, interleaved=self.facts.rotary.interleaved,
                q_norm=q_norm, k_norm=k_norm, norm_eps=self.norm_eps, unit_offset=self.unit_offset, **scales,
            )  # fmt: skip
            return turned
        self.kernels.store_kv(k, v, kv.k, kv.v, slots, **scales)
        return q

    def _attend(self, q: torch.Tensor, step: StepTensors, kv: HeadKV) -> torch.Tensor:
        """Attend for the step's decodes (one token each), then its prefills, into one tensor."""
        tables, n = step.groups[kv.group].block_tables, step.num_decodes
        options = {
            "window": self.window,
            "softcap": self.facts.softcap,
            "sinks": self.sinks,
            "k_scale": kv.scale,
            "v_scale": kv.scale,
        }
        out = q.new_empty(q.shape[0], self.num_heads, self.head_dim_v)
        if n:
            self.kernels.paged_decode(
                q[:n], kv.k, kv.v, tables[:n], step.context_lens[:n], self.facts.scale,
                work=step.groups[kv.group].work, out=out[:n], **options,
            )  # fmt: skip
        if step.num_prefills:
            self.kernels.paged_prefill(
                q[n:], kv.k, kv.v, tables[n:], step.query_start, step.context_lens[n:], self.facts.scale,
                max_query_len=step.max_query_len, tiles=step.tiles, out=out[n:], **options,
            )  # fmt: skip
        return out


class LatentAttentionLayer:
    """Multi-head latent attention (DeepSeek): the cache holds one latent and one rope key per token for all heads.

    Decode is absorbed: queries are carried into the latent space, so the cache is read as it is. Prefill expands
    the latents of its context to keys and values of every head, which costs less when many queries share them.
    """

    def __init__(
        self,
        builder: Builder,
        name: str,
        facts: LatentHeads,
        hidden: int,
        num_heads: int,
        kv_lora_rank: int,
        rotary: torch.Tensor,
    ) -> None:
        self.facts, self.kernels, self.rotary = facts, builder.kernels, rotary
        self.kv_lora_rank, self.rope_dim, self.nope_dim = kv_lora_rank, facts.rotary.dim, facts.qk_nope_head_dim
        mine = builder.tp.share(num_heads, "heads")
        self.num_heads = mine.stop - mine.start
        qk_dim, kv_dim = self.nope_dim + self.rope_dim, self.nope_dim + facts.v_head_dim
        q_rank = facts.q_lora_rank
        down = [(f"{name}.kv_a_proj_with_mqa", kv_lora_rank + self.rope_dim, ALL)]
        if q_rank is not None:
            down.insert(0, (f"{name}.q_a_proj", q_rank, ALL))
            self.q_a_norm = builder.norm(f"{name}.q_a_layernorm", q_rank)
        self.down_proj = builder.outputs(down, hidden, bias=facts.bias)
        q_name, q_inputs = (f"{name}.q_proj", hidden) if q_rank is None else (f"{name}.q_b_proj", q_rank)
        self.q_proj = builder.outputs([(q_name, num_heads * qk_dim, _times(mine, qk_dim))], q_inputs)
        self.kv_a_norm = builder.norm(f"{name}.kv_a_layernorm", kv_lora_rank)
        self.kv_b_proj = builder.widened(f"{name}.kv_b_proj", num_heads * kv_dim, _times(mine, kv_dim), kv_lora_rank)
        self.o_proj = builder.inputs(
            f"{name}.o_proj", hidden, num_heads * facts.v_head_dim, _times(mine, facts.v_head_dim), bias=facts.bias
        )

    def __call__(self, x: torch.Tensor, step: StepTensors, kv: LayerKV) -> torch.Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]; writes the tokens' latents into their slots."""
        assert isinstance(kv, LatentKV)
        *q_latent, latent, k_rope = self.down_proj(x).split(
            [*([] if self.facts.q_lora_rank is None else [self.facts.q_lora_rank]), self.kv_lora_rank, self.rope_dim],
            -1,
        )
        q_input = self.kernels.rms_norm(q_latent[0], self.q_a_norm, LATENT_NORM_EPS) if q_latent else x
        q = self.q_proj(q_input).view(-1, self.num_heads, self.nope_dim + self.rope_dim)
        q_nope, q_rope = q.split([self.nope_dim, self.rope_dim], -1)
        latent = self.kernels.rms_norm(latent.contiguous(), self.kv_a_norm, LATENT_NORM_EPS)
        q_rope, k_rope = self.kernels.rotate(
            q_rope, k_rope[:, None], self.rotary, step.positions, interleaved=self.facts.rotary.interleaved
        )
        self.kernels.store_latent(torch.cat([latent, k_rope[:, 0]], -1), kv.cache, step.groups[kv.group].slot_mapping)
        n, out = step.num_decodes, q.new_empty(q.shape[0], self.num_heads, self.facts.v_head_dim)
        if n:
            self._decode(q_nope[:n], q_rope[:n], step, kv, out[:n])
        if step.num_prefills:
            self._prefill(torch.cat([q_nope[n:], q_rope[n:]], -1), step, kv, out[n:])
        return self.o_proj(out.flatten(1))

    def _up(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(keys [heads, nope_dim, rank], values [heads, v_head_dim, rank]) of the latent: views of kv_b_proj."""
        weight = self.kv_b_proj.weight
        assert isinstance(weight, torch.Tensor)  # also of a quantized checkpoint
        up = weight.view(self.num_heads, -1, self.kv_lora_rank)
        return up[:, : self.nope_dim], up[:, self.nope_dim :]

    def _decode(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, step: StepTensors, kv: LatentKV, out: torch.Tensor
    ) -> None:
        """One token of each sequence, into out [num_decodes, heads, v_head_dim]."""
        n = step.num_decodes
        up_k, up_v = self._up()
        absorbed = torch.einsum("thd,hdr->thr", q_nope, up_k)
        latents = self.kernels.latent_decode(
            torch.cat([absorbed, q_rope], -1), kv.cache, step.groups[kv.group].block_tables[:n],
            step.context_lens[:n], self.facts.scale, latent_dim=self.kv_lora_rank, work=step.groups[kv.group].work,
        )  # fmt: skip
        torch.bmm(latents.transpose(0, 1), up_v.transpose(1, 2), out=out.transpose(0, 1))

    def _prefill(self, q: torch.Tensor, step: StepTensors, kv: LatentKV, out: torch.Tensor) -> None:
        """Prefill sequence by sequence, on expanded keys and values; q [num_prefill_tokens, heads, nope + rope]."""
        block_size = kv.cache.shape[1]
        for i, context_len in enumerate(step.prefill_context_lens):
            rows = slice(step.prefill_starts[i], step.prefill_starts[i + 1])
            blocks = step.groups[kv.group].block_tables[step.num_decodes + i, : -(-context_len // block_size)]
            out[rows] = self._prefill_one(q[rows], kv.cache[blocks].flatten(0, 1)[:context_len].to(q.dtype))

    def _prefill_one(self, q: torch.Tensor, cached: torch.Tensor) -> torch.Tensor:
        """q [query_len, heads, nope + rope], cached [context_len, rank + rope] -> [query_len, heads, v_head_dim]."""
        up_k, up_v = self._up()
        latent, k_rope = cached.split([self.kv_lora_rank, self.rope_dim], -1)
        k = torch.cat([torch.einsum("tr,hdr->htd", latent, up_k), k_rope.expand(self.num_heads, -1, -1)], -1)
        v = torch.einsum("tr,hdr->htd", latent, up_v)
        return last_queries_attend(q.transpose(0, 1)[None], k[None], v[None], self.facts.scale)[0].transpose(0, 1)


def last_queries_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal softmax(q k^T) v of the last queries of a context: q [1, heads, query_len, width], k and v all of it.

    On a GPU one kernel is named, the only one that takes keys wider than values: torch would choose by length, among
    others what plans anew for each length or holds all scores; and a mask would be made twice, once in the dtype of q.
    """
    query_len, context_len = q.shape[-2], k.shape[-2]
    step = 16 // q.element_size()  # widths that the kernel loads
    if q.device.type == "cuda" and q.shape[-1] % step == v.shape[-1] % step == 0:
        return efficient_attention(q, k, v, scale)
    queries = torch.arange(context_len - query_len, context_len, device=q.device)
    mask = torch.arange(context_len, device=q.device) <= queries[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


CAUSAL_FROM_BOTTOM_RIGHT = 2  # of a mask's kinds: the last query sees all keys


def efficient_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """torch's memory-efficient attention with a causal mask aligned to the bottom right.

    As torch.nn.attention.bias.causal_lower_right has it called; that object makes a mask in the host's memory.
    """
    out: torch.Tensor = torch.ops.aten._efficient_attention_forward(
        *(x.transpose(1, 2) for x in (q, k, v)), bias=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
        max_seqlen_k=None, dropout_p=0.0, custom_mask_type=CAUSAL_FROM_BOTTOM_RIGHT, compute_log_sumexp=False,
        scale=scale,
    )[0]  # fmt: skip
    return out.transpose(1, 2)


def _joined(name: str, rows: list[tuple[str, int, slice]]) -> list[tuple[str, int, slice]]:
    """The same rows of one tensor that has those of all, one after the other."""
    starts = list(accumulate((outputs for _, outputs, _ in rows), initial=0))
    return [
        (name, starts[-1], slice(start + part.start, start + part.stop))
        for start, (_, _, part) in zip(starts, rows, strict=False)
    ]


def _times(heads: slice, width: int) -> slice:
    """The row range of these heads, `width` rows each."""
    return slice(heads.start * width, heads.stop * width)


# --- feed-forward -----------------------------------------------------------------------------------------------------


class Mlp:
    """down(activation(gate(x)) * up(x)), gate and up in one matrix."""

    def __init__(self, builder: Builder, name: str, facts: GatedMlp, hidden: int) -> None:
        self.facts, self.kernels = facts, builder.kernels
        mine = builder.tp.share(facts.inner, "MLP channels")
        rows = [(f"{name}.{facts.gate}", facts.inner, mine), (f"{name}.{facts.up}", facts.inner, mine)]
        rows = _joined(f"{name}.{facts.joined}", rows) if facts.joined else rows
        self.gate_up_proj = builder.outputs(rows, hidden, bias=facts.bias)
        self.down_proj = builder.inputs(f"{name}.{facts.down}", hidden, facts.inner, mine, bias=facts.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.kernels.gated_activation(self.gate_up_proj(x), self.facts.activation))


class Moe:
    """Routed experts, each split over the ranks by inner channels, and shared experts."""

    def __init__(self, builder: Builder, name: str, facts: MoeMlp, hidden: int) -> None:
        self.facts, self.kernels, self.tp = facts, builder.kernels, builder.tp
        names = EXPERT_NAMES[facts.names]
        layer = name.rpartition(".")[0]
        name = f"{layer}.{names.block}"
        rows = [(f"{name}.{names.router}", facts.num_experts, ALL)]
        if facts.wide_router:  # which has no adapters
            self.router = Builder.outputs(replace(builder, dtype=torch.float32), rows, hidden, quantizable=False)
        else:
            self.router = builder.outputs(rows, hidden, bias=facts.router_bias, quantizable=False)
        self.correction = (
            builder.vector(f"{name}.{names.correction}", facts.num_experts, dtype=torch.float32)
            if facts.correction
            else None
        )
        mine = builder.tp.share(facts.inner, "expert channels")
        self.experts = builder.experts(f"{name}.experts", facts, hidden, mine)
        shared = GatedMlp(facts.shared_inner, facts.activation)
        if names.shared is not None:
            shared = replace(shared, joined="input_linear", down="output_linear")
        shared_name = f"{name}.shared_expert" if facts.shared_gate else f"{name}.shared_experts"
        if names.shared is not None:
            shared_name = f"{layer}.{names.shared}"
        self.shared = Mlp(builder, shared_name, shared, hidden) if facts.shared_inner else None
        self.shared_gate = (
            builder.outputs([(f"{shared_name}_gate", 1, ALL)], hidden, quantizable=False) if facts.shared_gate else None
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        facts, experts = self.facts, self.experts
        expert_ids, expert_weights = self._route(x)
        b2 = experts.b2 if self.tp.rank == 0 else None  # added once over the ranks
        y = self.kernels.moe_mlp(
            x, experts.w13, experts.w2, expert_ids, expert_weights, facts.activation, b13=experts.b13, b2=b2,
            limit=facts.swiglu_limit, alpha=facts.swiglu_alpha,
        )  # fmt: skip
        y = self.tp.all_reduce(y)
        if self.shared is None:
            return y
        shared = self.shared(x)
        return y + (shared if self.shared_gate is None else shared * self.shared_gate(x).sigmoid())

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each token's experts and their weights; the router's logits are gone before the experts run."""
        facts = self.facts
        logits = self.router(x.float() if facts.wide_router else x)
        if facts.scoring == "sparsemixer":
            return sparse_mixer(logits, facts.jitter)
        routed: tuple[torch.Tensor, torch.Tensor] = self.kernels.route(
            logits, self.correction, top_k=facts.top_k, scoring=facts.scoring, groups=facts.groups,
            top_groups=facts.top_groups, renormalize=facts.renormalize, scale=facts.scale,
        )  # fmt: skip
        return routed


def sparse_mixer(logits: torch.Tensor, jitter: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Two experts (ids and weights [num_tokens, 2]), one after the other: of each the softmax over those near it.

    Near: less than twice the jitter below, as a share of its own size or the best's. Source: arXiv 2409.12136 as Phi
    3.5 MoE has it (transformers 5.23 modeling_phimoe.py).
    """
    scores = logits.float()
    ids, weights, left = [], [], scores
    for _ in range(2):
        best, chosen = left.max(-1, keepdim=True)
        far = (best - scores) / scores.abs().maximum(best) > 2 * jitter
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(-1, chosen))
        ids.append(chosen)
        left = scores.scatter(-1, chosen, float("-inf"))
    return torch.cat(ids, -1), torch.cat(weights, -1)
