"""Every Triton kernel compiles for GPUs that are not here, fits them and keeps its values in registers.

The interpreter accepts much that the compiler does not, and says nothing about registers and shared memory.
`python -m tests.support.compile_kernels --table` prints what is checked here.
"""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from itertools import product

import pytest
import torch

from engine.kernels.checks import need_supported
from kvplan.core.errors import EnvironmentProblem
from tests.support.compile_kernels import ARCHS, COLUMNS, ROOT, CompiledKernel, copies, jobs
from tests.support.line_process import LineProcess
from tests.support.parts import some

# Bytes that one program may use: CUDA programming guide, "Technical Specifications per Compute Capability".
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
MAX_KERNELS = 140  # per architecture: keeps compiling for four of them a matter of minutes

JOBS = tuple(jobs())
FP8_ON_SM_80 = [(job, 80) for job in JOBS if "fp8" in job]
WIDENED_ON_SM_80 = [(job, 80) for job in JOBS if job.startswith("fp8 blocks")]  # by torch: no kernel is launched
PAIRS = [pair for pair in product(JOBS, ARCHS) if pair not in FP8_ON_SM_80]
# In every run each kernel as its first job launches it, on one architecture, all of them in turn; fp8 moves on where
# sm_80 is due. `make test-full` has the rest.
FIRST = {job.split()[0] if "fp8" not in job.split()[0] else job[:8]: job for job in reversed(JOBS)}
SPREAD = [
    (job, 90 if (job, ARCHS[i % 4]) in FP8_ON_SM_80 else ARCHS[i % 4]) for i, job in enumerate(reversed(FIRST.values()))
]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LineProcess]:
    errors = tmp_path_factory.mktemp("compiler") / "stderr"
    process = LineProcess("tests.support.compile_kernels", {"TRITON_INTERPRET": "0"}, errors)
    yield process
    process.close()


def compiled(compiler: LineProcess, job: str, arch: int) -> list[CompiledKernel]:
    answer = compiler.ask(f"{job} {arch}")
    assert "error" not in answer, answer["error"]
    return [CompiledKernel(**row) for row in answer["rows"]]


def faults(row: CompiledKernel) -> list[str]:
    """What keeps a kernel from running well, or at all."""
    problems = []
    if row.spills > 0:
        problems.append(f"{row.spills} bytes of registers spilled")
    if row.shared > SHARED_MEMORY[row.arch]:
        problems.append(f"{row.shared} bytes of shared memory, of {SHARED_MEMORY[row.arch]}")
    if row.registers < 16 and row.instructions < 100:  # what is left where the compiler gives up without an error
        problems.append(f"{row.registers} registers and {row.instructions} instructions: nothing is computed")
    return [f"{row.kernel} on sm_{row.arch}: {fault}" for fault in problems]


@pytest.mark.parametrize(("job", "arch"), SPREAD)
def test_a_kernel_compiles_without_spills_and_fits(compiler: LineProcess, job: str, arch: int) -> None:
    rows = compiled(compiler, job, arch)
    assert rows
    assert [fault for row in rows for fault in faults(row)] == []


@pytest.mark.full
@pytest.mark.parametrize(("job", "arch"), [pair for pair in PAIRS if pair not in SPREAD])
def test_a_kernel_compiles_and_fits_on_every_other_architecture(compiler: LineProcess, job: str, arch: int) -> None:
    rows = compiled(compiler, job, arch)
    assert rows
    assert [fault for row in rows for fault in faults(row)] == []


@pytest.mark.parametrize(
    "job", some(["decode bfloat16 128", "prefill bfloat16 128", "latent bfloat16 16"], ["latent bfloat16 16"])
)
def test_any_part_of_a_batch_runs_the_same_kernel(compiler: LineProcess, job: str) -> None:
    """Another kernel would be compiled while requests wait."""
    assert {row.hash for row in compiled(compiler, f"{job} parts", 90)} == {
        row.hash for row in compiled(compiler, job, 90)
    }


