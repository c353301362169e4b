"""One decoder for all families, configured by kvplan.models.spec.ModelSpec, on this rank."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from engine.adapters import Adapters
from engine.delta_net import DeltaNetLayer
from engine.kv_cache import KVCache
from engine.layers import Builder, GroupedAttention, LatentAttentionLayer, Mlp, Moe, Vocabulary
from engine.loader import WeightSource
from engine.mamba2 import Mamba2Layer
from engine.plain_mlp import PlainMlpLayer, PlainMoeLayer
from engine.quantized import check_runs
from engine.rotary import rotary_table
from engine.short_conv import ShortConvLayer
from engine.step import StepTensors
from engine.tp import TensorParallel
from kvplan.core.errors import UnsupportedModelError
from kvplan.models import spec as kinds
from kvplan.models.spec import ModelSpec, Rotary


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Weights of a norm around the mean."""

    weight: torch.Tensor
    bias: torch.Tensor | None


Norm = torch.Tensor | LayerNorm  # a tensor: of an RMSNorm
Compute = Callable[[torch.Tensor, StepTensors, Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a layer: a norm, what is computed of its result, and a norm of that; a family has either or both."""

    before: Norm | None
    compute: Compute
    after: Norm | None


class Layer:
    """The weights of one layer: attention, MLP, and one to four norms; some have one of the two only."""

    def __init__(self, model: "Model", builder: Builder, spec: ModelSpec, index: int) -> None:
        decoder, facts, names = model.decoder, model.decoder.layers[index], model.decoder.names
        name = f"model.layers.{index}"
        self.blocks: list[Block] = []

        def add(compute: Compute, before: str, after: str) -> None:
            first, last = (model.build_norm(builder, f"{name}.{norm}") if norm else None for norm in (before, after))
            scale = decoder.residual_scale
            scaled = compute if scale == 1 else lambda x, step, kv: compute(x, step, kv) * scale
            self.blocks.append(Block(first, scaled, last))

        if facts.attention is not None:
            self.attention = _attention(model, builder, spec, index)
            if not decoder.parallel:
                add(self.attention, names.before_attention, names.after_attention)
        if facts.mlp is not None:
            self.mlp = _mlp(builder, f"{name}.{names.mlp}".removesuffix("."), facts.mlp, spec.hidden_size)
            if not decoder.parallel:
                add(lambda x, step, kv: self.mlp(x), names.before_mlp, names.after_mlp)
        if decoder.parallel:
            add(lambda x, step, kv: self.attention(x, step, kv) + self.mlp(x), names.before_attention, "")


class Model:
    """Embedding, layers, final norm and head."""

    first_layer = 0  # of a pipeline's stage (stages.py), which may be one without a head
    has_head = True

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        kernels: ModuleType,
        tp: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        adapters: Adapters | None = None,
    ) -> None:
        """Raises UnsupportedModelError for an unsupported model, InvalidInputError for mismatched weights."""
        check_runs(spec)
        self.spec, self.decoder, self.kernels = spec, spec.decoder, kernels
        self.max_model_len, self.device = max_model_len, device
        self.buffers: dict[Rotary | int, torch.Tensor] = {}  # rotary tables, and what was made of quantized weights
        self.adapters = adapters or Adapters()
        builder = self.adapters.builder(Builder(source, tp, kernels, dtype, device, spec.quantization))
        self.embedding_scale = torch.tensor(self.decoder.embedding_scale, dtype=dtype, device=device)
        self.build(builder)
        self.weights = builder.weights
        self.buffers.update(enumerate(builder.buffers))

    def build(self, builder: Builder) -> None:
        """Load every part of the model that this rank has."""
        spec = self.spec
        self.build_embedding(builder)
        self.build_positions(builder)
        self.layers = [Layer(self, builder, spec, i) for i in range(spec.num_layers)]
        self.build_head(builder)
        builder.source.finish(spec.num_layers)

    def build_embedding(self, builder: Builder) -> None:
        spec = self.spec
        self.embedding = Vocabulary(builder, f"model.{self.decoder.names.embedding}", spec.vocab_size, spec.hidden_size)

    def build_positions(self, builder: Builder) -> None:
        """The table of learned positions, where there is one: whole on every rank."""
        shape = (self.decoder.learned, self.spec.hidden_size)
        self.positions = builder.empty(*shape) if self.decoder.learned else None
        if self.positions is not None:
            builder.source.fill(self.positions, "model.embed_positions.weight", shape)

    def build_head(self, builder: Builder) -> None:
        spec, bias = self.spec, self.decoder.head_bias
        self.final_norm = self.build_norm(builder, f"model.{self.decoder.names.final_norm}")
        self.head = (
            self.embedding
            if spec.tied
            else Vocabulary(builder, "lm_head", spec.vocab_size, spec.hidden_size, bias=bias)
        )

    def rotary(self, rotary: Rotary | None) -> torch.Tensor | None:
        """The rotary table for these settings, shared by all layers that use them."""
        if rotary is None:
            return None
        if rotary not in self.buffers:
            self.buffers[rotary] = rotary_table(rotary, self.max_model_len, self.device)
        return self.buffers[rotary]

    def build_norm(self, builder: Builder, name: str) -> Norm:
        """A norm of the stream, of the decoder's kind."""
        size, kind = self.spec.hidden_size, self.decoder.norm
        weight = builder.norm(name, size)
        return (
            weight
            if kind == "rms"
            else LayerNorm(weight, builder.vector(f"{name}.bias", size) if kind == "layer" else None)
        )

    def norm(self, x: torch.Tensor, weight: Norm) -> torch.Tensor:
        if isinstance(weight, LayerNorm):  # in plain torch on any backend
            return F.layer_norm(x, x.shape[-1:], weight.weight, weight.bias, self.decoder.norm_eps)
        y: torch.Tensor = self.kernels.rms_norm(x, weight, self.decoder.norm_eps, unit_offset=self.decoder.unit_offset)
        return y

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: Norm | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual); without a norm the sum twice."""
        if weight is None or isinstance(weight, LayerNorm):
            total = x + residual
            return (total if weight is None else self.norm(total, weight)), total
        y: tuple[torch.Tensor, torch.Tensor] = self.kernels.rms_norm(
            x, weight, self.decoder.norm_eps, residual=residual, unit_offset=self.decoder.unit_offset
        )
        return y

    def forward(self, step: StepTensors, kv: KVCache) -> torch.Tensor:
        """The step's tokens -> their final hidden states [num_tokens, hidden]; their KV is stored on the way.

        x + residual is the stream; they are added where the next norm reads it. All layers run in this one frame, so
        that no tensor outlives its use.
        """
        x, residual = self.enter(step)
        for i, layer in enumerate(self.layers, self.first_layer):
            for block in layer.blocks:
                x, residual = self.add_norm(x, residual, block.before)
                x = block.compute(x, step, kv.layers.get(i))
                if block.after is not None:
                    x = self.norm(x, block.after)
        return self.leave(x, residual)

    def enter(self, step: StepTensors) -> tuple[torch.Tensor, torch.Tensor]:
        """What the first layer adds, [num_tokens, hidden] each: the tokens' embeddings, and nothing yet."""
        x = self.embedding.embed(step.token_ids)
        if self.decoder.embedding_scale != 1:
            x = x * self.embedding_scale
        if self.positions is not None:
            x = x + F.embedding(step.positions + 2, self.positions)
        return x, torch.zeros_like(x)

    def leave(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The final hidden states, of what the last layer leaves to be added."""
        return self.add_norm(x, residual, self.final_norm)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_seqs, hidden] -> [num_seqs, vocab_size]; float32, or what else the kernels sample from."""
        logits = self.head.logits(hidden)
        if self.decoder.logit_divisor != 1:
            logits = logits / self.decoder.logit_divisor
        cap = self.decoder.logit_softcap
        if cap is not None:
            logits = torch.tanh(logits.float() / cap) * cap
        sampled_from: torch.Tensor = self.kernels.for_sampling(logits)
        return sampled_from


def _mlp(
    builder: Builder, name: str, facts: kinds.GatedMlp | kinds.MoeMlp | kinds.PlainMlp | kinds.PlainMoe, hidden: int
) -> Mlp | Moe | PlainMlpLayer | PlainMoeLayer:
    match facts:
        case kinds.GatedMlp():
            return Mlp(builder, name, facts, hidden)
        case kinds.MoeMlp():
            return Moe(builder, name, facts, hidden)
        case kinds.PlainMlp():
            return PlainMlpLayer(builder, name, facts, hidden)
        case kinds.PlainMoe():
            return PlainMoeLayer(builder, name, facts, hidden)


def _attention(
    model: Model, builder: Builder, spec: ModelSpec, index: int
) -> GroupedAttention | LatentAttentionLayer | DeltaNetLayer | Mamba2Layer | ShortConvLayer:
    """Build the attention of one layer with its KV cache."""
    names, eps = model.decoder.names, model.decoder.norm_eps
    name, state = (f"model.layers.{index}.{part}" for part in (names.attention, names.state))
    cache: kinds.LayerCache = spec.layers[index][0]
    match model.decoder.layers[index].attention, cache:
        case kinds.HeadAttention() as facts, kinds.FullAttention() | kinds.SlidingWindow():
            heads = (spec.num_heads, cache.num_kv_heads, cache.head_dim, cache.head_dim_v)
            window = cache.window if isinstance(cache, kinds.SlidingWindow) else None
            rotary = model.rotary(facts.rotary)
            return GroupedAttention(
                builder, name, facts, spec.hidden_size, heads, window, rotary, eps, model.decoder.unit_offset
            )
        case kinds.LatentHeads() as facts, kinds.LatentAttention():
            rotary = model.rotary(facts.rotary)
            assert rotary is not None
            return LatentAttentionLayer(
                builder, name, facts, spec.hidden_size, spec.num_heads, cache.kv_lora_rank, rotary
            )
        case kinds.DeltaNet() as facts, kinds.RecurrentState():
            return DeltaNetLayer(builder, state, facts, spec.hidden_size, eps)
        case kinds.Mamba2() as facts, kinds.RecurrentState():
            return Mamba2Layer(builder, state, facts, spec.hidden_size, eps)
        case kinds.ShortConv() as facts, kinds.RecurrentState():
            return ShortConvLayer(builder, state, facts, spec.hidden_size)
        case facts, _:
            raise UnsupportedModelError(
                f"{spec.name}: layer {index} computes {type(facts).__name__} on {type(cache).__name__}, "
                "which the engine cannot run"
            )
