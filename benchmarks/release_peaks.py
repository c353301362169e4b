"""What a release of vLLM has live at once while its profile run samples and runs a dense layer, by its own functions.

    python -m benchmarks.release_peaks FOLDER RELEASE ENGINE [--flashinfer FILE]

FOLDER/RELEASE is an unpacked wheel; ENGINE whose sampler, or "eager layers"; FILE FlashInfer's sampling.py. The files
are loaded one by one, with stand-ins for what they import, and run on tensors without data: the logits processor, the
sampler with its top-k and top-p, and `_dummy_sampler_run` and `profile_run` as the runner's file has them; the MLP,
attention and decoder layer of Llama and Qwen2. Bytes are those of live storages at the peak, rounded up as torch's
allocator does, less what was there before; scratch that torch's sort takes is counted by its rules. A row of JSON each.
"""

import argparse
import ast
import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROUNDING = 512  # bytes; c10/cuda/CUDACachingAllocator.cpp (kMinBlockSize)
MULTIPROCESSORS = 132  # H100
REAL = (
    "vllm.model_executor.layers.logits_processor", "vllm.model_executor.layers.sampler", "vllm.v1.sample.sampler",
    "vllm.v1.sample.ops.topk_topp_sampler", "vllm.v1.sample.ops.topk_topp_triton", "vllm.v1.worker.gpu.sample.sampler",
    "vllm.v1.worker.gpu.sample.gumbel", "vllm.model_executor.layers.activation", "vllm.model_executor.layers.layernorm",
    "vllm.model_executor.models.llama", "vllm.model_executor.models.qwen2",
)  # fmt: skip


def sort_scratch(rows: int, width: int) -> int:
    """Bytes that torch's sort of rows of float32 takes besides what it returns.

    Source: aten/src/ATen/native/cuda/SortStable.cu: fewer than 128 rows are sorted as one, with pairs of row and
    column twice and keys; else by rows, with indices. CUB's radix sorts keep second copies of keys and values.
    """
    if rows == 1:
        return (8 + 4 + 8) * width
    return (8 + 8 + 4 + 4 + 8 if rows < 128 else 8 + 4 + 8) * rows * width


class Live(TorchDispatchMode):
    """Bytes of the storages that operations made under this mode and that something still refers to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def now(self) -> int:
        self.sizes = {key: entry for key, entry in self.sizes.items() if not entry[0].expired()}
        return sum(size for _, size in self.sizes.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                storage = tensor.untyped_storage()
                size = -(-storage.nbytes() // ROUNDING) * ROUNDING
                self.sizes.setdefault(storage._cdata, (StorageWeakRef(storage), size))
        scratch = sort_scratch(*args[0].shape) if function._schema.name == "aten::sort" else 0
        self.peak = max(self.peak, self.now() + scratch)
        return out


# --- stand-ins ----------------------------------------------------------------------------------------------------


class AnythingType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Anything(metaclass=AnythingType):
    """Stands for a name that is imported and not run: a class to inherit from, a decorator, a constant."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __init_subclass__(cls, **kwargs: Any) -> None: ...
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else Anything()

    def __getitem__(self, key: Any) -> Any:
        return Anything()

    def __or__(self, other: Any) -> Any:
        return Anything

    __ror__ = __or__

    def __bool__(self) -> bool:
        return False

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __class_getitem__(cls, key: Any) -> Any:
        return cls


class CustomOp(torch.nn.Module):
    """vLLM's base of operations, which calls what it has for CUDA."""

    @classmethod
    def register(cls, *args: Any, **kwargs: Any) -> Callable[[type], type]:
        return lambda kind: kind

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_cuda(*args, **kwargs)


class Metadata(types.SimpleNamespace):
    """A dataclass with what it is given, and None for what it has a default for."""

    def __getattr__(self, name: str) -> None:
        return None


