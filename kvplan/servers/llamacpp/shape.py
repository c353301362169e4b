"""The hyperparameters that llama.cpp reads from a GGUF file, as far as memory depends on them.

Source: llama.cpp at commit 0c1e57098, `llama_model_base::load_hparams` and the `load_arch_hparams` of each model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from kvplan.core.errors import UnsupportedModelError

# Architectures with windowed layers -> layers of a period, the last of which is full (a period of 0: none is full).
WINDOW_PERIODS: Final = {"gemma2": 2, "gemma3": 6, "cohere2": 4, "gpt-oss": 2, "olmo2": 4, "gemma4": 0, "lfm2": 0}
DELTA_NETS: Final = frozenset({"qwen3next", "qwen35", "qwen35moe"})
# Architectures whose tokens have a position in each of four dimensions.
FOUR_POSITIONS: Final = frozenset({"qwen2vl", "qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe"})
# Architectures whose states can go back by a few tokens, and so are kept several times while drafting.
GO_BACK: Final = frozenset({"qwen35", "qwen35moe", "nemotron_h", "nemotron_h_moe", "lfm2"})
HYBRIDS: Final = DELTA_NETS | {"nemotron_h", "nemotron_h_moe", "falcon-h1", "lfm2"}
# What a model without this key has: llama.cpp's own defaults.
GEMMA2_WINDOW: Final = 4096


class TensorLike(Protocol):
    """A tensor of a file: its shape has the row first, as ggml has it."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def kind(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def layer(self) -> int | None: ...


class FileLike(Protocol):
    """A GGUF file: the part of `GGUFModel` that is read here."""

    @property
    def architecture(self) -> str: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Sequence[TensorLike]: ...


@dataclass(frozen=True, slots=True)
class Shape:
    """A model as llama.cpp sees it. Every tuple has one entry per block of the file, MTP blocks included."""

    arch: str
    num_blocks: int
    num_mtp_blocks: int
    trained_ctx: int
    hidden_size: int
    vocab_size: int
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    ffn: tuple[int, ...]
    k_head: int
    v_head: int
    k_head_window: int
    v_head_window: int
    window: int
    windowed: tuple[bool, ...]
    recurrent: tuple[bool, ...]
    num_shared_kv: int
    num_experts: int
    experts_used: int
    expert_groups: int
    groups_used: int
    norm_weights: bool
    weight_scale: float
    gating: int
    dense_lead: int
    latent: int
    rope: int
    k_head_mla: int
    v_head_mla: int
    conv: int
    inner: int
    state: int
    groups: int
    dt_rank: int
    short_conv: int
    embedding_scale: float
    residual_scale: float
    logit_scale: float
    softcap: bool
    final_softcap: float
    per_layer_input: int
    positions: int
    temperature: float
    drafts: bool = False  # the graph and the cache are those of the MTP blocks

    @property
    def running(self) -> range:
        """The blocks that the graph runs."""
        return range(self.num_layers, self.num_blocks) if self.drafts else range(self.num_layers)

    @property
    def num_layers(self) -> int:
        """Blocks that the main graph runs."""
        return self.num_blocks - self.num_mtp_blocks

    @property
    def is_mla(self) -> bool:
        return self.k_head_mla > 0

    @property
    def has_windows(self) -> bool:
        return any(self.windowed)

    @property
    def pure_recurrent(self) -> bool:
        return self.arch in ("mamba", "mamba2")

    @property
    def hybrid(self) -> bool:
        return self.arch in HYBRIDS

    @property
    def conv_state(self) -> int:
        """Elements of a slot's convolution state in one layer."""
        if self.short_conv:
            return self.hidden_size * (self.short_conv - 1)
        return max(0, self.conv - 1) * (self.inner + 2 * self.groups * self.state)

    @property
    def scan_state(self) -> int:
        """Elements of a slot's recurrent state in one layer."""
        return self.state * self.inner

    def head_dims(self, layer: int) -> tuple[int, int]:
        """Elements of a head of K and of V."""
        if self.windowed[layer]:
            return self.k_head_window, self.v_head_window
        return self.k_head, self.v_head

    def kv_widths(self, layer: int) -> tuple[int, int]:
        """Elements of a token's K and V."""
        k, v = self.head_dims(layer)
        return k * self.kv_heads[layer], v * self.kv_heads[layer]

    def attends(self, layer: int) -> bool:
        """True if the layer owns a KV cache."""
        if self.drafts:
            return layer >= self.num_layers
        if layer >= self.num_layers - self.num_shared_kv or self.pure_recurrent:
            return False
        if self.arch == "falcon-h1":
            return True
        if self.arch.startswith("nemotron_h"):
            return not self.recurrent[layer] and self.ffn[layer] == 0
        return not (self.hybrid and self.recurrent[layer])

    def keeps_state(self, layer: int) -> bool:
        if self.drafts or layer >= self.num_layers:
            return False
        return self.pure_recurrent or (self.hybrid and self.recurrent[layer])


def per_block(value: Any, num_blocks: int) -> tuple[int, ...]:
    """A key that is one number for all blocks or a list with one for each."""
    if isinstance(value, Sequence):
        return tuple(int(x) for x in value)
    return (int(value),) * num_blocks


