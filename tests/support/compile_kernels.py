"""Compile the kernels for GPUs that are not here, through the launchers themselves, and read what came out.

    python -m tests.support.compile_kernels --table [ARCH ...]     every kernel, for every architecture or those named
    python -m tests.support.compile_kernels --csv FILE [ARCH ...]  the same as a CSV file
    python -m tests.support.compile_kernels                     `JOB ARCH` per line of stdin, its rows as JSON on stdout

A launcher is called with tensors that have shapes and no memory, and triton is told that the device is the named
architecture: so each kernel is specialised as it would be there, and nothing runs. What was compiled is kept in
$XDG_CACHE_HOME/kvplan (~/.cache/kvplan) under a hash of the sources, triton's own files in $TRITON_CACHE_DIR or beside.
"""

import csv
import hashlib
import io
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ARCHS = (80, 89, 90, 100)
HEAD_DIMS = (64, 80, 96, 128, 256)
WARP = 32  # threads
INSTRUCTION = 16  # bytes, since sm_70
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """What the programs on one multiprocessor share; shared: bytes of memory, of which each program takes 1 KiB more.

    registers  come to a warp in units of 256, from its quarter of the multiprocessor
    """

    warps: int
    programs: int
    shared: int
    registers: int = 65_536


# CUDA C++ programming guide, "Technical Specifications per Compute Capability"
MULTIPROCESSORS = {
    80: Multiprocessor(64, 32, 164 * 1024),
    89: Multiprocessor(48, 24, 100 * 1024),
    90: Multiprocessor(64, 32, 228 * 1024),
    100: Multiprocessor(64, 32, 228 * 1024),
}


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One compiled kernel. spills: bytes of stack, which these kernels use for nothing else; shared: bytes.

    config  warps and pipeline stages, "w4 s3"
    hash    of the code before ptxas and its options; the same kernel may serve several jobs
    wide    asynchronous copies to shared memory of 16 bytes a thread, the most there is; narrow: of fewer
    tma     copies by the tensor memory accelerator, each of a whole tile
    """

    job: str
    kernel: str
    config: str
    arch: int
    registers: int
    spills: int
    shared: int
    instructions: int
    hash: str
    wide: int = 0
    narrow: int = 0
    tma: int = 0

    @property
    def programs(self) -> int:
        """How many run at once on one multiprocessor: what its warps, registers and shared memory hold."""
        has, warps = MULTIPROCESSORS[self.arch], int(self.config.split()[0].removeprefix("w"))
        warp_registers = -(-self.registers * WARP // 256) * 256
        by_registers = has.registers // 4 // warp_registers * 4 // warps
        return min(has.programs, has.warps // warps, by_registers, has.shared // (self.shared + 1024))


# --- what to compile: a name says kernel, dtypes, sizes and features --------------------------------------------------


def jobs() -> dict[str, Callable[[], object]]:
    """Each kernel's default configuration per dtype and head size, and each feature once."""
    builders: dict[str, Callable[[], object]] = {}
    for kernel, dtype, head_dim in product(("decode", "prefill"), ("bfloat16", "bfloat16+fp8"), HEAD_DIMS):
        builders[f"{kernel} {dtype} {head_dim}"] = partial(_attention, kernel, dtype, head_dim)
    for kernel in ("decode", "prefill"):
        builders[f"{kernel} float16 128"] = partial(_attention, kernel, "float16", 128)  # its tiles are bfloat16's
        for head_dim in (64, 128, 256):
            builders[f"{kernel} float32 {head_dim}"] = partial(_attention, kernel, "float32", head_dim)
        builders[f"{kernel} bfloat16 256 softcap"] = partial(_attention, kernel, "bfloat16", 256, softcap=50.0)
        builders[f"{kernel} bfloat16 64 window sinks"] = partial(
            _attention, kernel, "bfloat16", 64, window=128, sinks=True
        )
    for dtype in ("bfloat16", "bfloat16+fp8", "float32"):  # tiles within a page
        builders[f"prefill {dtype} 128 blocks of 64"] = partial(_attention, "prefill", dtype, 128, block_size=64)
    builders["prefill bfloat16 128 short"] = partial(_attention, "prefill", "bfloat16", 128, max_query_len=16)
    # As the steps of a server call it: any part of the batch, block tables of any width.
    for kernel in ("decode", "prefill"):
        builders[f"{kernel} bfloat16 128 parts"] = partial(_parts, partial(_attention, kernel, "bfloat16", 128))
    builders["latent bfloat16 16 parts"] = partial(_parts, partial(_latent, "bfloat16", 16))
    for dtype, heads in product(("bfloat16", "float32"), (16, 128)):
        builders[f"latent {dtype} {heads}"] = partial(_latent, dtype, heads)
    builders["store bfloat16"] = partial(_store, "bfloat16")
    builders["store bfloat16+fp8"] = partial(_store, "float8_e4m3fn")
    builders["store latent"] = _store_latent
    builders["norm bfloat16 4096 residual"] = partial(_norm, (64, 4096), residual=True)
    builders["norm bfloat16 128 unit offset"] = partial(_norm, (64, 32, 128), unit_offset=True)
    builders["rotate bfloat16 128"] = partial(_rotate, interleaved=False)
    builders["rotate bfloat16 128 interleaved"] = partial(_rotate, interleaved=True)
    for name, stored in (("bfloat16", "bfloat16"), ("bfloat16+fp8", "float8_e4m3fn")):
        builders[f"turn+store {name}"] = partial(_rotate_and_store, stored)
        builders[f"turn+store {name} norm"] = partial(_rotate_and_store, stored, norm=True)
    builders["turn+store bfloat16 norm 32 of 128"] = partial(_rotate_and_store, "bfloat16", norm=True, rotary_dim=32)
    for kind in ("gelu_tanh", "gelu"):
        builders[f"gate bfloat16 {kind}"] = partial(_gate, kind)
    builders["moe bfloat16 few"] = partial(_moe, "bfloat16", 8, "silu")
    builders["moe bfloat16 some"] = partial(_moe, "bfloat16", 128, "silu")
    builders["moe bfloat16 many biases"] = partial(_moe, "bfloat16", 4096, "clamped_swiglu", biases=True)
    for dtype, num_tokens in (("bfloat16", 8), ("bfloat16", 128), ("bfloat16", 4096), ("float32", 4096)):
        builders[f"experts mxfp4 {dtype} {num_tokens}"] = partial(_experts, "mxfp4", dtype, num_tokens)
    for stored, num_tokens in product(("nvfp4", "e4m3"), (8, 4096)):
        builders[f"experts {stored} bfloat16 {num_tokens}"] = partial(_experts, stored, "bfloat16", num_tokens)
    builders["nvfp4 bfloat16 64"] = _nvfp4
    builders["moe float32 many"] = partial(_moe, "float32", 4096, "silu")
    builders["route sigmoid 8 of 256 groups"] = partial(_route, 256, 8, "sigmoid", groups=8, top_groups=4)
    builders["route softmax 10 of 512"] = partial(_route, 512, 10, "softmax")
    for dtype, num_tokens in (("bfloat16", 8), ("bfloat16", 64), ("bfloat16", 2048), ("float32", 2048)):
        builders[f"int4 {dtype} {num_tokens}"] = partial(_int4, dtype, num_tokens, 4096, 32)
    builders["int4 bfloat16 8 groups of 16"] = partial(_int4, "bfloat16", 8, 4096, 256)
    builders["int4 bfloat16 8 11008 inputs"] = partial(_int4, "bfloat16", 8, 11008, 86)
    builders["int4 bfloat16 2048 odd inputs"] = partial(_int4, "bfloat16", 2048, 4888, 1)
    builders["int4 bfloat16 8 splits"] = partial(_int4, "bfloat16", 8, 14336, 112, num_splits=4)
    builders["fp8 rows"] = partial(_fp8_rows, 4096)
    builders["fp8 rows given"] = partial(_fp8_rows, 4096, has_scale=True)
    builders["fp8 blocks bfloat16 8 splits"] = partial(_fp8_block, "bfloat16", 8, num_splits=4)
    for dtype, num_tokens in (("bfloat16", 64), ("bfloat16", 2047), ("float32", 64)):
        builders[f"fp8 blocks {dtype} {num_tokens}"] = partial(_fp8_block, dtype, num_tokens)
    for dtype, num_tokens, rank in (("bfloat16", 8, 16), ("bfloat16", 2048, 64), ("float32", 2048, 64)):
        builders[f"lora {dtype} {num_tokens} rank {rank}"] = partial(_lora, dtype, num_tokens, rank)
    builders["lora bfloat16 8 odd inputs"] = partial(_lora, "bfloat16", 8, 320, num_inputs=4104)
    builders["draw 128256"] = partial(_draw, 128_256)
    builders["draw 151936 floors"] = partial(_draw, 151_936, floors=True)
    builders["draw bfloat16 151936"] = partial(_draw, 151_936, dtype="bfloat16")
    for dtype in ("float32", "bfloat16"):
        builders[f"nucleus {dtype} 151936"] = partial(_nucleus, dtype, 151_936)
    builders["best 128256"] = partial(_best, 128_256)
    builders["best bfloat16 151936"] = partial(_best, 151_936, dtype="bfloat16")
    return builders


