"""Pipeline parallelism: layers cut into stages, each on ranks of its own, which a batch passes one after the other.

Every rank runs the whole engine with rank 0's requests, as with tensor parallelism. A stage takes over the stream from
the one before, adds its layers and hands it on; the last one samples and tells all ranks the tokens. While a batch is
in a later stage the earlier ones run the next: as many are in flight as there are stages (vLLM's batch queue).

On a CPU ranks talk over gloo, on a GPU over NCCL; no GPU has run it, and there it wants enforce_eager.
"""

from collections.abc import Sequence as Several
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from engine import resolve
from engine.batch import BatchArrays
from engine.config import EngineConfig, SamplingParams
from engine.kv_cache import KVCache, LayerGroup
from engine.layers import Builder
from engine.loader import WeightSource
from engine.masks import TokenMask
from engine.memory import PeakMeter
from engine.model_runner import ModelRunner
from engine.models import Layer, Model
from engine.prompt_logprobs import PromptRows, PromptScores
from engine.sampler import LogprobRows, Sampled, SampledAhead
from engine.staging import AsyncCopy
from engine.step import StepTensors, step_tensors
from engine.tp import GROUP_TIMEOUT, TensorParallel
from engine.warm_up import blank_step, lengths
from kvplan.core.errors import SettingError


