"""A small model that guesses: it reads what the model read, in blocks of the same numbers, and says what it would go on
with.

After each batch it computes the batch's tokens and each sequence's new one, so that it knows every block that the model
knows, those that later requests share too; then it goes on alone, a token at a time, always with the most likely one.
Its KV lies beside the model's: a block has a part for each of them. It runs without CUDA graphs.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from engine.batch import BatchArrays
from engine.block_manager import FullGroup
from engine.directory import read_spec
from engine.kv_cache import KVCache, group_layers
from engine.loader import Checkpoint, RandomWeights, WeightSource
from engine.memory import PeakMeter, nbytes
from engine.model_runner import ModelRunner
from engine.models import Model
from engine.scheduler import Batch
from engine.sequence import Sequence
from engine.step import StepTensors, step_tensors
from engine.warm_up import blank_step, lengths
from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DraftRow:
    """Tokens of one sequence to be computed, the first at `start`, in these blocks."""

    token_ids: list[int]
    start: int
    blocks: list[int]


class DraftModel:
    """A Proposer (engine/proposer.py) that is loaded beside the model, as its companion (engine/model_runner.py)."""

    def __init__(self, model: ModelSpec | str | Path, load_format: str, seed: int) -> None:
        """model  a directory with weights, or a ModelSpec where they are random"""
        self.spec = model if isinstance(model, ModelSpec) else read_spec(Path(model))
        if isinstance(model, ModelSpec) and load_format != "dummy":
            raise UsageError("speculative_config: a ModelSpec has no weights; give a directory, or load_format='dummy'")
        self._directory = None if isinstance(model, ModelSpec) or load_format == "dummy" else Path(model)
        self._seed = seed

    # --- beside a model -----------------------------------------------------------------------------------------

    def load(self, runner: ModelRunner) -> None:
        """Load its weights; raises if it does not match the runner's model."""
        self._runner = runner
        self._check(runner)
        self.groups = group_layers(self.spec, runner.config.block_size)
        source: WeightSource = RandomWeights(self._seed, runner.device)
        if self._directory is not None:
            source = Checkpoint(self._directory)
        with torch.inference_mode():
            self.model = Model(
                self.spec, source, runner.kernels, runner.tp, runner.dtype, runner.device, runner.max_model_len
            )

    def _check(self, runner: ModelRunner) -> None:
        """Refuse a model that cannot draft for this one."""
        spec, name = self.spec, f"speculative_config: {self.spec.name}"
        if spec.vocab_size != runner.spec.vocab_size:
            raise UsageError(
                f"{name} has {spec.vocab_size} tokens in its vocabulary, {runner.spec.name} {runner.spec.vocab_size}; "
                "name a draft of the same family"
            )
        if spec.context_limit < runner.max_model_len:
            raise UsageError(
                f"{name} has {spec.context_limit} positions, and requests may have {runner.max_model_len} tokens; "
                "lower max_model_len"
            )
        kinds = {type(group.rule) for group in (*group_layers(spec, 1), *runner.groups)}
        if kinds != {FullGroup} or len(runner.groups) != 1 or spec.has_states:
            raise UnsupportedModelError(
                f"{name} and {runner.spec.name}: a draft model works where every layer of both keeps all tokens; "
                "use the method ngram"
            )
        reason = runner.backend.unsupported(spec, runner.tp, runner.config.block_size, runner.dtype, runner.kv_dtype)
        if reason is not None:
            raise UnsupportedModelError(f"{name}: {reason}")

    @property
    def weights(self) -> int:
        """Bytes of its weights (`buffers`: of its buffers)."""
        return nbytes(self.model.weights)

    @property
    def buffers(self) -> int:
        return nbytes(list(self.model.buffers.values()))

    @property
    def block_bytes(self) -> int:
        """Bytes of its part of a block."""
        return self._cache(1, "meta").num_bytes

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors of its part of the pool."""
        return self.kv.tensors

    @torch.inference_mode()
    def profile(self, largest: BatchArrays) -> int:
        """Peak bytes of a step without weights; compiles every kernel that serving may launch."""
        runner = self._runner
        self.allocate(1)
        step = replace(largest, logit_tokens=None)
        with PeakMeter(runner.device) as meter:
            self._guess(step_tensors(step, runner.device))
        if runner.backend.compiles:
            config = runner.config
            for query_lens, context_lens in lengths(
                config.num_seqs, config.max_num_batched_tokens, runner.max_model_len
            ):
                self._guess(self._step(blank_step(query_lens, context_lens, 1, runner.max_blocks)))
        del self.kv
        return meter.peak

    def allocate(self, num_blocks: int) -> None:
        """Make the tensors of its part of the pool."""
        runner = self._runner
        self.kv = self._cache(num_blocks, runner.device)
        self._plan = runner.backend.plan(self.spec, runner.tp, self.groups, self.kv, runner.dtype)

    def _cache(self, num_blocks: int, device: torch.device | str) -> KVCache:
        runner = self._runner
        return KVCache(
            self.spec, self.groups, num_blocks, runner.config.block_size, runner.kv_dtype, device, runner.tp,
            runner.config.kv_scale,
        )  # fmt: skip

    # --- proposing ----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(
        self, batch: Batch, arrays: BatchArrays, wanting: list[Sequence], num_drafts: int
    ) -> dict[Sequence, list[int]]:
        limit = self._runner.max_model_len
        wanting = [seq for seq in wanting if num_drafts and seq.num_tokens + num_drafts <= limit]
        rows = self._catch_up(batch, arrays)
        if not rows:
            return {}
        order = sorted(rows, key=lambda seq: len(rows[seq].token_ids) > 1)  # decodes first
        step = arrays_of([rows[seq] for seq in order], self._runner.config.block_size)
        places = [order.index(seq) for seq in wanting]
        token_ids = self._guess(self._step(replace(step, logit_tokens=step.last_tokens[places])))
        guesses = [token_ids]
        for ahead in range(num_drafts - 1 if wanting else 0):
            decodes = [DraftRow([0], seq.num_tokens + ahead, seq.block_table[0]) for seq in wanting]
            step_ahead = self._step(arrays_of(decodes, self._runner.config.block_size))
            guesses.append(self._guess(replace(step_ahead, token_ids=guesses[-1])))
        drafts: list[list[int]] = torch.stack(guesses, dim=1).tolist()
        return dict(zip(wanting, drafts, strict=True))

    def _catch_up(self, batch: Batch, arrays: BatchArrays) -> dict[Sequence, DraftRow]:
        """What the batch computed, and its new tokens; of one that has ended, what later requests may share."""
        rows: dict[Sequence, DraftRow] = {}
        for place, seq in enumerate(arrays.seqs):
            end = int(arrays.context_lens[place])
            start = end - batch.num_tokens[seq]
            if seq.status == "running":
                blocks = seq.block_table[0]
                end = end if seq.is_prefill_chunk else seq.num_tokens
            else:
                blocks = arrays.block_tables[0][place].tolist()
            token_ids = seq.token_ids[start:end]
            if token_ids and seq.status != "preempted" and seq.error is None:
                rows[seq] = DraftRow(token_ids, start, blocks)
        return rows

    def _step(self, arrays: BatchArrays) -> StepTensors:
        return step_tensors(arrays, self._runner.device, None, *self._plan)

    def _guess(self, step: StepTensors) -> torch.Tensor:
        """[num_rows] the most likely next token of each row."""
        hidden = self.model.forward(step, self.kv)[step.last_tokens]
        token_ids = self.model.logits(hidden).argmax(dim=-1)
        self._runner.tp.broadcast(token_ids)  # ranks must agree
        return token_ids


def arrays_of(rows: list[DraftRow], block_size: int) -> BatchArrays:
    """Rows as a step's arrays, those of one token first."""
    lens = np.array([len(row.token_ids) for row in rows], np.int64)
    starts = np.concatenate(([0], np.cumsum(lens)))
    ends = np.array([row.start for row in rows], np.int64) + lens
    tables = np.zeros((len(rows), -(-int(ends.max()) // block_size)), np.int32)
    for table, row in zip(tables, rows, strict=True):
        known = row.blocks[: len(table)]
        table[: len(known)] = known
    owners = np.repeat(np.arange(len(rows)), lens)
    positions = np.arange(starts[-1]) - np.repeat(starts[1:] - ends, lens)
    slots = tables[owners, positions // block_size].astype(np.int64) * block_size + positions % block_size
    num_decodes = int((lens == 1).sum())
    return BatchArrays(
        seqs=[],
        num_decodes=num_decodes,
        token_ids=np.array([token for row in rows for token in row.token_ids], np.int64),
        positions=positions,
        context_lens=ends.astype(np.int32),
        query_start=(starts[num_decodes:] - starts[num_decodes]).astype(np.int32),
        last_tokens=starts[1:] - 1,
        block_tables=(tables,),
        slot_mapping=(slots,),
        block_sizes=(block_size,),
    )