def empty(*shape: int, dtype: str = "bfloat16") -> "torch.Tensor":
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


def _attention(
    kernel: str,
    dtypes: str,
    head_dim: int,
    *,
    sinks: bool = False,
    max_query_len: int = 2048,
    block_size: int = 16,
    first: int = 0,
    width: int = 256,
    **features: float,
) -> None:
    """Llama 8B's heads: 32 for 8; 64 sequences after the `first` of a batch, with block tables of this width."""
    from engine.kernels import triton_backend

    dtype, _, fp8 = dtypes.partition("+")
    num_heads, num_kv_heads = 32, 8
    cache = empty(4096, block_size, num_kv_heads, head_dim, dtype="float8_e4m3fn" if fp8 else dtype)
    tables, lens = empty(first + 64, width, dtype="int32")[first:], empty(first + 64, dtype="int32")[first:]
    extra: dict[str, Any] = {"sinks": empty(num_heads) if sinks else None, **features}
    q = empty(first + 64, num_heads, head_dim, dtype=dtype)[first:]
    if kernel == "decode":
        work = _work(extra.get("window"))
        triton_backend.paged_decode(q, cache, cache, tables, lens, 0.1, work=work, **extra)
    else:
        starts = empty(first + 65, dtype="int32")[first:]
        triton_backend.paged_prefill(q, cache, cache, tables, starts, lens, 0.1, max_query_len=max_query_len, **extra)


