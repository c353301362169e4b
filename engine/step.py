"""What one step hands to the layers, as tensors on the device."""

from dataclasses import dataclass

import torch


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