@pytest.mark.full
@pytest.mark.parametrize("arch", ARCHS)
def test_the_check_stays_small(compiler: LineProcess, arch: int) -> None:
    rows = [row for job, job_arch in PAIRS if job_arch == arch for row in compiled(compiler, job, arch)]
    assert len({row.hash for row in rows}) <= MAX_KERNELS


PTX = """
    @%p1 cp.async.cg.shared.global [ %r50 + 0 ], [ %rd26 + 0 ], 0x10, %r51;
    cp.async.cg.shared.global [%r1], [%rd1], 16;
    cp.async.ca.shared.global [ %r52 + 0 ], [ %rd27 + 0 ], 0x8, %r53;
    cp.async.ca.shared.global.L2::cache_hint [%r2], [%rd2], 4, %rd9;
    cp.async.commit_group;
    cp.async.wait_group 2;
    @%p2 cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%r5], [%rd8, {%r1, %r2}], [%r9];
"""


def test_copies_are_counted_by_their_width() -> None:
    """Instructions in the forms of the PTX ISA, as Triton writes them and as a person would."""
    assert copies(PTX) == {"wide": 2, "narrow": 2, "tma": 1}


WIDE_JOBS = ["decode bfloat16 128", "decode bfloat16+fp8 128", "prefill bfloat16 128", "prefill bfloat16+fp8 128"]


@pytest.mark.parametrize("job", some(WIDE_JOBS, ["decode bfloat16+fp8 128"]))
def test_attention_on_hopper_copies_16_bytes_at_a_time(compiler: LineProcess, job: str) -> None:
    rows = [row for row in compiled(compiler, job, 90) if row.kernel != "merge_kernel"]
    assert [(row.wide > 0, row.narrow) for row in rows] == [(True, 0)]


@pytest.mark.parametrize("job", ["prefill bfloat16 128 blocks of 64", "prefill bfloat16+fp8 128 blocks of 64"])
@pytest.mark.parametrize(("arch", "has_tma"), some([(89, False), (90, True), (100, True)], [(90, True)]))
def test_prefill_copies_whole_tiles_where_a_page_holds_them(
    compiler: LineProcess, job: str, arch: int, has_tma: bool
) -> None:
    (row,) = compiled(compiler, job, arch)
    assert (row.tma > 0, row.wide == 0) == (has_tma, has_tma)


def test_words_and_inputs_of_a_4_bit_product_are_copied_16_bytes_at_a_time(compiler: LineProcess) -> None:
    """For 8 tokens in three stages: 8 copies of words, 8 of inputs, and for each of four groups one of scales, one of
    zeros."""
    (row,) = compiled(compiler, "int4 bfloat16 8", 90)
    assert (row.wide, row.narrow) == (3 * 16, 3 * 8)


