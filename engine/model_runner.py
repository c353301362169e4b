"""Runs a step on the device: weights, KV cache, CUDA graphs and sampling; it decides how, never who."""

import gc
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Several
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine import attention, resolve
from engine.batch import BatchArrays
from engine.block_manager import cdiv
from engine.config import MOST_LOGPROBS, EngineConfig, SamplingParams
from engine.cuda_graphs import DecodeGraphs, sizes_for
from engine.kernels import torch_backend
from engine.kernels.verified import Verified, fallbacks_of
from engine.kv_cache import KVCache, first_paged, group_layers
from engine.loader import NoWeights, WeightSource
from engine.masks import TokenMask
from engine.memory import HostRoom, MemoryReport, PeakMeter, device_memory, nbytes, requested, size_text
from engine.models import Model
from engine.prompt_logprobs import PromptRows, PromptScores
from engine.sampler import Deferred, Sampled, SampledAhead, Sampler, SamplingBatch, sample
from engine.sequence import Sequence
from engine.staging import DownloadRing, UploadRing
from engine.state_slots import are_in_blocks
from engine.step import StepTensors, step_tensors
from engine.tp import TensorParallel, local_size
from engine.warm_up import SMALL_BLOCKS, blank_step, lengths, samplings, small_steps
from kvplan.core.errors import EnvironmentProblem, UnsupportedModelError, UsageError
from kvplan.models.spec import LatentAttention, ModelSpec

if TYPE_CHECKING:
    from engine.draft_model import DraftModel

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}

# What holds most while a token is drawn: tables of what each row has seen, a copy of the logits, and a sort.
LARGEST_SAMPLING = SamplingParams(
    top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, logprobs=MOST_LOGPROBS
)