def windows(arch: str, pattern: Any, num_layers: int, num_blocks: int) -> tuple[bool, ...]:
    """Which blocks attend within a window."""
    if isinstance(pattern, Sequence):
        listed = tuple(bool(x) for x in pattern)
        return listed + (False,) * (num_blocks - len(listed))
    period = int(pattern) if pattern else WINDOW_PERIODS[arch]
    return tuple(i < num_layers and (period == 0 or i % period < period - 1) for i in range(num_blocks))


def recurrent_blocks(arch: str, keys: Mapping[str, Any], num_layers: int, kv_heads: tuple[int, ...],
                     ffn: tuple[int, ...]) -> tuple[bool, ...]:  # fmt: skip
    """Which blocks keep a state instead of, or beside, a KV cache."""
    blocks = range(len(kv_heads))
    if arch in DELTA_NETS:
        if (listed := keys.get("attention.recurrent_layers")) is not None:
            return tuple(bool(x) for x in per_block(listed, len(kv_heads)))
        interval = keys.get("full_attention_interval", 4)
        return tuple(i < num_layers and (i + 1) % interval != 0 for i in blocks)
    if arch.startswith("nemotron_h"):
        return tuple(i < num_layers and kv_heads[i] == 0 and ffn[i] == 0 for i in blocks)
    if arch == "lfm2":
        return tuple(heads == 0 for heads in kv_heads)
    return (arch in ("falcon-h1", "mamba", "mamba2"),) * len(kv_heads)


def shape_of(model: FileLike) -> Shape:
    """The hyperparameters of a file."""
    arch = model.architecture
    keys = {key.removeprefix(f"{arch}."): value for key, value in model.metadata.items() if key.startswith(f"{arch}.")}
    try:
        return _shape(arch, keys, {tensor.name: tensor.shape for tensor in model.tensors})
    except KeyError as missing:
        key = f"{arch}.{missing.args[0]}"
        raise UnsupportedModelError("GGUF file", f"has no {key}", "llama.cpp needs it: fetch it again") from None


def _shape(arch: str, keys: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Shape:
    blocks, hidden = keys["block_count"], keys["embedding_length"]
    mtp = keys.get("nextn_predict_layers", 0)
    heads = per_block(keys.get("attention.head_count", 0), blocks)
    kv_heads = per_block(keys.get("attention.head_count_kv", heads), blocks)
    ffn = per_block(keys.get("feed_forward_length", 0), blocks)
    head = hidden // heads[0] if heads[0] else 0
    k_head = keys.get("attention.key_length", head) if heads[0] else 0
    v_head = keys.get("attention.value_length", head) if heads[0] else 0
    window = keys.get("attention.sliding_window", GEMMA2_WINDOW if arch == "gemma2" else 0)
    windowed = (False,) * blocks
    if window and arch in WINDOW_PERIODS:
        windowed = windows(arch, keys.get("attention.sliding_window_pattern"), blocks - mtp, blocks)
    recurrent = recurrent_blocks(arch, keys, blocks - mtp, kv_heads, ffn)
    sections = keys.get("rope.dimension_sections", ())
    mrope = arch == "glm4moe" and len(sections) > 1 and sections[0] > 0 and sections[1] > 0
    if arch == "lfm2" and window:
        windowed = tuple(not x for x in recurrent)
    return Shape(
        arch, blocks, mtp, keys["context_length"], hidden, shapes["token_embd.weight"][1], heads, kv_heads, ffn,
        k_head, v_head, keys.get("attention.key_length_swa", k_head), keys.get("attention.value_length_swa", v_head),
        window if any(windowed) else 0, windowed, recurrent, keys.get("attention.shared_kv_layers", 0),
        keys.get("expert_count", 0), max(per_block(keys.get("expert_used_count", 0), blocks)),
        keys.get("expert_group_count", 0), keys.get("expert_group_used_count", 0),
        bool(keys.get("expert_weights_norm", False)), float(keys.get("expert_weights_scale", 0.0)),
        keys.get("expert_gating_func", 0), keys.get("leading_dense_block_count", 0),
        keys.get("attention.kv_lora_rank", 0), keys.get("rope.dimension_count", k_head),
        keys.get("attention.key_length_mla", 0), keys.get("attention.value_length_mla", 0),
        keys.get("ssm.conv_kernel", 0), keys.get("ssm.inner_size", 0), keys.get("ssm.state_size", 0),
        keys.get("ssm.group_count", 0), keys.get("ssm.time_step_rank", 0), keys.get("shortconv.l_cache", 0),
        float(keys.get("embedding_scale", 0.0)), float(keys.get("residual_scale", 0.0)),
        float(keys.get("logit_scale", 0.0)), arch == "gemma2",
        float(keys.get("final_logit_softcapping", 30.0 if arch == "gemma2" else 0.0)),
        keys.get("embedding_length_per_layer_input", 0), 4 if arch in FOUR_POSITIONS or mrope else 1,
        float(keys.get("attention.temperature_scale", 0.0)),
    )  # fmt: skip
