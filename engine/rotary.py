"""Rotary tables: cos and sin of every position, in float32.

Sources: RoPE, arXiv 2104.09864; YaRN, arXiv 2309.00071 section 3; Llama 3.1's scaling, `rope_scaling` of its
config.json as Meta's reference code applies it.
"""

import math

import torch

from kvplan.models.spec import DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, Rotary, YarnScaling


def rotary_table(rotary: Rotary, num_positions: int, device: torch.device) -> torch.Tensor:
    """[num_positions, dim] float32: cos of the dim / 2 angles, then their sin."""
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * frequencies(rotary, num_positions).to(device)
    match rotary.scaling:
        case YarnScaling(attention_factor=factor):
            pass
        case LongRopeScaling() as scaling:
            factor = scaling.long_scale if num_positions > scaling.original_positions else scaling.short_scale
        case _:
            factor = 1.0
    return torch.cat([angles.cos() * factor, angles.sin() * factor], -1)


def frequencies(rotary: Rotary, num_positions: int) -> torch.Tensor:
    """Radians per position of each pair, [dim / 2] float32."""
    plain = 1.0 / rotary.theta ** (torch.arange(0, rotary.dim, 2, dtype=torch.float32) / rotary.dim)
    match rotary.scaling:
        case None:
            return plain
        case LinearScaling(factor=factor):
            return plain / factor
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn(plain, rotary, scaling)
        case LongRopeScaling() as scaling:
            factors = scaling.long if num_positions > scaling.original_positions else scaling.short
            return plain / torch.tensor(factors, dtype=torch.float32)
        case DynamicScaling(factor=factor, original_positions=original):
            grown = factor * max(num_positions, original) / original - (factor - 1)
            base = float(rotary.theta * grown ** (rotary.dim / (rotary.dim - 2)))
            return 1.0 / base ** (torch.arange(0, rotary.dim, 2, dtype=torch.float32) / rotary.dim)


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Wavelengths beyond original / low_freq_factor are stretched in full, below original / high_freq_factor not."""
    turns = scaling.original_positions * plain / (2 * math.pi)
    share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    share = share.clamp(0, 1)
    return plain * share + plain / scaling.factor * (1 - share)


def _yarn(plain: torch.Tensor, rotary: Rotary, scaling: YarnScaling) -> torch.Tensor:
    """Dimensions that turn more than beta_fast times in the original context are kept, below beta_slow stretched."""

    def dimension_of(num_turns: float) -> float:
        wavelength_share = math.log(scaling.original_positions / (num_turns * 2 * math.pi))
        return rotary.dim * wavelength_share / (2 * math.log(rotary.theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.dim - 1)
    ramp = (torch.arange(rotary.dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretched = ramp.clamp(0, 1)
    return plain * (1 - stretched) + plain / scaling.factor * stretched