class ModelRunner:
    """Start-up in the order of a real server: weights, profile run, pool, graphs; then step after step."""

    def __init__(
        self, spec: ModelSpec, config: EngineConfig, source: WeightSource, tp: TensorParallel, device: torch.device,
        max_model_len: int, on_stage: Callable[[str], None], companions: "tuple[DraftModel, ...]" = (),
    ) -> None:  # fmt: skip
        """on_stage is called with the name of each stage as it begins: weights, profile_run, pool, graphs.

        companions  other models loaded with the main one, each with its own part of every block

        Raises EnvironmentProblem where the device's memory does not do, with what was needed and what there was.
        """
        self.spec, self.config, self.tp, self.device, self.max_model_len = spec, config, tp, device, max_model_len
        self.companions = companions
        with self._on_device():
            self._start(source, on_stage)

    def _start(self, source: WeightSource, on_stage: Callable[[str], None]) -> None:
        spec, config, device = self.spec, self.config, self.device
        self.backend = attention.load(config.backend, device.type)
        self.kernels = Verified(self.backend.run, torch_backend) if self.backend.compiles else self.backend.run
        self.dtype = DTYPES[spec.dtype if config.dtype == "auto" else config.dtype]
        self.kv_dtype = self.dtype if config.kv_cache_dtype == "auto" else DTYPES[config.kv_cache_dtype]
        self._check_kv_dtype()
        self.groups = group_layers(spec, config.block_size, with_states=are_in_blocks(spec, config))
        self._check_kernels()
        self.total = min(config.memory_limit or 2**63, device_memory(device)[1])
        self._others = 0  # bytes of other tensors of this process
        self.host: HostRoom | None = None  # of a CPU, once the weights are loaded
        if device.type == "cuda":
            gc.collect()  # an engine before this one may be garbage that is not collected
            self._others = requested(device)
        self._check_room_for_weights()
        on_stage("weights")
        with _named_when_out_of_memory(device, "the weights"):
            self.model = self._load(source, device)
            for companion in self.companions:
                companion.load(self)
        self._uploads, self._downloads = UploadRing(device), DownloadRing(device)
        self.sampler = Sampler(spec.vocab_size, device=device, seed=config.seed, uploads=self._uploads)
        self.graphs: DecodeGraphs | None = None
        # What the last step's rows sampled, for the next step's token ids.
        self.last_sampled = torch.zeros(config.num_seqs, dtype=torch.int64, device=device)
        on_stage("profile_run")
        with _named_when_out_of_memory(device, f"a step of {config.max_num_batched_tokens} max_num_batched_tokens"):
            workspaces = self._make_workspaces()
            self._compare_kernels()
            self.kv = self._cache(1, self.device)  # one block, which everyone reads
            self.plan = self.backend.plan(spec, self.tp, self.groups, self.kv, self.dtype)
            activations = self._profile_run()
            self._launch_every_variant()
            del self.kv
            activations = max(
                [activations, *(companion.profile(self._largest_step()) for companion in self.companions)]
            )
        self.memory = self._size_pool(activations, workspaces)
        on_stage("pool")
        with _named_when_out_of_memory(device, f"a KV pool of {self.memory.num_blocks} blocks"):
            self.kv = self._cache(self.memory.num_blocks, device)
            for companion in self.companions:
                companion.allocate(self.memory.num_blocks)
        if device.type == "cuda" and not config.enforce_eager and self.backend.can_be_captured:
            on_stage("graphs")
            with _named_when_out_of_memory(device, "capturing CUDA graphs"):
                self.graphs = self._graphs_or_none()

    @torch.inference_mode()
    def run(
        self, arrays: BatchArrays, params: list[SamplingParams], masks: Several[TokenMask | None] = ()
    ) -> SampledAhead | Deferred:
        """Launch a step: a token for each of the arrays' sequences, in their order; the host waits for none of them.

        Where a mask depends on a token in flight, the tokens are chosen when that is known; until then the device
        computes the logits, and the next step has to wait.
        """
        with self._on_device():
            prompts, scores = PromptRows.of(arrays, params), None
            if prompts is None:
                logits = self.logits(arrays)
            else:
                hidden, last = self._all_hidden(arrays)
                scores = prompts.score(hidden, self.model.logits, self.spec.vocab_size, self._num_logit_rows)
                logits = self.model.logits(hidden[last])
                del hidden
            choose = partial(self._choose, logits, arrays.seqs, params, masks, scores)
            has_to_wait = any(
                mask is not None and mask.needs_tokens and seq.num_placeholders > 1
                for seq, mask in zip(arrays.seqs, masks, strict=False)
            )
            return Deferred(choose) if has_to_wait else choose()

    @torch.inference_mode()
    def _choose(
        self, logits: torch.Tensor, seqs: list[Sequence], params: list[SamplingParams],
        masks: Several[TokenMask | None], scores: PromptScores | None,
    ) -> SampledAhead:  # fmt: skip
        with self._on_device():
            sampled = self._sample(logits, self.sampler.prepare(seqs, params, self.last_sampled, masks=masks))
            self.last_sampled[: len(seqs)] = sampled.token_ids
            return sampled.download(self._downloads, scores)

    def _all_hidden(self, arrays: BatchArrays) -> tuple[torch.Tensor, torch.Tensor]:
        """[num_tokens, hidden_size] without a CUDA graph, and each sequence's last token."""
        self._uploads.next_step()
        self.model.adapters.begin(arrays, self._uploads)
        step = step_tensors(arrays, self.device, self._uploads, *self.plan)
        return self._hidden(step), step.last_tokens

    @torch.inference_mode()
    def run_rows(
        self, arrays: BatchArrays, seqs: list[Sequence], params: list[SamplingParams], offsets: list[int],
        masks: Several[TokenMask | None],
    ) -> SampledAhead:  # fmt: skip
        """Launch a step of which no token is in flight: one for each of the arrays' logit_tokens, of which a sequence
        may have several; offsets: how far behind its known tokens each of them is."""
        with self._on_device():
            logits = self.logits(arrays)
            sampled = self._sample(logits, self.sampler.prepare(seqs, params, offsets=offsets, masks=masks))
            return sampled.download(self._downloads)

    def _sample(self, logits: torch.Tensor, batch: SamplingBatch) -> Sampled:
        sampled = sample(logits, batch, self.kernels)
        for tensor in (sampled.token_ids, sampled.is_bad):  # ranks must agree on what was sampled, to the bit
            self.tp.broadcast(tensor)
        return sampled

    def logits(self, arrays: BatchArrays) -> torch.Tensor:
        """[num_seqs, vocab_size] in a dtype that the kernels sample from, of each sequence's last token."""
        self._uploads.next_step()
        self.model.adapters.begin(arrays, self._uploads)
        hidden = None if self.graphs is None else self.graphs(arrays)
        if hidden is None:
            return self.forward(step_tensors(arrays, self.device, self._uploads, *self.plan))
        return self.model.logits(hidden)

    def forward(self, step: StepTensors) -> torch.Tensor:
        """Logits [num_seqs, vocab_size] of each sequence's last token, without a CUDA graph."""
        return self.model.logits(self._hidden(step)[step.last_tokens])

    def _hidden(self, step: StepTensors) -> torch.Tensor:
        """[num_tokens, hidden_size]; tokens that only the device knows are put into the step first."""
        ids = step.token_ids
        torch.where(ids < 0, self.last_sampled[(~ids).clamp_(min=0)], ids, out=ids)
        return self.model.forward(step, self.kv)

    @torch.inference_mode()
    def scrub(self, blocks: list[int]) -> None:
        """Zero these blocks: a NaN would spread to the next sequence that gets them."""
        for tensor in (*self.kv.tensors, *(tensor for companion in self.companions for tensor in companion.tensors)):
            raw = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
            raw[blocks] = 0

    def _on_device(self) -> AbstractContextManager[object]:
        """Make the engine's GPU the current one; another engine or thread may have changed it."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    # --- start-up -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _load(self, source: WeightSource, device: torch.device) -> Model:
        adapters = resolve.adapters(self.config)
        return Model(self.spec, source, self.kernels, self.tp, self.dtype, device, self.max_model_len, adapters)

    def _check_kv_dtype(self) -> None:
        """Refuse a KV dtype that the kernels cannot read, and a scale that would not be used."""
        is_fp8, name = self.kv_dtype == torch.float8_e4m3fn, self.config.kv_cache_dtype
        if self.config.kv_scale != 1 and not is_fp8:
            raise UsageError(f"kv_scale: only an fp8 cache has one ({self.config.kv_scale:g}); leave it at 1")
        if not self.backend.supports_cache(self.kv_dtype, self.dtype):
            raise UsageError(
                f"kv_cache_dtype: on a GPU the cache has the model's dtype or fp8 ({name}); use auto or fp8"
            )

    def _check_kernels(self) -> None:
        """Refuse unsupported shapes before anything is loaded."""
        reason = self.backend.unsupported(self.spec, self.tp, self.config.block_size, self.dtype, self.kv_dtype)
        if reason is not None:
            raise UnsupportedModelError(f"{self.spec.name}: {reason}")

    def _check_room_for_weights(self) -> None:
        """Refuse weights that will not fit before reading any, by building the model on the meta device."""
        shape_only = self._load(NoWeights(), torch.device("meta"))
        needed = nbytes(shape_only.weights) + nbytes(list(shape_only.buffers.values())) + shape_only.adapters.num_bytes
        free = min(self.total, device_memory(self.device)[0])
        if needed > free:
            raise EnvironmentProblem(
                f"{self.spec.name}: its weights need {size_text(needed)} on {self.device}, {size_text(free)} are free; "
                "use a larger device, more ranks (tensor_parallel_size) or a smaller dtype"
            )

    @torch.inference_mode()
    def _make_workspaces(self) -> int:
        """Bytes of workspaces that cuBLAS allocates at the first matrix product."""
        if self.device.type != "cuda":
            return 0
        square = torch.zeros(16, 16, dtype=self.dtype, device=self.device)
        for bias in (None, square[0]):  # without a bias and with one are two libraries, each with its own
            torch.nn.functional.linear(square, square, bias)
        size = requested(self.device) - square.nbytes - self._others
        return max(0, size - sum(self._loaded()) - self.model.adapters.num_bytes)

    def _loaded(self) -> tuple[int, int]:
        """Bytes of weights and of buffers, of all models."""
        weights, buffers = nbytes(self.model.weights), nbytes(list(self.model.buffers.values()))
        for companion in self.companions:
            weights, buffers = weights + companion.weights, buffers + companion.buffers
        return weights, buffers

    @torch.inference_mode()
    def _compare_kernels(self) -> None:
        """Compare every kernel that small steps of this model launch with plain torch, and replace what is wrong."""
        if not isinstance(self.kernels, Verified):
            return
        self.kv = self._cache(1 + SMALL_BLOCKS, self.device)
        for tensor in self.kv.tensors:
            tensor.copy_(torch.randn(tensor.shape, device=self.device))
        self.plan = self.backend.plan(self.spec, self.tp, self.groups, self.kv, self.dtype)
        with self.kernels.compared():
            for step in small_steps(len(self.groups), self.config.block_size, self.max_blocks, self.max_model_len):
                logits = self.logits(step)
            self._sample_every_way(logits)
        del self.kv

    @torch.inference_mode()
    def _profile_run(self) -> int:
        """Peak bytes of the largest step, without weights."""
        largest = self._largest_step()
        self.model.adapters.begin(largest)
        with PeakMeter(self.device) as meter:
            logits = self.forward(step_tensors(largest, self.device))
            seqs = [Sequence(str(i), [0], 1) for i in range(logits.shape[0])]
            sampler = Sampler(self.spec.vocab_size, device=self.device, uploads=self._uploads)
            sample(logits, sampler.prepare(seqs, [LARGEST_SAMPLING] * len(seqs)), self.kernels)
        return meter.peak

    @torch.inference_mode()
    def _launch_every_variant(self) -> None:
        """Compile and load every kernel that serving may launch, before the pool is sized."""
        if not self.backend.compiles:
            return
        config = self.config
        for query_lens, context_lens in lengths(config.num_seqs, config.max_num_batched_tokens, self.max_model_len):
            logits = self.logits(blank_step(query_lens, context_lens, len(self.groups), self.max_blocks))
        self._sample_every_way(logits)

    def _sample_every_way(self, logits: torch.Tensor) -> None:
        for params in samplings():
            sampler = Sampler(self.spec.vocab_size, device=self.device)
            seqs = [Sequence(str(i), [0], 1) for i in range(len(params))]
            rows = logits[:1].expand(len(params), -1).contiguous()
            sample(rows, sampler.prepare(seqs, params), self.kernels)

    def _largest_step(self) -> BatchArrays:
        """The largest step: max_num_batched_tokens tokens in max_num_seqs sequences, with the fewest prefills."""
        tokens = self.config.max_num_batched_tokens
        num_seqs = min(self.config.num_seqs, tokens)
        # Decodes first; each prefill takes up to max_model_len - 1 tokens more than the decode in its place would.
        query_lens = np.ones(num_seqs, np.int64)
        extra = tokens - num_seqs
        for i in reversed(range(num_seqs)):
            query_lens[i] += min(extra, self.max_model_len - 1)
            extra -= query_lens[i] - 1
        has_latents = isinstance(first_paged(self.spec), LatentAttention)
        context_lens = np.where(query_lens > 1, self.max_model_len, 1) if has_latents else query_lens
        step = blank_step(query_lens, context_lens, len(self.groups), self.max_blocks)
        # The profile's pool has one block, which everyone's states are in.
        of_seq = np.zeros(num_seqs, np.int64) if are_in_blocks(self.spec, self.config) else np.arange(num_seqs)
        slots = np.tile(of_seq, (len(self.groups), 2, 1)) if self.spec.has_states else None
        return replace(step, logit_tokens=np.resize(step.last_tokens, self._num_logit_rows), state_slots=slots)

    @property
    def _num_logit_rows(self) -> int:
        """Rows of logits that memory is kept for: with drafts, a sequence has several."""
        tokens = self.config.max_num_batched_tokens
        return min(min(self.config.num_seqs, tokens) * self.config.rows_per_seq, tokens)

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest request in one group of layers."""
        return cdiv(self.max_model_len, self.config.block_size)

    def _cache(self, num_blocks: int, device: torch.device | str) -> KVCache:
        cache = KVCache(
            self.spec, self.groups, num_blocks, self.config.block_size, self.kv_dtype, device, self.tp,
            self.config.kv_scale,
        )  # fmt: skip
        self.state_bytes = cache.add_states(self.spec, self.groups, self.config.num_seqs, self.dtype, device)
        return cache

    def _size_pool(self, activations: int, workspaces: int) -> MemoryReport:
        """Size the pool from what gpu_memory_utilization leaves, unless num_blocks is given."""
        weights, buffers = self._loaded()
        ranks = local_size(self.tp.num_ranks)
        self.host = HostRoom(device_memory(self.device)[0], ranks) if self.device.type == "cpu" else None
        budget = int(self.total * self.config.gpu_memory_utilization)
        non_torch = workspaces + self._others
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            free, total = device_memory(self.device)
            non_torch += total - free - torch.cuda.memory_reserved(self.device)
        block_bytes = self._cache(1, "meta").num_bytes + sum(companion.block_bytes for companion in self.companions)
        lora = self.model.adapters.num_bytes
        states = self.state_bytes
        left = budget - weights - buffers - lora - activations - non_torch - states
        is_short_host = False
        if self.host is not None:
            is_short_host = self.host.size < left // self.host.ranks
            left = min(left // self.host.ranks, self.host.size)
        num_blocks = self.config.num_blocks or self.tp.smallest(left // block_bytes)
        if self.host is not None:
            num_blocks = self._blocks_on_host(self.host, num_blocks, block_bytes)
        if num_blocks < 2:
            raise EnvironmentProblem(
                f"{self.spec.name}: no memory is left for KV: {budget:,} bytes may be used (gpu_memory_utilization "
                f"{self.config.gpu_memory_utilization:g} of {self.total:,}), weights take {weights:,}, buffers "
                f"{buffers:,}, {f'adapters {lora:,}, ' * (lora > 0)}activations {activations:,}, others {non_torch:,}"
                f"{is_short_host * ', and others most of the memory of the host'}; lower max_num_batched_tokens or "
                "use a larger device"
            )
        return MemoryReport(
            weights=weights, buffers=buffers, activations=activations, kv_cache=num_blocks * block_bytes + states,
            cuda_graphs=0, non_torch=non_torch, workspaces=workspaces, graph_tensors=0, total=self.total, budget=budget,
            num_blocks=num_blocks, block_bytes=block_bytes, lora=lora, fallbacks=fallbacks_of(self.kernels),
        )  # fmt: skip

    def _blocks_on_host(self, host: HostRoom, num_blocks: int, block_bytes: int) -> int:
        """A CPU's number of blocks: as configured if the host has room, else no more than could ever be used."""
        if self.config.num_blocks is None:
            return min(num_blocks, 1 + self.config.num_seqs * self.max_blocks * len(self.groups))
        if num_blocks * block_bytes * host.ranks > host.free:  # Linux would grant it, and end the process later
            raise EnvironmentProblem(
                f"{self.device}: a KV pool of {num_blocks} blocks did not fit: {host.free:,} of {self.total:,} bytes "
                f"are free ({num_blocks * block_bytes * host.ranks:,} needed); lower num_blocks"
            )
        return num_blocks

    def _graphs_or_none(self) -> DecodeGraphs | None:
        """The graphs; None where they cannot be captured for another reason than memory: steps are then eager."""
        try:
            return self._capture_graphs()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0][:200]}"
            self.memory = replace(self.memory, fallbacks={**self.memory.fallbacks, "CUDA graphs": why})
            return None

    @torch.inference_mode()
    def _capture_graphs(self) -> DecodeGraphs:
        """Capture CUDA graphs and report their bytes, which come on top of the pool."""
        sizes = sizes_for(self.config.num_seqs)
        hidden = torch.zeros(max(sizes), self.spec.hidden_size, dtype=self.dtype, device=self.device)
        graphs = DecodeGraphs(
            self._hidden, sizes, len(self.groups), self.max_blocks, hidden, self._uploads, self.plan.planners
        )
        self.memory = replace(
            self.memory,
            cuda_graphs=graphs.shared_bytes + sum(graphs.num_bytes.values()),
            graph_tensors=graphs.shared_bytes + graphs.reserved_bytes,
        )
        return graphs


@contextmanager
def _named_when_out_of_memory(device: torch.device, what: str) -> Iterator[None]:
    """Turn an allocation failure into an error that says what did not fit and what was free."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError on a GPU; on a CPU a RuntimeError of the allocator
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        free, total = device_memory(device)
        reason = str(error).splitlines()[0]
        raise EnvironmentProblem(
            f"{device}: {what} did not fit: {free:,} of {total:,} bytes are free ({reason}); "
            "lower max_num_batched_tokens, num_blocks or gpu_memory_utilization, or use a larger device"
        ) from error