def _latent(dtype: str, num_heads: int, *, first: int = 0, width: int = 64) -> None:
    from engine.kernels import triton_backend

    cache = empty(4096, 64, 576, dtype=dtype)
    q = empty(first + 64, num_heads, 576, dtype=dtype)[first:]
    tables, lens = empty(first + 64, width, dtype="int32")[first:], empty(first + 64, dtype="int32")[first:]
    triton_backend.latent_decode(q, cache, tables, lens, 0.1, latent_dim=512, work=_work(None))


def _work(window: int | None) -> Any:
    """A plan for 64 sequences, some of them cut: the kernels that write partial outputs and merge them."""
    from engine.kernels.work_list import Sizes, WorkList

    sizes = Sizes(num_items=113, num_merges=49, num_slots=98)
    return WorkList(empty(sizes.num_rows, 4, dtype="int32"), sizes, 64, window)


def _parts(launch: Callable[..., None]) -> None:
    """The whole batch, then parts of it that begin at no multiple of 16 bytes, with tables of even and odd widths."""
    for first, width in ((0, 256), (3, 256), (0, 257), (5, 257), (0, 1), (1, 1)):
        launch(first=first, width=width)


def _store(stored: str) -> None:
    from engine.kernels import triton_backend

    x, cache = empty(64, 8, 128), empty(4096, 16, 8, 128, dtype=stored)
    triton_backend.store_kv(x, x, cache, cache, empty(64, dtype="int64"))


