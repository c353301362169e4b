"""What all layers with a recurrent state do: read it, a short convolution, a rule of their own, and write it."""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.kv_cache import HeadKV, LatentKV, LayerKV
from engine.state_slots import States
from engine.step import StepTensors
from engine.tp import TensorParallel
from kvplan.core.errors import UnsupportedModelError


class Rule(Protocol):
    """Moves states [n, heads, *head_shape] float32 on by one token each, or (is_chunk, n = 1) by several of one."""

    def __call__(self, turned: torch.Tensor, rows: slice, states: torch.Tensor, *, is_chunk: bool) -> torch.Tensor:
        """turned: the convolution's outputs [num_tokens, channels] of the step's tokens `rows`; states after them."""


def check_one_rank(tp: TensorParallel, name: str) -> None:
    """Raise UnsupportedModelError for several ranks."""
    if tp.size > 1:
        raise UnsupportedModelError(
            f"{name}: recurrent states are not split over ranks by the engine; use tensor_parallel_size 1"
        )


def move_on(
    mixed: torch.Tensor, step: StepTensors, kv: LayerKV, kernel: torch.Tensor, bias: torch.Tensor | None, rule: Rule,
    activate: Callable[[torch.Tensor], torch.Tensor] = F.silu,
) -> None:  # fmt: skip
    """Move each sequence's state on by its tokens of the step.

    mixed   [num_tokens, channels], what is convolved, and then activated
    kernel  [channels, 1, width]; bias [channels]
    """
    assert not isinstance(kv, HeadKV | LatentKV)
    assert step.state_slots is not None
    assert step.starts_fresh is not None
    (sources, targets), fresh, n = step.state_slots[kv.group], step.starts_fresh, step.num_decodes
    if n:
        inputs, states = _read(kv, sources[:n], fresh[:n])
        window = torch.cat([inputs, mixed[:n, :, None]], -1)
        convolved = (window * kernel[:, 0]).sum(-1)
        turned = activate(convolved if bias is None else convolved + bias)
        kv.write(targets[:n], window[..., 1:], rule(turned, slice(0, n), states, is_chunk=False))
    for i in range(step.num_prefills):
        rows, seq = slice(n + step.prefill_starts[i], n + step.prefill_starts[i + 1]), slice(n + i, n + i + 1)
        inputs, states = _read(kv, sources[seq], fresh[seq])
        window = torch.cat([inputs, mixed[rows].T[None]], -1)
        turned = activate(F.conv1d(window, kernel, bias, groups=kernel.shape[0])[0].T)
        last = window[..., window.shape[-1] - kernel.shape[-1] + 1 :]
        kv.write(targets[seq], last, rule(turned, rows, states, is_chunk=True))


def _read(kv: States, slots: torch.Tensor, fresh: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(inputs, states in float32), zero for sequences whose first tokens these are."""
    inputs, states = kv.read(slots)
    return inputs.masked_fill(fresh[:, None, None], 0), states.float().masked_fill(fresh[:, None, None, None], 0)