def layers_of(num_layers: int, stage: int, num_stages: int, partition: str | None = None) -> range:
    """The layers of a stage: as the partition says, or as even as vLLM 0.33 has them (`distributed/utils.py`).

    What does not divide evenly goes to the last stages but the very last, which has the head.
    """
    counts = [num_layers // num_stages] * num_stages
    for i in range(2, num_layers % num_stages + 2):
        counts[-i] += 1
    if partition is not None:
        counts = [int(text) for text in partition.split(",")]
        if len(counts) != num_stages or sum(counts) != num_layers:
            problem = f"must be {num_stages} numbers that add up to {num_layers} layers ({partition})"
            raise SettingError("", ("pp_layer_partition",), problem, "change it or remove it")
    if not all(counts):
        problem = f"{num_stages} stages of {num_layers} layers would leave one without any"
        raise SettingError("", ("pipeline_parallel_size",), problem, "lower it")
    end = list(accumulate(counts))[stage]
    return range(end - counts[stage], end)


def groups_on(groups: tuple[LayerGroup, ...], layers: range) -> tuple[LayerGroup, ...]:
    """The groups of the whole model with a stage's layers alone, of which a group may have none.

    All ranks share one scheduler, so that all have the same groups (vLLM 0.33, `v1/core/kv_cache_planning.py`).
    """
    return tuple(replace(group, layers=tuple(i for i in group.layers if i in layers)) for group in groups)


class StageModel(Model):
    """A stage's layers; the first one has the embedding too, and the last one final norm and head.

    What goes from stage to stage is what a layer gets from the one before: two tensors [num_tokens, hidden], not added
    yet. They lie in a buffer on either side.
    """

    def __init__(self, config: EngineConfig, spec: Any, source: WeightSource, kernels: Any, tp: TensorParallel,
                 *facts: Any) -> None:  # fmt: skip
        self.tp, self.config = tp, config
        self.mine = layers_of(spec.num_layers, tp.stage, tp.num_stages, config.pp_layer_partition)
        self.first_layer, self.has_head = self.mine.start, tp.stage == tp.num_stages - 1
        self._handing_on: dist.Work | None = None
        super().__init__(spec, source, kernels, tp, *facts)

    def build(self, builder: Builder) -> None:
        spec, is_first = self.spec, self.tp.stage == 0
        if is_first or (self.has_head and spec.tied):
            self.build_embedding(builder)
        if is_first:
            self.build_positions(builder)
        self.layers = [Layer(self, builder, spec, i) for i in self.mine]
        if self.has_head:
            self.build_head(builder)
        builder.source.finish(spec.num_layers, lambda layer: layer is None or layer not in self.mine)
        size = 2 * self.config.max_num_batched_tokens * spec.hidden_size
        if not is_first:
            self._taken = builder.buffer(size, dtype=builder.dtype)
        if not self.has_head:
            self._handed = builder.buffer(size, dtype=builder.dtype)

    def _stream(self, buffer: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """[2, num_tokens, hidden] of a buffer."""
        return buffer[: 2 * num_tokens * self.spec.hidden_size].view(2, num_tokens, -1)

    def enter(self, step: StepTensors) -> tuple[torch.Tensor, torch.Tensor]:
        if self.tp.stage == 0:
            return super().enter(step)
        stream = self._stream(self._taken, len(step.token_ids))
        dist.recv(stream, dist.get_rank() - self.tp.size)
        return stream[0], stream[1]

    def leave(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if self.has_head:
            return super().leave(x, residual)
        if self._handing_on is not None:  # the batch before is still in the buffer
            self._handing_on.wait()
        stream = self._stream(self._handed, len(x))
        stream[0], stream[1] = x, residual
        self._handing_on = dist.isend(stream, dist.get_rank() + self.tp.size)
        return x


class StageRunner(ModelRunner):
    """Runs a stage's part of every step; what it returns are the last stage's tokens, on all ranks."""

    model: StageModel

    @torch.inference_mode()
    def run(
        self, arrays: BatchArrays, params: list[SamplingParams], masks: Several[TokenMask | None] = ()
    ) -> SampledAhead:
        """Launch a step, of which no token is in flight in another one."""
        with self._on_device():
            expected = Expected.of(arrays, params, self.sampler.logprob_rows(params), self.spec.vocab_size)
            words = torch.empty(expected.num_words, dtype=torch.int32, device=self.device)
            hidden, last = self._all_hidden(arrays)
            if self.model.has_head:
                scores = expected.prompts and expected.prompts.score(
                    hidden, self.model.logits, self.spec.vocab_size, self._num_logit_rows
                )
                rows = hidden[last]
                del hidden
                batch = self.sampler.prepare(arrays.seqs, params, masks=masks)
                sampled = self._sample(self.model.logits(rows), batch)
                words = torch.cat([sampled.words(), *(scores.words() if scores else ())])
            elif any(masks):  # a grammar that fails has to fail on every rank
                self.sampler.prepare(arrays.seqs, params, masks=masks)
            first_of_last = self.tp.size * (self.tp.num_stages - 1)
            work = dist.broadcast(words, first_of_last, group=words_group(), async_op=True)
            return expected.read(words, work)

    @torch.inference_mode()
    def _load(self, source: WeightSource, device: torch.device) -> StageModel:
        self._check_graphs()
        adapters = resolve.adapters(self.config)
        return StageModel(
            self.config, self.spec, source, self.kernels, self.tp, self.dtype, device, self.max_model_len, adapters
        )

    def _check_graphs(self) -> None:
        if self.device.type == "cuda" and not self.config.enforce_eager:
            problem = "runs without CUDA graphs, and {1} is False"
            raise SettingError("", ("pipeline_parallel_size", "enforce_eager"), problem, "set {1} to True")

    @torch.inference_mode()
    def _profile_run(self) -> int:
        if self.model.has_head:
            return super()._profile_run()
        with PeakMeter(self.device) as meter:
            self._hidden(step_tensors(self._largest_step(), self.device))
        return meter.peak

    @torch.inference_mode()
    def _launch_every_variant(self) -> None:
        config = self.config
        if self.model.has_head:
            super()._launch_every_variant()
        elif self.backend.compiles:
            for lens in lengths(config.num_seqs, config.max_num_batched_tokens, self.max_model_len):
                self._all_hidden(blank_step(*lens, len(self.groups), self.max_blocks))

    def _cache(self, num_blocks: int, device: torch.device | str) -> KVCache:
        """The pool of this stage's layers."""
        whole, self.groups = self.groups, groups_on(self.groups, self.model.mine)
        try:
            return super()._cache(num_blocks, device)
        finally:
            self.groups = whole


# --- the tokens, on all ranks -------------------------------------------------------------------------------------


@cache
def words_group() -> dist.ProcessGroup:
    """All ranks once more, for tokens alone: they must not wait behind a stream that is handed on."""
    group: dist.ProcessGroup = dist.new_group(timeout=GROUP_TIMEOUT)
    return group


@dataclass(frozen=True, slots=True)
class Announced(AsyncCopy):
    """Words that the last stage tells: read them when they have come."""

    work: dist.Work

    def wait(self) -> torch.Tensor:
        self.work.wait()
        return self.on_host.cpu()


@dataclass(frozen=True, slots=True)
class Expected:
    """What the last stage will tell of a step, which all ranks know the shape of."""

    num_seqs: int
    logprob_rows: LogprobRows | None
    num_sampled: int  # words of the sampled tokens and their log-probabilities
    prompts: PromptRows | None
    num_top: int  # of each row of prompts

    @classmethod
    def of(
        cls, arrays: BatchArrays, params: list[SamplingParams], logprob_rows: LogprobRows | None, vocab_size: int
    ) -> "Expected":
        prompts, num_sampled = PromptRows.of(arrays, params), 2 * len(arrays.seqs)
        if logprob_rows is not None:
            num_sampled += len(logprob_rows.order) * (1 + 2 * min(max(logprob_rows.nums), vocab_size))
        num_top = 0 if prompts is None else min(max(prompts.nums), vocab_size)
        return cls(len(arrays.seqs), logprob_rows, num_sampled, prompts, num_top)

    @property
    def num_words(self) -> int:
        rows = 0 if self.prompts is None else len(self.prompts.owners)
        return self.num_sampled + rows * (1 + 2 * self.num_top)

    def read(self, words: torch.Tensor, work: dist.Work) -> SampledAhead:
        """The step's tokens, once words [num_words] int32 have come."""
        sampled, scores = words[: self.num_sampled], None
        token_ids, is_bad = sampled[: 2 * self.num_seqs].view(2, -1)
        if self.prompts is not None:
            scores = PromptScores.of_words(self.prompts, words[self.num_sampled :], self.num_top)
        return SampledAhead(Sampled(token_ids, is_bad, self.logprob_rows), Announced(sampled, None, work), scores)