def _store_latent() -> None:
    from engine.kernels import triton_backend

    triton_backend.store_latent(empty(64, 576), empty(4096, 64, 576), empty(64, dtype="int64"))


def _norm(shape: tuple[int, ...], *, residual: bool = False, unit_offset: bool = False) -> None:
    from engine.kernels import triton_backend

    x, weight = empty(*shape), empty(shape[-1])
    triton_backend.rms_norm(x, weight, 1e-6, residual=x if residual else None, unit_offset=unit_offset)


def _rotate(*, interleaved: bool) -> None:
    from engine.kernels import triton_backend

    q, k, cos_sin = empty(64, 32, 128), empty(64, 8, 128), empty(8192, 128, dtype="float32")
    triton_backend.rotate(q, k, cos_sin, empty(64, dtype="int64"), interleaved=interleaved)


def _rotate_and_store(stored: str, *, norm: bool = False, rotary_dim: int = 128) -> None:
    from engine.kernels import triton_backend

    q, k, cache = empty(64, 32, 128), empty(64, 8, 128), empty(4096, 16, 8, 128, dtype=stored)
    weight, slots = empty(128) if norm else None, empty(64, dtype="int64")
    turns = (empty(8192, rotary_dim, dtype="float32"), slots)
    triton_backend.rotate_and_store(q, k, k, *turns, cache, cache, slots, q_norm=weight, k_norm=weight)


def _gate(kind: Any) -> None:
    from engine.kernels import triton_backend

    triton_backend.gated_activation(empty(64, 2 * 14336), kind)


def _moe(dtype: str, num_tokens: int, kind: Any, *, biases: bool = False) -> None:
    """Eight experts, two to a token."""
    from engine.kernels import triton_backend

    x, w13, w2 = (empty(*shape, dtype=dtype) for shape in ((num_tokens, 2048), (8, 2 * 768, 2048), (8, 2048, 768)))
    b13, b2 = (empty(8, 2 * 768, dtype=dtype), empty(8, 2048, dtype=dtype)) if biases else (None, None)
    ids, weights = empty(num_tokens, 2, dtype="int64"), empty(num_tokens, 2, dtype="float32")
    triton_backend.moe_mlp(x, w13, w2, ids, weights, kind, b13=b13, b2=b2, limit=7.0, alpha=1.702)


