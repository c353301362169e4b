"""Mixers with a constant-size state: Mamba 1 and 2, gated delta net, Kimi delta attention."""

from dataclasses import replace
from typing import Literal

from kvplan.models.families.blocks import column, norm, replicated, row, vector, whole
from kvplan.models.families.config import Config
from kvplan.models.spec import Part, RecurrentState, Sharing, Weight


def convolution(name: str, kernel: int, parts: tuple[Part, ...], *, bias: bool, dtype: str | None = None) -> Weight:
    """A depthwise convolution: `kernel` weights per channel, sharded like the channels."""
    return Weight(name, "state", kernel, parts, "outputs", bias, dtype=dtype)


FLASH_KDA_HEAD = 128  # the head width of FlashKDA's kernels
Mixer = tuple[tuple[Weight, ...], RecurrentState]


def mamba1(config: Config, hidden: int, keys: dict[str, str], *, inner_norms: bool) -> Mixer:
    """Mamba 1 (Mamba, Jamba); A is in float32. No quantization reaches it (vLLM 0.33 layers/mamba/mamba_mixer.py)."""
    inner = config.count(keys["expand"], default=2) * hidden
    state, kernel = config.count(keys["state"], default=16), config.count(keys["kernel"], default=4)
    rank = config.count(keys["rank"], default=-(-hidden // 16))
    bias, conv_bias = config.flag(keys["bias"]), config.flag(keys["conv_bias"], True)
    weights: tuple[Weight, ...] = (
        column("mamba.in_proj", hidden, (Part(inner), Part(inner)), "state", bias=bias),
        convolution("mamba.conv1d", kernel, (Part(inner),), bias=conv_bias),
        row("mamba.x_proj", inner, rank + 2 * state, "state"),
        column("mamba.dt_proj", rank, inner, "state", bias=True),
        Weight("mamba.A", "state", state, (Part(inner),), "outputs", dtype="float32"),
        vector("mamba.D", inner, "state", split=True),
        row("mamba.out_proj", inner, hidden, "state", bias=bias),
    )
    weights = tuple(replace(weight, quantizable=False) for weight in weights)
    if inner_norms:
        weights += (
            norm("mamba.dt_layernorm", rank),
            norm("mamba.b_layernorm", state),
            norm("mamba.c_layernorm", state),
        )
    return weights, RecurrentState("mamba1", kernel, (Part(inner),), inner, (state, 1))


def mamba2(
    config: Config, hidden: int, inner: int, heads: int, head_dim: int, groups: int, state: int, kernel: int, *,
    gated_norm: bool = True, ssm_dtype: str | None = None, prefix: str = "mamba",
) -> Mixer:  # fmt: skip
    """Mamba 2; A is in float32, groups are replicated until every rank has one."""
    if heads * head_dim != inner:
        raise config.fail("mamba heads", f"{heads} heads of {head_dim} do not make the inner width {inner}")
    bias, conv_bias = config.flag("mamba_proj_bias"), config.flag("mamba_conv_bias", config.flag("use_conv_bias", True))
    group = Part(groups, state, Sharing.GROUPS)
    channels = (Part(heads, head_dim), group, group)
    weights: tuple[Weight, ...] = (
        column(f"{prefix}.in_proj", hidden, (Part(heads, head_dim), *channels, Part(heads)), "state", bias=bias),
        convolution(f"{prefix}.conv1d", kernel, channels, bias=conv_bias),
        vector(f"{prefix}.A", heads, "state", split=True, dtype="float32"),
        vector(f"{prefix}.D", heads, "state", split=True),
        vector(f"{prefix}.dt_bias", heads, "state", split=True),
        row(f"{prefix}.out_proj", inner, hidden, "state", bias=bias),
    )
    if gated_norm:
        weights += (vector(f"{prefix}.norm", inner, "norm", split=True),)
    return weights, RecurrentState("mamba2", kernel, channels, heads, (head_dim, state), ssm_dtype)


def gated_delta_net(config: Config, hidden: int, ssm_dtype: str | None) -> Mixer:
    """Qwen3-Next and Qwen3.5: linear attention with a delta rule; A_log is in float32."""
    k_heads, v_heads = config.count("linear_num_key_heads"), config.count("linear_num_value_heads")
    k_dim, v_dim = config.count("linear_key_head_dim"), config.count("linear_value_head_dim")
    kernel = config.count("linear_conv_kernel_dim")
    channels = (Part(k_heads, k_dim), Part(k_heads, k_dim), Part(v_heads, v_dim))
    sources = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
    qkvz: tuple[Part, ...] = (*channels, Part(v_heads, v_dim))
    ba: tuple[Part, ...] = (Part(v_heads), Part(v_heads))
    if config.values.get("model_type") == "qwen3_next":  # stored head by head: one part (vLLM 0.33 create_qkvz_proj)
        qkvz, ba = interleaved(k_heads, qkvz), interleaved(k_heads, ba)
    weights = (
        column("linear_attn.in_proj_qkvz", hidden, qkvz, "state", sources=sources),
        column(
            "linear_attn.in_proj_ba", hidden, ba, "state",
            sources=("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
        ),
        convolution("linear_attn.conv1d", kernel, channels, bias=False),
        vector("linear_attn.A_log", v_heads, "state", split=True, dtype="float32"),
        vector("linear_attn.dt_bias", v_heads, "state", split=True),
        norm("linear_attn.norm", v_dim),
        row("linear_attn.out_proj", v_heads * v_dim, hidden, "state"),
    )  # fmt: skip
    return weights, RecurrentState("gated_delta_net", kernel, channels, v_heads, (v_dim, k_dim), ssm_dtype)


def interleaved(heads: int, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """One part with all parts' outputs of each key head, or the parts if they do not divide by heads."""
    size = sum(part.size for part in parts)
    return parts if size % heads else (Part(heads, size // heads),)


def kimi_delta(hidden: int, heads: int, head_dim: int, kernel: int) -> Mixer:
    """Kimi delta attention; convolutions, A_log, dt_bias and the recurrence are in float32."""
    width = Part(heads, head_dim)
    weights = (
        column("self_attn.q_proj", hidden, (width,), "attention"),
        column("self_attn.k_proj", hidden, (width,), "attention"),
        column("self_attn.v_proj", hidden, (width,), "attention"),
        *(convolution(f"self_attn.{x}_conv1d", kernel, (width,), bias=False, dtype="float32") for x in "qkv"),
        whole("self_attn.f_a_proj", hidden, head_dim, "attention"),
        column("self_attn.f_b_proj", head_dim, (width,), "attention"),
        column("self_attn.b_proj", hidden, heads, "attention"),
        whole("self_attn.g_a_proj", hidden, head_dim, "attention"),
        column("self_attn.g_b_proj", head_dim, (width,), "attention"),
        vector("self_attn.A_log", heads, "attention", split=True, dtype="float32"),
        vector("self_attn.dt_bias", heads * head_dim, "attention", split=True, dtype="float32"),
        norm("self_attn.o_norm", head_dim),
        row("self_attn.o_proj", heads * head_dim, hidden, "attention"),
    )
    return weights, RecurrentState("kda", kernel, (width, width, width), heads, (head_dim, head_dim), "float32")


def fused_kimi_delta(hidden: int, heads: int, head_dim: int, kernel: int, *, bounded: bool) -> Mixer:
    """GLM-5.3-Flash's KDA: like Kimi Linear's, with input projections in one tensor whose low-rank parts are
    replicated.
    """
    width = Part(heads, head_dim)
    sources = tuple(f"self_attn.{x}_proj" for x in ("q", "k", "v", "b", "f_a", "g_a"))
    parts = (width, width, width, Part(heads), replicated(head_dim), replicated(head_dim))
    weights, state = kimi_delta(hidden, heads, head_dim, kernel)
    weights = (
        column("self_attn.in_proj_qkvbfg_a", hidden, parts, "attention", sources=sources),
        *(weight for weight in weights if weight.name not in sources),
    )
    return weights, replace(state, kind=kda_kind(head_dim, bounded=bounded))


def kda_kind(head_dim: int, *, bounded: bool) -> Literal["bounded_kda", "kda"]:
    """Kind of KDA state: a bounded gate has kernels of its own, for one head width."""
    return "bounded_kda" if bounded and head_dim == FLASH_KDA_HEAD else "kda"


def gated_kimi_delta(hidden: int, heads: int, head_dim: int, kernel: int, *, bounded: bool) -> Mixer:
    """Kimi K3's KDA: a full-rank gate, all input projections in one, its rows padded to 16 on each rank."""
    width = Part(heads, head_dim)
    sources = tuple(f"self_attn.{x}_proj" for x in ("q", "k", "v", "g", "f_a", "b"))
    parts = (width, width, width, width, replicated(head_dim), Part(heads))
    weights = (
        replace(column("self_attn.in_proj_qkvgfab", hidden, parts, "attention", sources=sources), align_rows=16),
        column("self_attn.f_b_proj", head_dim, (width,), "attention"),
        convolution("self_attn.conv1d", kernel, (width, width, width), bias=False, dtype="float32"),
        vector("self_attn.A_log", heads, "attention", split=True, dtype="float32"),
        vector("self_attn.dt_bias", heads * head_dim, "attention", split=True, dtype="float32"),
        norm("self_attn.o_norm", head_dim),
        row("self_attn.o_proj", heads * head_dim, hidden, "attention"),
    )
    kind = kda_kind(head_dim, bounded=bounded)
    return weights, RecurrentState(kind, kernel, (width, width, width), heads, (head_dim, head_dim), "float32")