class Torch:
    """Torch, whose generators are of the CPU: a device without data has none."""

    Generator = staticmethod(lambda device=None: torch.Generator())

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class Kernels:
    """Compiled and Triton kernels write to what Python has allocated."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class Compiled(Kernels):
    """A compiled extension, loaded."""

    def build_and_load(self, *args: Any) -> "Compiled":
        return self

    def __getattr__(self, name: str) -> Any:
        return Launched()


class Launched:
    """A compiled kernel, called as it is or by its default overload."""

    @property
    def default(self) -> "Launched":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None: ...
    def __getitem__(self, key: Any) -> bool:
        return False


class Platform(Anything):
    def is_cuda(self) -> bool:
        return True

    def is_cuda_alike(self) -> bool:
        return True

    def use_all_gather(self) -> bool:
        return True

    def get_device_capability(self) -> Any:
        return types.SimpleNamespace(to_int=lambda: 90, major=9, minor=0)


class Supported:
    """FlashInfer's attention, for which GPUs its sampler asks."""

    @staticmethod
    def supports_compute_capability(capability: Any) -> bool:
        return True


class Triton(Anything):
    """Triton, whose functions are launched with a grid and do nothing."""

    def jit(self, function: Any = None, **kwargs: Any) -> Any:
        launch = type("Launch", (), {"__getitem__": lambda self, grid: lambda *args, **kwargs: None})
        return launch() if function is not None else lambda function: launch()

    @staticmethod
    def cdiv(first: int, second: int) -> int:
        return -(-first // second)

    @staticmethod
    def next_power_of_2(number: int) -> int:
        return 1 << (number - 1).bit_length()


def names_of(flashinfer: bool) -> dict[str, Any]:
    """What a stand-in has under a name, whichever module it is imported from."""
    env = type("Env", (Anything,), {"VLLM_USE_FLASHINFER_SAMPLER": flashinfer})()
    return {
        "CustomOp": CustomOp, "PluggableLayer": CustomOp, "current_platform": Platform(), "envs": env,
        "HAS_TRITON": True, "triton": Triton(), "tl": Anything(), "num_compute_units": lambda *args: MULTIPROCESSORS,
        "next_power_of_2": Triton.next_power_of_2, "TYPE_CHECKING": False, "_custom_ops": Kernels(),
        "tensor_model_parallel_all_gather": lambda tensor: tensor,
        "tensor_model_parallel_gather": lambda tensor: tensor,
        "get_tensor_model_parallel_world_size": lambda: 1, "flashinfer_sampler_supported": lambda: flashinfer,
        "init_logger": lambda name: Kernels(), "VLLM_USE_FLASHINFER_SAMPLER": flashinfer,
        "VLLM_LOGITS_PROCESSOR_THREADS": None, "FlashInferBackend": Supported,
        "flashinfer_api": lambda function: function, "get_pp_group": lambda: types.SimpleNamespace(is_last_rank=True),
    }  # fmt: skip


class Standin(types.ModuleType):
    """A module whose names stand for anything."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = NAMES[name] if name in NAMES else type(name, (Anything,), {})
        setattr(self, name, value)
        return value


NAMES: dict[str, Any] = {}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, source: Path, flashinfer: Path | None) -> None:
        self.source, self.flashinfer = source, flashinfer

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in ("vllm", "flashinfer", "msgspec", "transformers"):
            return None
        file = self.source / (name.replace(".", "/") + ".py")
        if name == "flashinfer.sampling" and self.flashinfer is not None:
            return importlib.util.spec_from_file_location(
                name, self.flashinfer, loader=Sampling(name, str(self.flashinfer))
            )
        if name in REAL and file.exists():
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = Standin(spec.name)
        if spec.name == "flashinfer":
            if self.flashinfer is None:
                raise ImportError(spec.name)
            module.__dict__["__version__"] = self.flashinfer.parents[1].name.rpartition("-")[2]
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


def undecorated(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda function: function


class Sampling(importlib.machinery.SourceFileLoader):
    """FlashInfer's sampling.py, whose kernels are not compiled."""

    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        vars(module).update(
            gen_sampling_module=Compiled, has_prebuilt_ops=False, FLASHINFER_CSRC_DIR=Path(),
            load_cuda_ops=lambda *args: Compiled(), register_custom_op=undecorated, register_fake_op=undecorated,
        )  # fmt: skip


def functions_of(file: Path, owner: str, *names: str) -> dict[str, Any]:
    """Methods of a class, without the rest of its file: names that they read stand for anything."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner).body
    chosen: list[ast.stmt] = [node for node in body if isinstance(node, ast.FunctionDef) and node.name in names]
    for node in chosen:
        cast(ast.FunctionDef, node).decorator_list = []

    code = compile(ast.Module(body=chosen, type_ignores=[]), str(file), "exec")
    read = {name.id for node in chosen for name in ast.walk(node) if isinstance(name, ast.Name)}
    known = {
        "torch": Torch(), "SamplingMetadata": Metadata, "replace": lambda old, **new: Metadata(**{**vars(old), **new}),
        **NAMES,
    }  # fmt: skip
    space = {name: known.get(name, Anything()) for name in read if not hasattr(builtins, name)}
    exec(code, space)  # the release's own code
    return {name: space[name] for name in names}


# --- sampling -----------------------------------------------------------------------------------------------------


class Shape(types.SimpleNamespace):
    """Sizes of a case: tokens of a step, sequences, hidden states and vocabulary, in 16 bits."""

    tokens: int
    seqs: int
    hidden: int
    vocab: int

    def states(self) -> torch.Tensor:
        return torch.empty(self.tokens, self.hidden, dtype=torch.bfloat16, device="meta")


class Head:
    """An output matrix, whose product is the logits."""

    def __init__(self, vocab: int) -> None:
        self.vocab, self.quant_method, self.bias, self.tp_size = vocab, self, None, 1

    def apply(self, layer: Any, states: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return torch.empty(states.shape[0], self.vocab, dtype=states.dtype, device="meta")


def processor_of(shape: Shape) -> Any:
    processor = importlib.import_module("vllm.model_executor.layers.logits_processor").LogitsProcessor(shape.vocab)
    processor.head_dtype = None
    return processor


class Runner(Anything):
    """A runner of the second engine around the release's own methods; its forward pass gives hidden states."""

    def __init__(self, source: Path, shape: Shape, flashinfer: bool) -> None:
        file = source / "vllm/v1/worker/gpu_model_runner.py"
        self.shape, self.max_num_tokens, self.device = shape, shape.tokens, "meta"
        self.gives_both = "return hidden_states, hidden_states[" in file.read_text(encoding="utf-8")
        self.methods = functions_of(file, "GPUModelRunner", "profile_run", "_dummy_sampler_run")
        processor, head = processor_of(shape), Head(shape.vocab)
        self.model = types.SimpleNamespace(compute_logits=lambda states, *options: processor(head, states, *options))
        self.sampler = importlib.import_module("vllm.v1.sample.sampler").Sampler()
        if flashinfer:
            self.sampler.topk_topp_sampler.forward = self.sampler.topk_topp_sampler.forward_cuda
        self.is_multimodal_model = self.supports_mm_inputs = self.is_pooling_model = self.speculative_config = False
        self.vllm_config = types.SimpleNamespace(model_config=types.SimpleNamespace(multimodal_config=None))

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        states = self.shape.states()
        chosen = states[torch.empty(self.shape.seqs, dtype=torch.int64, device="meta")]
        return (states, chosen) if self.gives_both else chosen

    def _dummy_sampler_run(self, states: torch.Tensor) -> Any:
        return self.methods["_dummy_sampler_run"](self, states)

    def run(self) -> None:
        self.methods["profile_run"](self)


class FirstEngine:
    """The first engine's step: hidden states and logits are variables of `execute_model` while it samples."""

    def __init__(self, source: Path, shape: Shape, flashinfer: bool) -> None:
        self.shape = shape
        module: Any = importlib.import_module("vllm.model_executor.layers.sampler")
        self.processor = processor_of(shape)
        self.kinds = kinds = types.SimpleNamespace(GREEDY=0, RANDOM=1, RANDOM_SEED=2)
        module.SamplingType = type("Kinds", (), {"__iter__": lambda self: iter((0, 1, 2)), **vars(kinds)})()
        self.sampler = module.Sampler()

    def run(self) -> None:
        seqs = self.shape.seqs
        per_row = torch.empty(seqs, dtype=torch.float32, device="meta")
        index = torch.empty(seqs, dtype=torch.int64, device="meta")
        params = types.SimpleNamespace(
            sampling_type=1, min_tokens=0, all_stop_token_ids=(), n=1, logits_processors=None
        )
        group = types.SimpleNamespace(
            seq_ids=[0], sampling_params=params, sample_indices=[0], prompt_logprob_indices=[], do_sample=True,
            is_prompt=True, generator=None, seq_data={},
        )  # fmt: skip
        metadata = types.SimpleNamespace(
            selected_token_indices=index, seq_groups=[group] * seqs, reuse_sampling_tensors=True,
            categorized_sample_indices={0: index[:0], 1: index, 2: index[:0]}, skip_sampler_cpu_output=True,
            num_prompts=seqs,
        )  # fmt: skip
        tensors = types.SimpleNamespace(temperatures=per_row, top_ps=per_row, top_ks=index.int(), min_ps=per_row)
        sampler = self.sampler
        sampler._sampling_tensors, sampler._do_penalties = tensors, False
        sampler._do_top_p_top_k, sampler._do_min_p = True, False
        states = self.shape.states()
        logits = self.processor(Head(self.shape.vocab), states, metadata)
        sampler(logits, metadata)
        del states


class SecondRunner:
    """Model runner V2 as far as it samples in its profile run, with no parameter set."""

    def __init__(self, source: Path, shape: Shape, flashinfer: bool) -> None:
        self.shape = shape
        file = source / "vllm/v1/worker/gpu/model_runner.py"
        self.run_sampler = functions_of(file, "GPUModelRunner", "_dummy_sampler_run")["_dummy_sampler_run"]
        module: Any = importlib.import_module("vllm.v1.worker.gpu.sample.sampler")
        sampler = module.Sampler.__new__(module.Sampler)
        sampler.__dict__.update(
            logprobs_mode="raw_logprobs", compute_nans=False, use_fp64_gumbel=False, use_flashinfer=flashinfer,
            logit_bias_state=Compiled(), penalties_state=Compiled(), bad_words_state=Compiled(),
            logprob_token_ids_state=types.SimpleNamespace(max_num_token_ids=lambda rows: 0),
            sampling_states=Greedy(), req_states=Anything(),
        )  # fmt: skip
        module.NO_LOGPROBS = -1
        module.get_num_sampled_and_rejected = lambda *args: (None, None)
        module.apply_top_k_top_p = lambda logits, k, p: logits
        self.sampler = sampler
        processor, head = processor_of(shape), Head(shape.vocab)
        self.model = types.SimpleNamespace(compute_logits=lambda states: processor(head, states))

    def run(self) -> None:
        states = self.shape.states()
        rows = self.shape.seqs
        chosen = states[torch.empty(rows, dtype=torch.int64, device="meta")]
        index = torch.empty(rows, dtype=torch.int64, device="meta")
        batch = types.SimpleNamespace(
            expanded_idx_mapping=index, idx_mapping_np=index, cu_num_logits_np=index, expanded_local_pos=index,
            positions=index, input_ids=index, logits_indices=index, seq_lens=index, cu_num_logits=index, num_reqs=rows,
            idx_mapping=index,
        )  # fmt: skip
        self.run_sampler.__globals__["InputBatch"] = types.SimpleNamespace(make_dummy=lambda *args: batch)
        self.run_sampler(types.SimpleNamespace(model=self.model, sampler=self.sampler, input_buffers=None), chosen)
        del states


class Greedy(Kernels):
    """Sampling states with nothing set."""

    temperature = seeds = types.SimpleNamespace(gpu=None)

    def max_num_logprobs(self, rows: Any) -> int:
        return -1

    def get_top_k_top_p(self, *args: Any) -> tuple[None, None]:
        return None, None


class Dense:
    """Layers of Llama or Qwen2 in a row, eagerly on one GPU, by the `forward` of the release's own classes.

    Their matrices write new tensors; a norm with a residual, the rotary embedding and the cache work in place.
    """

    SIZES: ClassVar = {
        "Llama": (4096, 14_336, 4096, 1024),
        "Qwen2": (3584, 18_944, 3584, 512),
    }  # hidden, inner, queries, keys

    def __init__(self, source: Path, family: str, tokens: int) -> None:
        self.tokens, (self.hidden, inner, queries, keys) = tokens, self.SIZES[family]
        file = source / f"vllm/model_executor/models/{family.lower()}.py"
        mlp, attention, layer = (
            functions_of(file, f"{family}{part}", "forward")["forward"] for part in ("MLP", "Attention", "DecoderLayer")
        )
        kind = importlib.import_module("vllm.model_executor.layers.activation").SiluAndMul
        activation = kind.__new__(kind)
        activation.__dict__["op"] = Kernels().op  # writes to its output
        parts = types.SimpleNamespace(
            gate_up_proj=product(2 * inner), act_fn=activation.forward_cuda, down_proj=product(self.hidden)
        )
        heads = types.SimpleNamespace(
            qkv_proj=product(queries + 2 * keys), o_proj=product(self.hidden), q_size=queries, kv_size=keys,
            rotary_emb=lambda positions, *states: states, attn=lambda q, k, v: torch.empty_like(q), qk_norm=False,
            do_llama_4_scaling=False,
        )  # fmt: skip
        whole = types.SimpleNamespace(
            input_layernorm=norm, post_attention_layernorm=norm, mlp=lambda states: mlp(parts, states),
            self_attn=lambda positions, hidden_states: attention(heads, positions, hidden_states),
        )  # fmt: skip
        self.layer = lambda positions, states, residual: layer(whole, positions, states, residual)

    def run(self) -> None:
        states = torch.empty(self.tokens, self.hidden, dtype=torch.bfloat16, device="meta")
        residual = None
        for _ in range(3):
            states, residual = self.layer(None, states, residual)


def product(columns: int) -> Callable[[torch.Tensor], tuple[torch.Tensor, None]]:
    return lambda states: (torch.empty(len(states), columns, dtype=states.dtype, device="meta"), None)


def norm(states: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """As RMSNorm's kernels: into a new tensor, or with a residual in place."""
    return torch.empty_like(states) if residual is None else (states, residual)


def dense(source: Path) -> Iterator[dict[str, Any]]:
    for family in Dense.SIZES:
        runner, live = Dense(source, family, 8192), Live()
        with torch.inference_mode(), live:
            runner.run()
        yield {"engine": "eager layers", "family": family, "tokens": 8192, "peak": live.peak}


ENGINES: dict[str, Any] = {"first": FirstEngine, "second": Runner, "second, runner V2": SecondRunner}
SHAPES = ((2048, 256, 2048, 151_936), (8192, 1024, 4096, 128_256), (4096, 64, 2560, 151_936), (2048, 4, 4096, 32_000))


def sampling(source: Path, engine: str, flashinfer: bool) -> Iterator[dict[str, Any]]:
    for sizes in SHAPES:
        shape = Shape(**dict(zip(("tokens", "seqs", "hidden", "vocab"), sizes, strict=True)))
        runner, live = ENGINES[engine](source, shape, flashinfer), Live()
        if module := sys.modules.get("vllm.v1.sample.ops.topk_topp_triton"):
            module._TRITON_BUFFER_CACHE.clear()  # of the case before
        with torch.inference_mode(), torch.device("meta"), live:
            runner.run()
        after = live.now()
        yield {"engine": engine, "flashinfer": flashinfer, **vars(shape), "peak": live.peak, "kept": after}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("release")
    parser.add_argument("engine", choices=[*ENGINES, "eager layers"])
    parser.add_argument("--flashinfer", type=Path)
    options = parser.parse_args()
    NAMES.update(names_of(options.flashinfer is not None))
    source = options.folder / options.release
    sys.meta_path.insert(0, Finder(source, options.flashinfer))
    torch.Tensor.exponential_ = lambda self, **kwargs: self  # type: ignore[method-assign]
    torch.Tensor.__bool__ = lambda self: True  # type: ignore[method-assign]
    torch.cuda.synchronize = lambda *args: None
    torch.accelerator.synchronize = lambda *args: None
    flashinfer = options.flashinfer is not None
    rows = dense(source) if options.engine == "eager layers" else sampling(source, options.engine, flashinfer)
    for row in rows:
        print(json.dumps({"vllm": options.release, **row}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