def _experts(stored: str, dtype: str, num_tokens: int) -> None:
    """Eight experts, two to a token: gpt-oss's widths, or those of Qwen3's MoE."""
    from engine.kernels import triton_backend
    from engine.kernels.matrices import Fp8BlockMatrix, Matrix, Mxfp4Matrix, Nvfp4Matrix

    kind: Any
    hidden, inner, kind = (2880, 2880, "clamped_swiglu") if stored == "mxfp4" else (2048, 768, "silu")

    def matrix(outputs: int, inputs: int) -> Matrix:
        if stored == "e4m3":
            scales = empty(8, outputs // 128, inputs // 128, dtype="float32")
            return Fp8BlockMatrix(empty(8, outputs, inputs, dtype="float8_e4m3fn"), scales, (128, 128))
        values = empty(8, outputs, inputs // 2, dtype="uint8")
        if stored == "nvfp4":
            parts = (inner, inner) if outputs != hidden else (hidden,)
            scales, whole = (
                empty(8, outputs, inputs // 16, dtype="float8_e4m3fn"),
                empty(8, len(parts), dtype="float32"),
            )
            return Nvfp4Matrix(values, scales, whole, whole, parts)
        return Mxfp4Matrix(values, empty(8, outputs, inputs // 32, dtype="uint8"))

    x, w13, w2 = empty(num_tokens, hidden, dtype=dtype), matrix(2 * inner, hidden), matrix(hidden, inner)
    ids, weights = empty(num_tokens, 2, dtype="int64"), empty(num_tokens, 2, dtype="float32")
    more: dict[str, Any] = {}
    if stored == "mxfp4":
        more = {"b13": empty(8, 2 * inner, dtype=dtype), "b2": empty(8, hidden, dtype=dtype), "limit": 7.0}
    triton_backend.moe_mlp(x, w13, w2, ids, weights, kind, alpha=1.702, **more)


def _nvfp4() -> None:
    """Queries, keys and values of Llama 8B."""
    from engine.kernels import triton_backend

    x, values = empty(64, 4096), empty(6144, 2048, dtype="uint8")
    scales, whole = empty(6144, 256, dtype="float8_e4m3fn"), empty(3, dtype="float32")
    triton_backend.nvfp4_linear(x, values, scales, whole, (4096, 1024, 1024))


def _route(num_experts: int, top_k: int, scoring: Any, **groups: int) -> None:
    """With groups as DeepSeek has it: a correction, weights of sum 1."""
    from engine.kernels import triton_backend

    correction = empty(num_experts, dtype="float32") if groups else None
    triton_backend.route(
        empty(64, num_experts), correction, top_k=top_k, scoring=scoring, renormalize=bool(groups), **groups
    )


def _int4(dtype: str, num_tokens: int, num_inputs: int, num_groups: int, *, num_splits: int = 1) -> None:
    """With 4096 outputs."""
    from engine.kernels import triton_backend

    words, zeros = empty(num_inputs // 8, 4096, dtype="int32"), empty(num_groups, 4096 // 8, dtype="int32")
    scales = empty(num_groups, 4096, dtype="float16")
    x = empty(num_tokens, num_inputs, dtype=dtype)
    triton_backend.int4_linear(x, words, scales, zeros, num_splits=num_splits)


def _fp8_rows(width: int, *, has_scale: bool = False) -> None:
    from engine.kernels import fp8

    fp8.fp8_rows(empty(64, width), empty(1, dtype="float32") if has_scale else None)


def _fp8_block(dtype: str, num_tokens: int, *, num_splits: int = 1) -> None:
    """4096 outputs of 4096 inputs."""
    from engine.kernels import triton_backend

    x, values = empty(num_tokens, 4096, dtype=dtype), empty(4096, 4096, dtype="float8_e4m3fn")
    scales = empty(32, 32, dtype="float32")
    triton_backend.fp8_block_linear(x, values, scales, (128, 128), num_splits=num_splits)


def _lora(dtype: str, num_tokens: int, rank: int, *, num_inputs: int = 4096) -> None:
    """Four adapters of Llama 8B's queries, keys and values."""
    from engine.kernels import triton_backend
    from engine.kernels.lora_rows import LoraRows

    rows = LoraRows(empty(8192, dtype="int32"), empty(128, dtype="int32"), empty(4, dtype="int32"))
    x, a = empty(num_tokens, num_inputs, dtype=dtype), empty(4, 3, rank, num_inputs, dtype=dtype)
    small = triton_backend.lora_shrink(x, a, rows)
    y, b = empty(num_tokens, 6144, dtype=dtype), empty(4, 6144, rank, dtype=dtype)
    triton_backend.lora_expand(y, small, b, empty(4, dtype="int32"), 4096, rows)


def _draw(vocab_size: int, *, floors: bool = False, dtype: str = "float32") -> None:
    from engine.kernels import triton_backend

    num_rows = 256
    temperature, uniforms = (empty(num_rows, 1, dtype=dtype) for dtype in ("float32", "float64"))
    logits, best = empty(num_rows, vocab_size, dtype=dtype), empty(num_rows, dtype="float32")
    triton_backend.draw(logits, best, temperature, uniforms, empty(num_rows, 1, dtype="float32") if floors else None)


def _nucleus(dtype: str, vocab_size: int) -> None:
    from engine.kernels import triton_backend

    temperature, top_k, top_p = (empty(256, 1, dtype=name) for name in ("float32", "int64", "float64"))
    logits, best = empty(256, vocab_size, dtype=dtype), empty(256, dtype="float32")
    triton_backend.nucleus_floors(logits, best, temperature, top_k, top_p, num_sorted=vocab_size)


def _best(vocab_size: int, *, dtype: str = "float32") -> None:
    from engine.kernels import triton_backend

    triton_backend.best_tokens(empty(256, vocab_size, dtype=dtype))


# --- compiling --------------------------------------------------------------------------------------------------------


class AbsentGpu:
    """A triton driver for a GPU that is not here: it can be compiled for, not run on. Device ids are architectures."""

    def __init__(self) -> None:
        self.arch = 0

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


class Compiler:
    """Takes the place of triton's launches: compiles the kernel as the launch would have, and keeps it."""

    def __init__(self) -> None:
        import triton
        from triton.runtime.jit import JITFunction

        self._gpu = AbsentGpu()
        self._compiled: list[tuple[str, Any]] = []
        triton.runtime.driver.set_active(self._gpu)
        plain_run = JITFunction.run

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            self._compiled.append((kernel.__name__, plain_run(kernel, *args, grid=grid, warmup=True, **options)))

        JITFunction.run = run

    def rows(self, name: str, arch: int) -> list[CompiledKernel]:
        """What a job's launcher launches on this architecture, each kernel once; raises what the launcher raises."""
        from engine.kernels import checks

        self._gpu.arch = arch
        checks.forget()
        self._compiled.clear()
        jobs()[name]()
        kernels = {kernel.hash: (kernel_name, kernel) for kernel_name, kernel in self._compiled}
        return [_row(name, kernel_name, arch, kernel) for kernel_name, kernel in kernels.values()]


def _row(job: str, name: str, arch: int, kernel: Any) -> CompiledKernel:
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", str(cubin))
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()  # type: ignore[union-attr]
    meta = kernel.metadata
    return CompiledKernel(
        job=job,
        kernel=name,
        config=f"w{meta.num_warps} s{meta.num_stages}",
        arch=arch,
        registers=int(registers),
        spills=int(stack),
        shared=meta.shared,
        instructions=code_bytes(kernel.asm["cubin"]) // INSTRUCTION,
        hash=kernel.hash,
        **copies(kernel.asm["ptx"]),
    )


def copies(ptx: str) -> dict[str, int]:
    """How a kernel's PTX copies from global to shared memory (PTX ISA, cp.async and cp.async.bulk.tensor)."""
    sizes = re.findall(r"\bcp\.async\.c[ag]\.shared\.global\S* \[[^]]+\], \[[^]]+\], (\w+)", ptx)
    wide = sum(int(size, 0) == 16 for size in sizes)
    return {"wide": wide, "narrow": len(sizes) - wide, "tma": len(re.findall(r"\bcp\.async\.bulk\.tensor", ptx))}


def code_bytes(cubin: bytes) -> int:
    """The length of a kernel's code, as nvdisasm would list it in a hundred times the time."""
    (table,) = struct.unpack_from("<Q", cubin, 40)  # where ELF64 keeps its table of sections
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    sections = [struct.unpack_from("<2I4Q", cubin, table + i * size) for i in range(count)]
    first_name = sections[names][4]
    return sum(section[5] for section in sections if cubin.startswith(b".text.", first_name + section[0]))


def _tool(name: str, *args: str) -> str:
    import triton

    path = getattr(triton.knobs.nvidia, name).path
    return subprocess.run([path, *args], capture_output=True, text=True, check=True, timeout=900).stdout


# --- keeping what was compiled ----------------------------------------------------------------------------------------


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvplan"


def source_hash() -> str:
    """Of everything that decides what comes out: the kernels, this file, triton's version."""
    folder = ROOT / "engine" / "kernels"
    sources = [*sorted(folder.glob("*.py")), *sorted(folder.glob("*.json")), Path(__file__)]
    digest = hashlib.sha256(version("triton").encode())
    for path in sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Answers:
    """`rows(job, arch)`, from an earlier run where the sources are the same; {"error": text} for what was refused."""

    def __init__(self) -> None:
        self._folder = cache_folder() / "compiled" / source_hash()
        self._compiler: Compiler | None = None
        os.environ.setdefault("TRITON_CACHE_DIR", str(cache_folder() / "triton"))

    def rows(self, job: str, arch: int) -> dict[str, Any]:
        path = self._folder / f"{job.replace(' ', '-')}-sm{arch}.json"
        if path.exists():
            return dict(json.loads(path.read_text(encoding="utf-8")))
        answer = self._compiled(job, arch)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(answer, file)
        Path(file.name).replace(path)  # whole or not at all: another process may be reading
        return answer

    def _compiled(self, job: str, arch: int) -> dict[str, Any]:
        self._compiler = self._compiler or Compiler()
        try:
            return {"rows": [asdict(row) for row in self._compiler.rows(job, arch)]}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}


COLUMNS = (
    "job", "kernel", "config", "arch", "registers", "spills", "shared", "instructions", "programs", "wide", "narrow",
    "tma",
)  # fmt: skip


def table(archs: tuple[int, ...]) -> Iterator[str]:
    """Lines of a table of every kernel; regs of a thread, programs of a multiprocessor."""
    yield (
        f"{'job':34} {'kernel':24} {'config':8} {'arch':>6} {'regs':>5} {'spills':>6} {'shared':>7} {'instr':>6} "
        "programs wide narrow tma"
    )
    for result in results(archs):
        match result:
            case CompiledKernel() as row:
                yield (
                    f"{row.job:34} {row.kernel:24} {row.config:8} sm_{row.arch:<3} {row.registers:5} {row.spills:6} "
                    f"{row.shared:7} {row.instructions:6} {row.programs:8} {row.wide:4} {row.narrow:6} {row.tma:3}"
                )
            case refusal:
                yield refusal


def results(archs: tuple[int, ...]) -> Iterator[CompiledKernel | str]:
    """Every kernel that these architectures run, and a line for each job that they refuse."""
    answers = Answers()
    for arch, job in product(archs, jobs()):
        answer = answers.rows(job, arch)
        if "error" in answer:
            yield f"{job:34} sm_{arch}: {answer['error'].splitlines()[0][:120]}"
        yield from (CompiledKernel(**row) for row in answer.get("rows", ()))


def csv_text(archs: tuple[int, ...]) -> str:
    """The table as CSV, without what is refused."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    rows = (row for row in results(archs) if isinstance(row, CompiledKernel))
    writer.writerows([getattr(row, column) for column in COLUMNS] for row in rows)
    return text.getvalue()


def main() -> None:
    match sys.argv[1:]:
        case ["--table", *archs]:
            for line in table(tuple(map(int, archs)) or ARCHS):
                print(line, flush=True)
        case ["--csv", path, *archs]:
            Path(path).write_text(csv_text(tuple(map(int, archs)) or ARCHS), encoding="utf-8")
        case []:
            answers = Answers()
            for line in sys.stdin:
                job, _, arch = line.strip().rpartition(" ")
                print(json.dumps(answers.rows(job, int(arch))), flush=True)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