def compiled_report() -> list[dict[str, str]]:
    with (ROOT / "reports" / "kernels" / "compiled.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.full
@pytest.mark.skipif(version("triton") != "3.6.0", reason="the report is of what triton 3.6.0 compiles")
def test_the_report_is_what_compiles(compiler: LineProcess) -> None:
    rows = [row for arch in ARCHS for job in JOBS if (job, arch) in PAIRS for row in compiled(compiler, job, arch)]
    assert compiled_report() == [{column: str(getattr(row, column)) for column in COLUMNS} for row in rows]


@pytest.mark.full
def test_the_disassembler_lists_as_many_instructions_as_the_code_is_long() -> None:
    """nvdisasm takes longer than the compiler, so the rows' count is the length of the code."""
    code = """
import json, re, tempfile
from pathlib import Path
from tests.support.compile_kernels import INSTRUCTION, Compiler, _tool, code_bytes
compiler, counts = Compiler(), []
for job, arch in (("norm bfloat16 4096 residual", 80), ("best 128256", 90), ("rotate bfloat16 128", 100)):
    compiler.rows(job, arch)
    for _, kernel in compiler._compiled:
        with tempfile.TemporaryDirectory() as folder:
            cubin = Path(folder, "kernel.cubin")
            cubin.write_bytes(kernel.asm["cubin"])
            listed = re.findall(r"(?m)^\\s+/\\*[0-9a-f]+\\*/", _tool("nvdisasm", "-c", str(cubin)))
        counts.append((len(listed), code_bytes(kernel.asm["cubin"]) // INSTRUCTION))
print(json.dumps(counts))
"""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    counts = json.loads(done.stdout)
    assert len(counts) >= 3
    assert [listed for listed, _ in counts] == [counted for _, counted in counts]
    assert all(counted > 0 for _, counted in counts)


@pytest.mark.parametrize(
    ("arch", "config", "registers", "shared", "programs"),
    [
        # 79 * 32 = 2528 registers of a warp are 2560 in units of 256; 16384 / 2560 = 6 warps in each quarter, 24 in
        # all, 6 programs of 4; 228 KiB hold three times 71 KiB.
        (90, "w4 s3", 79, 71_680, 3),
        (90, "w4 s3", 79, 0, 6),
        (90, "w4 s3", 114, 39_424, 4),  # 3648 are 3840: 4 warps in each quarter
        (90, "w4 s3", 78, 39_424, 5),  # 6 by registers; 233472 / 40448 = 5.8
        (90, "w8 s2", 171, 94_720, 1),  # 5472 are 5632: 2 warps in each quarter, 8 in all
        (90, "w8 s3", 128, 94_720, 2),
        (89, "w4 s3", 16, 0, 12),  # 48 warps
        (90, "w1 s3", 16, 0, 32),  # 64 warps, but 32 programs
        (89, "w1 s3", 16, 0, 24),
        (80, "w4 s3", 32, 166_912, 1),  # the largest program: 163 KiB, and 1 KiB that the system takes
        (100, "w4 s3", 32, 115_712, 2),  # 113 KiB and 1 KiB, twice, are 228 KiB
        (100, "w4 s3", 32, 115_713, 1),
    ],
)
def test_programs_share_a_multiprocessors_registers_warps_and_memory(
    arch: int, config: str, registers: int, shared: int, programs: int
) -> None:
    assert CompiledKernel("", "", config, arch, registers, 0, shared, 900, "").programs == programs


@pytest.mark.parametrize(("job", "arch"), [pair for pair in FP8_ON_SM_80 if pair not in WIDENED_ON_SM_80])
def test_float8_on_a_gpu_without_it_is_refused_by_name(compiler: LineProcess, job: str, arch: int) -> None:
    answer = compiler.ask(f"{job} {arch}")
    cached = "values" if job.startswith("fp8 rows") else "k_cache"
    assert answer["error"].startswith(f"EnvironmentProblem: sm_80: {cached} is torch.float8_e4m3fn")


@pytest.mark.parametrize(("job", "arch"), WIDENED_ON_SM_80)
def test_weights_in_float8_are_widened_on_a_gpu_without_it(compiler: LineProcess, job: str, arch: int) -> None:
    assert compiler.ask(f"{job} {arch}") == {"rows": []}


def test_float8_is_refused_below_8_9_only() -> None:
    with pytest.raises(EnvironmentProblem, match=r"^sm_86: cache is torch\.float8_e4m3fn, .*; keep the KV"):
        need_supported("cache", torch.float8_e4m3fn, 86)
    need_supported("cache", torch.float8_e4m3fn, 89)
    need_supported("cache", torch.bfloat16, 80)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (CompiledKernel("", "decode", "", 90, 96, 8, 0, 900, ""), "decode on sm_90: 8 bytes of registers spilled"),
        (
            CompiledKernel("", "decode", "", 89, 96, 0, 101_377, 900, ""),
            "decode on sm_89: 101377 bytes of shared memory, of 101376",
        ),
        (
            CompiledKernel("", "decode", "", 100, 4, 0, 0, 38, ""),
            "decode on sm_100: 4 registers and 38 instructions: nothing is computed",
        ),
    ],
)
def test_a_bad_kernel_is_seen(row: CompiledKernel, fault: str) -> None:
    assert faults(row) == [fault]
