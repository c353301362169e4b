"""Runs a step on the device: weights, KV cache, CUDA graphs and sampling; it decides how, never who."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from engine import kernels
from engine.batch import BatchArrays, pad, padding
from engine.block_manager import cdiv
from engine.config import EngineConfig, SamplingParams
from engine.kv_cache import KVCache, group_layers
from engine.loader import NoWeights, WeightSource
from engine.memory import MemoryReport, PeakMeter, device_memory, nbytes
from engine.models import Model
from engine.sampler import RandomRows, SampledTokens, Sampler, SamplingBatch, sample
from engine.step import GroupTensors, StepTensors
from engine.tp import TensorParallel
from kvplan.errors import EnvironmentProblem, UsageError
from kvplan.spec import LatentAttention, ModelSpec

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}
# Batch sizes that decode graphs are captured for; a batch runs in the next larger one.
GRAPH_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))


class ModelRunner:
    """Start-up in the order of a real server: weights, profile run, pool, graphs; then step after step."""

    def __init__(
        self, spec: ModelSpec, config: EngineConfig, source: WeightSource, tp: TensorParallel, device: torch.device,
        max_model_len: int, on_stage: Callable[[str], None],
    ) -> None:  # fmt: skip
        """on_stage is called with the name of each stage as it begins: weights, profile_run, pool, graphs.

        Raises EnvironmentProblem where the device's memory does not do, with what was needed and what there was.
        """
        self.spec, self.config, self.tp, self.device, self.max_model_len = spec, config, tp, device, max_model_len
        self.kernels = kernels.load(config.backend, device.type)
        self.dtype = DTYPES[spec.dtype if config.dtype == "auto" else config.dtype]
        self.kv_dtype = self.dtype if config.kv_cache_dtype == "auto" else DTYPES[config.kv_cache_dtype]
        self._check_kv_dtype()
        self.groups = group_layers(spec, config.block_size)
        self.total = min(config.memory_limit or 2**63, device_memory(device)[1])
        self._check_room_for_weights()
        on_stage("weights")
        with _named_when_out_of_memory(device, "the weights"):
            self.model = self._load(source, device)
        on_stage("profile_run")
        with _named_when_out_of_memory(device, f"a step of {config.max_num_batched_tokens} max_num_batched_tokens"):
            activations = self._profile_run()
        self.memory = self._size_pool(activations)
        on_stage("pool")
        with _named_when_out_of_memory(device, f"a KV pool of {self.memory.num_blocks} blocks"):
            self.kv = self._cache(self.memory.num_blocks, device)
        self.sampler = Sampler(spec.vocab_size, device=device, seed=config.seed)
        self.graphs: dict[int, DecodeGraph] = {}
        if device.type == "cuda" and not config.enforce_eager and config.backend != "torch":
            on_stage("graphs")
            self._capture_graphs()

    @torch.inference_mode()
    def run(self, arrays: BatchArrays, params: list[SamplingParams]) -> SampledTokens:
        """One step: a token for each of the arrays' sequences, in their order."""
        sampled = sample(self.logits(arrays), self.sampler.prepare(arrays.seqs, params))
        self.tp.broadcast(sampled.token_ids)
        return sampled.to_host()

    def logits(self, arrays: BatchArrays) -> torch.Tensor:
        """[num_seqs, vocab_size] float32, of each sequence's last token."""
        size = next((size for size in self.graphs if size >= len(arrays.seqs)), None)
        if size is not None and arrays.num_decodes == len(arrays.seqs):
            return self.graphs[size].replay(arrays)
        return self.forward(step_tensors(arrays, self.device))

    def forward(self, step: StepTensors) -> torch.Tensor:
        hidden = self.model.forward(step, self.kv)
        return self.model.logits(hidden[step.last_tokens])

    @torch.inference_mode()
    def scrub(self, blocks: list[int]) -> None:
        """Make these blocks' KV 0 again: a NaN in them would spread to whoever gets them next."""
        for tensor in self.kv.tensors:
            raw = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
            raw[blocks] = 0

    # --- start-up -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _load(self, source: WeightSource, device: torch.device) -> Model:
        return Model(self.spec, source, self.kernels, self.tp, self.dtype, device, self.max_model_len)

    def _check_kv_dtype(self) -> None:
        """Refuse a KV dtype that the kernels do not read, and a scale that nothing is stored by."""
        is_fp8, name = self.kv_dtype == torch.float8_e4m3fn, self.config.kv_cache_dtype
        if self.config.kv_scale != 1 and not is_fp8:
            raise UsageError(f"kv_scale: only an fp8 cache has one ({self.config.kv_scale:g}); leave it at 1")
        if self.kernels.__name__.endswith("triton_backend") and not is_fp8 and self.kv_dtype != self.dtype:
            raise UsageError(
                f"kv_cache_dtype: on a GPU the cache has the model's dtype or fp8 ({name}); use auto or fp8"
            )

    def _check_room_for_weights(self) -> None:
        """Refuse before anything is read what will not fit: the same model is built without memory and asked."""
        shape_only = self._load(NoWeights(), torch.device("meta"))
        needed = nbytes(shape_only.weights) + nbytes(list(shape_only.buffers.values()))
        free = min(self.total, device_memory(self.device)[0])
        if needed > free:
            raise EnvironmentProblem(
                f"{self.spec.name}: its weights need {needed:,} bytes on {self.device}, {free:,} are free; "
                "use a larger device, more ranks (tensor_parallel_size) or a smaller dtype"
            )

    @torch.inference_mode()
    def _profile_run(self) -> int:
        """Most bytes that the largest step holds beside the weights; its pool is one block that everyone reads."""
        self.kv = self._cache(1, self.device)
        if self.device.type == "cuda":  # cuBLAS makes its workspace at the first product; it is no activation
            square = torch.zeros(16, 16, dtype=self.dtype, device=self.device)
            torch.mm(square, square)
        with PeakMeter(self.device) as meter:
            logits = self.forward(step_tensors(self._largest_step(), self.device))
            num_seqs = logits.shape[0]
            sample(
                logits,
                SamplingBatch(
                    num_seqs,
                    RandomRows(None, logits.new_ones(num_seqs, 1), None, None),
                    torch.zeros(num_seqs, 1, dtype=torch.float64, device=self.device),
                ),
            )
        del self.kv
        return meter.peak

    def _largest_step(self) -> BatchArrays:
        """One long prefill and as many sequences as may run beside it; MLA expands a whole context in prefill."""
        tokens = self.config.max_num_batched_tokens
        num_seqs = min(self.config.max_num_seqs, tokens)
        rest = tokens - num_seqs + 1
        prefills = [self.max_model_len] * (rest // self.max_model_len)
        prefills += [rest % self.max_model_len] if rest % self.max_model_len else []
        query_lens = np.sort(np.array([1] * (num_seqs - len(prefills)) + prefills, np.int64)[:num_seqs])
        has_latents = isinstance(self.spec.layers[0][0], LatentAttention)
        context_lens = np.where(query_lens > 1, self.max_model_len, 1) if has_latents else query_lens
        starts = np.concatenate(([0], np.cumsum(query_lens)))
        num_decodes = int((query_lens == 1).sum())
        num_groups = len(self.groups)
        return BatchArrays(
            seqs=[],
            num_decodes=num_decodes,
            token_ids=np.zeros(starts[-1], np.int64),
            positions=np.zeros(starts[-1], np.int64),
            context_lens=context_lens.astype(np.int32),
            query_start=(starts[num_decodes:] - starts[num_decodes]).astype(np.int32),
            last_tokens=starts[1:] - 1,
            block_tables=(np.zeros((len(query_lens), self.max_blocks), np.int32),) * num_groups,
            slot_mapping=(np.full(starts[-1], -1),) * num_groups,
        )

    @property
    def max_blocks(self) -> int:
        return cdiv(self.max_model_len, self.config.block_size)

    def _cache(self, num_blocks: int, device: torch.device | str) -> KVCache:
        return KVCache(
            self.spec, self.groups, num_blocks, self.config.block_size, self.kv_dtype, device, self.tp,
            self.config.kv_scale,
        )  # fmt: skip

    def _size_pool(self, activations: int) -> MemoryReport:
        """What gpu_memory_utilization leaves beside the rest becomes blocks, unless num_blocks is given."""
        weights, buffers = nbytes(self.model.weights), nbytes(list(self.model.buffers.values()))
        budget = int(self.total * self.config.gpu_memory_utilization)
        non_torch = 0
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            free, total = device_memory(self.device)
            non_torch = total - free - torch.cuda.memory_reserved(self.device)
        block_bytes = self._cache(1, "meta").num_bytes
        left = budget - weights - buffers - activations - non_torch
        num_blocks = self.config.num_blocks or self.tp.smallest(left // block_bytes)
        if self.config.num_blocks is None and self.device.type == "cpu":  # more could never be used
            num_blocks = min(num_blocks, 1 + self.config.max_num_seqs * self.max_blocks * len(self.groups))
        if num_blocks < 2:
            raise EnvironmentProblem(
                f"{self.spec.name}: no memory is left for KV: {budget:,} bytes may be used (gpu_memory_utilization "
                f"{self.config.gpu_memory_utilization:g} of {self.total:,}), weights take {weights:,}, buffers "
                f"{buffers:,}, activations {activations:,}, others {non_torch:,}; lower max_num_batched_tokens or "
                "use a larger device"
            )
        return MemoryReport(
            weights=weights, buffers=buffers, activations=activations, kv_cache=num_blocks * block_bytes,
            cuda_graphs=0, non_torch=non_torch, total=self.total, budget=budget, num_blocks=num_blocks,
            block_bytes=block_bytes,
        )  # fmt: skip

    @torch.inference_mode()
    def _capture_graphs(self) -> None:
        """Largest first, so that the smaller ones reuse its memory; what they take goes into the report."""
        torch.cuda.synchronize(self.device)
        before = device_memory(self.device)[0]
        pool = torch.cuda.graph_pool_handle()
        largest = next((size for size in GRAPH_SIZES if size >= self.config.max_num_seqs), GRAPH_SIZES[-1])
        sizes = [size for size in GRAPH_SIZES if size <= largest]
        captured = {size: DecodeGraph(self, size, pool) for size in reversed(sizes)}
        self.graphs = dict(sorted(captured.items()))
        torch.cuda.synchronize(self.device)
        taken = before - device_memory(self.device)[0]
        self.memory = replace(self.memory, cuda_graphs=taken)


class DecodeGraph:
    """A decode step of `size` sequences, captured once and replayed with other numbers in the same tensors."""

    def __init__(self, runner: ModelRunner, size: int, pool: Any) -> None:
        self.size, self.width = size, runner.max_blocks
        self.step = step_tensors(padding(size, self.width, len(runner.groups)), runner.device)
        runner.forward(self.step)  # compiles kernels and lets libraries allocate before the capture
        torch.cuda.synchronize(runner.device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.logits = runner.forward(self.step)

    def replay(self, arrays: BatchArrays) -> torch.Tensor:
        """Logits [num_seqs, vocab_size]; valid until the next replay."""
        padded = pad(arrays, self.size, self.width)
        for ours, news in zip(
            _tensors(self.step), _tensors(step_tensors(padded, self.step.token_ids.device)), strict=True
        ):
            ours.copy_(news, non_blocking=True)
        self.graph.replay()
        return self.logits[: len(arrays.context_lens)]


def step_tensors(arrays: BatchArrays, device: torch.device) -> StepTensors:
    """The arrays on the device."""

    def tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
        host = torch.from_numpy(np.ascontiguousarray(array))
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host

    num_decodes = arrays.num_decodes
    query_lens = arrays.prefill_lens
    return StepTensors(
        token_ids=tensor(arrays.token_ids),
        positions=tensor(arrays.positions),
        context_lens=tensor(arrays.context_lens),
        query_start=tensor(arrays.query_start),
        last_tokens=tensor(arrays.last_tokens),
        groups=tuple(
            GroupTensors(tensor(table), tensor(slots))
            for table, slots in zip(arrays.block_tables, arrays.slot_mapping, strict=True)
        ),
        num_decodes=num_decodes,
        max_query_len=int(query_lens.max(initial=0)),
        prefill_starts=tuple(arrays.query_start.tolist()),
        prefill_context_lens=tuple(arrays.context_lens[num_decodes:].tolist()),
    )


def _tensors(step: StepTensors) -> list[torch.Tensor]:
    """The tensors of a step that differ from one decode step to the next."""
    groups = [tensor for group in step.groups for tensor in (group.block_tables, group.slot_mapping)]
    return [step.token_ids, step.positions, step.context_lens, *groups]


@contextmanager
def _named_when_out_of_memory(device: torch.device, what: str) -> Iterator[None]:
    """Turn the allocator's failure into the error that says what did not fit and what was free."""
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
