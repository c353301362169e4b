"""One decoder for all families: what kvplan.models.spec.ModelSpec says it is, on this rank."""

from types import ModuleType

import torch

from engine.adapters import Adapters, NoAdapters
from engine.kv_cache import KVCache
from engine.layers import Builder, GroupedAttention, LatentAttentionLayer, Mlp, Moe, Vocabulary
from engine.loader import WeightSource
from engine.quantized import check_runs
from engine.rotary import rotary_table
from engine.step import StepTensors
from engine.tp import TensorParallel
from kvplan.core.errors import UnsupportedModelError
from kvplan.models.spec import (
    FullAttention,
    GatedMlp,
    HeadAttention,
    LatentAttention,
    LatentHeads,
    LayerCache,
    ModelSpec,
    MoeMlp,
    Rotary,
    SlidingWindow,
)


class Layer:
    """The weights of one layer: attention, MLP, and two norms or (sandwich) four."""

    def __init__(self, model: "Model", builder: Builder, spec: ModelSpec, index: int) -> None:
        decoder, facts = model.decoder, model.decoder.layers[index]
        name, hidden = f"model.layers.{index}", spec.hidden_size
        self.attention = _attention(model, builder, spec, index)
        match facts.mlp:
            case GatedMlp():
                self.mlp: Mlp | Moe = Mlp(builder, f"{name}.mlp", facts.mlp, hidden)
            case MoeMlp():
                self.mlp = Moe(builder, f"{name}.mlp", facts.mlp, hidden)
        before_mlp = "pre_feedforward_layernorm" if decoder.sandwich else "post_attention_layernorm"
        self.before_attention = builder.norm(f"{name}.input_layernorm", hidden)
        self.before_mlp = builder.norm(f"{name}.{before_mlp}", hidden)
        if decoder.sandwich:
            self.after_attention = builder.norm(f"{name}.post_attention_layernorm", hidden)
            self.after_mlp = builder.norm(f"{name}.post_feedforward_layernorm", hidden)


class Model:
    """Embedding, layers, final norm and head."""

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
        """Raises UnsupportedModelError for what cannot be run, InvalidInputError for weights that do not fit."""
        check_runs(spec)
        self.spec, self.decoder, self.kernels = spec, spec.decoder, kernels
        self.max_model_len, self.device = max_model_len, device
        self.buffers: dict[Rotary | int, torch.Tensor] = {}  # rotary tables, and what was made of quantized weights
        self.adapters = adapters or NoAdapters()
        builder = self.adapters.builder(source, tp, kernels, dtype, device, spec.quantization)
        self.embedding = Vocabulary(builder, "model.embed_tokens", spec.vocab_size, spec.hidden_size)
        self.embedding_scale = torch.tensor(self.decoder.embedding_scale, dtype=dtype, device=device)
        self.layers = [Layer(self, builder, spec, i) for i in range(spec.num_layers)]
        self.final_norm = builder.norm("model.norm", spec.hidden_size)
        self.head = self.embedding if spec.tied else Vocabulary(builder, "lm_head", spec.vocab_size, spec.hidden_size)
        source.finish(spec.num_layers)
        self.weights = builder.weights
        self.buffers.update(enumerate(builder.buffers))

    def rotary(self, rotary: Rotary | None) -> torch.Tensor | None:
        """The table of these rotary facts, shared by all layers that have them."""
        if rotary is None:
            return None
        if rotary not in self.buffers:
            self.buffers[rotary] = rotary_table(rotary, self.max_model_len, self.device)
        return self.buffers[rotary]

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.kernels.rms_norm(x, weight, self.decoder.norm_eps, unit_offset=self.decoder.unit_offset)
        return y

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual)."""
        y: tuple[torch.Tensor, torch.Tensor] = self.kernels.rms_norm(
            x, weight, self.decoder.norm_eps, residual=residual, unit_offset=self.decoder.unit_offset
        )
        return y

    def forward(self, step: StepTensors, kv: KVCache) -> torch.Tensor:
        """The step's tokens -> their final hidden states [num_tokens, hidden]; their KV is stored on the way.

        x + residual is the stream; they are added where the next norm reads it. All layers run in this one frame, so
        that no tensor outlives its use.
        """
        sandwich = self.decoder.sandwich
        x = self.embedding.embed(step.token_ids)
        if self.decoder.embedding_scale != 1:
            x = x * self.embedding_scale
        residual = torch.zeros_like(x)
        for i, layer in enumerate(self.layers):
            x, residual = self.add_norm(x, residual, layer.before_attention)
            x = layer.attention(x, step, kv.layers[i])
            if sandwich:
                x = self.norm(x, layer.after_attention)
            x, residual = self.add_norm(x, residual, layer.before_mlp)
            x = layer.mlp(x)
            if sandwich:
                x = self.norm(x, layer.after_mlp)
        return self.add_norm(x, residual, self.final_norm)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_seqs, hidden] -> [num_seqs, vocab_size]; float32, or what else the kernels sample from."""
        logits = self.head.logits(hidden)
        cap = self.decoder.logit_softcap
        if cap is not None:
            logits = torch.tanh(logits.float() / cap) * cap
        sampled_from: torch.Tensor = self.kernels.for_sampling(logits)
        return sampled_from


def _attention(model: Model, builder: Builder, spec: ModelSpec, index: int) -> GroupedAttention | LatentAttentionLayer:
    """The attention of one layer: what it computes beside what it remembers."""
    name, eps = f"model.layers.{index}.self_attn", model.decoder.norm_eps
    cache: LayerCache = spec.layers[index][0]
    match model.decoder.layers[index].attention, cache:
        case HeadAttention() as facts, FullAttention() | SlidingWindow():
            heads = (spec.num_heads, cache.num_kv_heads, cache.head_dim, cache.head_dim_v)
            window = cache.window if isinstance(cache, SlidingWindow) else None
            rotary = model.rotary(facts.rotary)
            return GroupedAttention(
                builder, name, facts, spec.hidden_size, heads, window, rotary, eps, model.decoder.unit_offset
            )
        case LatentHeads() as facts, LatentAttention():
            rotary = model.rotary(facts.rotary)
            assert rotary is not None
            return LatentAttentionLayer(
                builder, name, facts, spec.hidden_size, spec.num_heads, cache.kv_lora_rank, rotary
            )
        case facts, _:
            raise UnsupportedModelError(
                f"{spec.name}: layer {index} computes {type(facts).__name__} on {type(cache).__name__}, "
                "which the engine cannot run"
            )
