"""What one step hands to the layers, as tensors on the device."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.batch import BatchArrays


@dataclass(frozen=True, slots=True)
class GroupTensors:
    """One KV group's view of the step."""

    block_tables: torch.Tensor  # [num_seqs, max_blocks] int32; 0 past a sequence's last block
    slot_mapping: torch.Tensor  # [num_tokens] int64; negative for padding


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The step's sequences in order: first num_decodes with one token each, then those in prefill."""

    token_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    context_lens: torch.Tensor  # [num_seqs] int32, this step included
    query_start: torch.Tensor  # [num_prefills + 1] int32, counted from the first prefill token
    last_tokens: torch.Tensor  # [num_seqs] int64: each sequence's last token of the step, whose logits are wanted
    groups: tuple[GroupTensors, ...]
    num_decodes: int
    max_query_len: int
    prefill_starts: tuple[int, ...]  # query_start on the host
    prefill_context_lens: tuple[int, ...]

    @property
    def num_prefills(self) -> int:
        return len(self.prefill_context_lens)


def on_device(array: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """An array as a tensor; to a GPU it travels while the host goes on."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def step_tensors(arrays: BatchArrays, device: torch.device) -> StepTensors:
    """The scheduler's batch on the device."""
    return StepTensors(
        token_ids=on_device(arrays.token_ids, device),
        positions=on_device(arrays.positions, device),
        context_lens=on_device(arrays.context_lens, device),
        query_start=on_device(arrays.query_start, device),
        last_tokens=on_device(arrays.last_tokens, device),
        groups=tuple(
            GroupTensors(on_device(table, device), on_device(slots, device))
            for table, slots in zip(arrays.block_tables, arrays.slot_mapping, strict=True)
        ),
        num_decodes=arrays.num_decodes,
        max_query_len=int(arrays.prefill_lens.max(initial=0)),
        prefill_starts=tuple(arrays.query_start.tolist()),
        prefill_context_lens=tuple(arrays.context_lens[arrays.num_decodes :].tolist()),
    )
