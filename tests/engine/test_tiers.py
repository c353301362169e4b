"""KV beyond the device: the tokens are the same with it, its bytes are the plan's, and files outlive the process."""

import os
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import Engine, EngineConfig
from engine.connector import Transfer, Transfers
from engine.disk_tier import HEADER_BYTES, DiskTier
from engine.host_tier import HostTier, chunk_bytes
from engine.states import MambaGroup
from kvplan.core.errors import EnvironmentProblem, KvplanError, KvplanWarning, UsageError
from kvplan.simulate.arrivals import Open
from kvplan.simulate.loop import Simulation
from kvplan.simulate.tiers import TierSpec, TimedTiers
from kvplan.simulate.work import Reach
from kvplan.workloads.trace import TraceRequest
from tests.support.small_engines import (
    FAMILIES,
    engine_for,
    faults,
    greedy,
    random_tokens,
    run_dry,
    saved_model,
    simulated,
    wrong_greedy_tokens,
)
from tests.support.step_times import Constant

GIB = 2**30
ROOT = Path(__file__).parents[2]


def offloading(family: str | Path, num_blocks: int, num_chunks: int, **changes: Any) -> Engine:
    """An engine of so few blocks that a second long prompt takes those of the first, and so many chunks beside it."""
    size = chunk_bytes(engine_for(family, num_blocks=2).runner.memory.block_bytes) * num_chunks / GIB
    return engine_for(family, num_blocks=num_blocks, kv_offloading_size=size, **changes)


def num_loaded(engine: Engine) -> int:
    assert engine.tiers is not None
    return engine.tiers.external_cache_stats.hits


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_same_when_the_prompt_comes_from_host_memory(family: str) -> None:
    engine = offloading(family, num_blocks=130, num_chunks=900)
    first, *others = random_tokens(50, 49, 51, 47, 52, 48, 50, 53, 46, 51, 52, 53, 49)
    assert faults(family, engine.generate([first], greedy(8)), 8) == []
    engine.generate(others, greedy(2))
    again = engine.generate([first], greedy(8))
    assert faults(family, again, 8) == []
    assert num_loaded(engine) > 0
    assert again[0].num_cached_tokens > 32


HYBRIDS = ("qwen3_next", pytest.param("nemotron_h", marks=pytest.mark.full))


@pytest.mark.parametrize("changes", [{}, {"async_scheduling": True, "max_num_batched_tokens": 40}])
@pytest.mark.parametrize("family", HYBRIDS)
def test_tokens_are_the_same_when_states_come_from_host_memory(family: str, changes: dict[str, Any]) -> None:
    """A prompt of three blocks and a bit: three blocks of its attention, and the states after the third."""
    size = engine_for(family, num_blocks=2).config.block_size
    engine = offloading(family, 14, 400, max_model_len=8 * size, max_num_seqs=3, **changes)
    assert engine.tiers is not None
    first, *others = random_tokens(3 * size + 5, *(3 * size + 5 + n for n in range(6)))
    assert wrong_greedy_tokens(family, first, engine.generate([first], greedy(8))[0].token_ids) == []
    engine.generate(others, greedy(2))
    (again,) = engine.generate([first], greedy(8))
    assert wrong_greedy_tokens(family, first, again.token_ids) == []
    assert (num_loaded(engine), again.num_cached_tokens) == (3 * size, 3 * size)
    num_states = sum(isinstance(group.rule, MambaGroup) for group in engine.runner.groups)
    loads = [num_bytes for kind, num_bytes, _ in engine.tiers.host.copies if kind == "load"]
    assert loads[-1] == (3 + num_states) * engine.runner.memory.block_bytes


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h", "qwen3_5"])
def test_tokens_are_the_same_under_load_beside_states(family: str) -> None:
    size = engine_for(family, num_blocks=2).config.block_size
    prefixes = random_tokens(2 * size + 3, 3 * size + 2, 2 * size + 5, 2 * size + 9)
    prompts = [prefixes[i % 4] + tail for i, tail in enumerate(random_tokens(*[5, 9, 3, 7] * 4, seed=1))]
    engine = offloading(family, 16, 60, max_model_len=8 * size, max_num_seqs=2)
    for prompt, output in zip(prompts, engine.generate(prompts, greedy(6)), strict=True):
        assert wrong_greedy_tokens(family, prompt, output.token_ids) == []
    assert num_loaded(engine) > 0
    assert run_dry(engine) == {}
    assert engine.tiers is not None
    engine.tiers.connector.pool.check_invariants()


@pytest.mark.parametrize(
    "changes", [{"async_scheduling": True}, {"max_num_batched_tokens": 16}, {"kv_cache_dtype": "float16"}]
)
def test_tokens_are_the_same_under_load(changes: dict[str, Any]) -> None:
    """Many requests of few prefixes in a pool too small for two of them, and in host memory too small for all."""
    prefixes = random_tokens(40, 44, 36, 40)
    tails = random_tokens(*[5, 9, 3, 7] * 4, seed=1)
    prompts = [prefixes[i % 4] + tail for i, tail in enumerate(tails)]
    plain = engine_for("llama", num_blocks=40, max_num_seqs=3, **changes)
    expected = [output.token_ids for output in plain.generate(prompts, greedy(6))]
    engine = offloading("llama", num_blocks=40, num_chunks=34, max_num_seqs=3, **changes)
    assert [output.token_ids for output in engine.generate(prompts, greedy(6))] == expected
    assert run_dry(engine) == {}
    assert engine.tiers is not None
    engine.tiers.connector.pool.check_invariants()


def test_nothing_of_it_runs_when_it_is_off() -> None:
    engine = engine_for("llama")
    assert engine.tiers is None
    assert type(engine.scheduler).__name__ == "Scheduler"


def test_the_bytes_are_those_that_vllms_rules_give_the_same_blocks() -> None:
    """servers/vllm/tiers.py is compared with vLLM's own classes: floor(GiB / chunk) chunks of whole pages of 4 KiB."""
    from kvplan.hardware.gpu import gpu
    from kvplan.models.hf_config import load_spec
    from kvplan.planning.plan import Request, plan
    from kvplan.servers.vllm import tiers
    from kvplan.servers.words.arguments import EngineArgs

    args = EngineArgs(dtype="float32", block_size=16, max_model_len=96, kv_offloading_size=3_000_000)
    answer = plan(Request(load_spec(saved_model("llama")), gpu("h100-80g"), args))
    (tier,) = tiers.of_plan(answer)
    engine = engine_for("llama", block_size=16, kv_offloading_size=3_000_000 / GIB)
    assert engine.tiers is not None
    assert engine.tiers.size == tier.size
    assert engine.tiers.host.memory.nbytes == tier.size


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_offloading_size": 0}, "kv_offloading_size must be a number of GiB above 0"),
        ({"kv_offloading_size": float("nan")}, "kv_offloading_size must be a number"),
        ({"kv_offloading_size": 1e-9}, "holds no chunk"),
        ({"kv_offloading_size": 1e6}, "are more than the host's"),
        ({"kv_offloading_dir": "x"}, "go together"),
        ({"kv_offloading_dir": "x", "kv_offloading_disk_size": 1.0}, "give kv_offloading_size too"),
        (
            {"kv_offloading_size": 0.01, "kv_offloading_dir": "x", "kv_offloading_disk_size": 1.0, "max_loras": 1},
            "only",
        ),
        ({"kv_offloading_size": 0.01, "allocator": "contiguous"}, "needs allocator 'paged'"),
        ({"kv_offloading_size": 0.01, "kv_offloading_dir": "x", "kv_offloading_disk_size": 1e-9}, "holds no chunk"),
        ({"kv_offloading_size": 0.01, "kv_offloading_dir": "/proc/x", "kv_offloading_disk_size": 1.0}, "be written"),
    ],
)
def test_what_cannot_be_offloaded_is_refused_by_name(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KvplanError, match=message):
        engine_for("llama", **options)


# --- copies ------------------------------------------------------------------------------------------------------


def test_blocks_come_back_as_they_went_into_any_other_block() -> None:
    tensors = [
        torch.randn(6, 4, 3),
        torch.randn(6, 4, 2, dtype=torch.float16),
        torch.zeros(6, 4).to(torch.float8_e4m3fn),
    ]
    before = [tensor.clone() for tensor in tensors]
    tier = HostTier(tensors, num_chunks=3, blocks_per_chunk=2)
    tier.begin(Transfers(stores={0: Transfer("a", ((2, (1, 3)), (0, (0, 4))))}))
    tier.begin(Transfers(loads={1: Transfer("b", ((2, (5, 2)),))}, flush={0}))
    tier.close()
    assert sorted(tier.finished()[0]) == [0, 1]
    for tensor, old in zip(tensors, before, strict=True):
        raw, old_raw = tensor.view(torch.uint8), old.view(torch.uint8)
        assert torch.equal(raw[[5, 2]], old_raw[[1, 3]])
        assert torch.equal(raw[[0, 1, 3, 4]], old_raw[[0, 1, 3, 4]])


def test_a_store_waits_for_the_step_that_computes_it_unless_it_is_flushed() -> None:
    tensor = torch.zeros(3, 4)
    tier = HostTier([tensor], num_chunks=3)
    store = Transfers(stores={0: Transfer("a", ((0, (1,)),))})
    tier.begin(store)
    tensor[1] = 7  # the step runs
    tier.begin(Transfers(stores={1: Transfer("b", ((1, (2,)),))}, flush={0, 1}))
    assert sorted(tier.finished()[0]) == [0, 1]
    assert tier.memory[0, :16].view(torch.float32).tolist() == [7.0] * 4
    tier.close()


# --- files -------------------------------------------------------------------------------------------------------


def disk(folder: Path, num_chunks: int, size: int = 64) -> DiskTier:
    return DiskTier(folder, num_chunks * (size + HEADER_BYTES), size)


def payload(number: int) -> memoryview:
    return memoryview(bytes([number]) * 64)


def key(number: int) -> tuple[bytes, int]:
    return bytes([number]) * 32, number % 2


def test_files_are_there_again_and_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    tier = disk(tmp_path, 3)
    for number in (1, 2, 3):
        tier.write(key(number), payload(number))
        os.utime(tier._path(key(number)), ns=(number, number))
    assert tier.read(key(1)) == bytes(payload(1))  # now the latest
    tier.close()
    tier = disk(tmp_path, 3)
    assert tier.num_files == 3
    tier.write(key(4), payload(4))
    assert [number for number in (1, 2, 3, 4) if key(number) in tier] == [1, 3, 4]
    assert tier.num_bytes == sum(path.stat().st_size for path in tmp_path.glob("*/*.g?"))
    tier.close()
    assert disk(tmp_path, 1).num_files == 1


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1] + b"x", lambda raw: b"?" + raw[1:], lambda raw: raw[:50]])
def test_a_damaged_file_is_dropped_with_a_warning(tmp_path: Path, damage: Any) -> None:
    tier = disk(tmp_path, 3)
    tier.write(key(1), payload(1))
    path = tier._path(key(1))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(KvplanWarning, match="is damaged and was dropped"):
        assert tier.read(key(1)) is None
    assert key(1) not in tier
    assert not path.exists()
    assert tier.num_damaged == 1
    tier.close()


@pytest.mark.parametrize("size", [0, 50])
def test_a_cut_file_is_dropped_with_a_warning_at_the_start(tmp_path: Path, size: int) -> None:
    """It would be disk space beyond the limit."""
    tier = disk(tmp_path, 3)
    for number in (1, 2):
        tier.write(key(number), payload(number))
    tier.close()
    path = tier._path(key(1))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.warns(KvplanWarning, match=f"{path} is damaged and was dropped"):
        tier = disk(tmp_path, 3)
    assert (tier.num_damaged, tier.num_files, path.exists()) == (1, 1, False)
    assert tier.read(key(2)) == bytes(payload(2))
    tier.close()


def test_a_directory_is_one_process_at_a_time(tmp_path: Path) -> None:
    tier = disk(tmp_path, 3)
    with pytest.raises(EnvironmentProblem, match=rf"^KV offloading directory {tmp_path} is in use by another process"):
        disk(tmp_path, 3)
    tier.close()
    disk(tmp_path, 3).close()


def test_what_is_no_chunk_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "notes.txt").write_text("mine")
    (tmp_path / "ab" / ".half.tmp").write_text("of a killed process")
    tier = disk(tmp_path, 3)
    assert tier.num_files == 0
    assert [path.name for path in (tmp_path / "ab").iterdir()] == ["notes.txt"]
    tier.close()


def as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to("../elsewhere")


def as_link_without_end(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def as_large_file(path: Path) -> None:
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("at_start", [True, False])
@pytest.mark.parametrize("change", [as_fifo, as_link, as_link_without_end, as_large_file])
def test_only_a_file_of_a_chunks_size_is_read(tmp_path: Path, change: Callable[[Path], None], at_start: bool) -> None:
    """Another user of a shared directory may put anything there: nothing waits, and nothing outside it is read."""
    tier = disk(tmp_path, 3)
    tier.write(key(1), payload(1))
    path = tier._path(key(1))
    if at_start:
        tier.close()
        change(path)
        with pytest.warns(KvplanWarning, match=f"{path} is damaged and was dropped"):
            tier = disk(tmp_path, 3)
        assert tier.num_files == 0
    else:
        change(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", KvplanWarning)  # what cannot be opened is dropped without one
            assert tier.read(key(1)) is None
    assert not os.path.lexists(path)
    tier.close()


@pytest.mark.parametrize("place", ["draft", "folder"])
def test_nothing_is_written_through_a_link(tmp_path: Path, place: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    tier = disk(tmp_path / "tier", 3)
    path = tier._path(key(1))
    if place == "draft":
        path.parent.mkdir()
        path.with_name(f".{path.name}.tmp").symlink_to(outside / "precious")
        assert tier.write(key(1), payload(1))
        assert not path.is_symlink()
    else:
        path.parent.symlink_to(outside)
        with pytest.warns(KvplanWarning, match="was not written"):
            assert not tier.write(key(1), payload(1))
    assert [(file.name, file.read_text()) for file in outside.iterdir()] == [("precious", "precious")]
    tier.close()


def test_no_lock_is_made_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / ".lock").symlink_to(tmp_path / "outside")
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        disk(tmp_path / "tier", 3)
    assert not (tmp_path / "outside").exists()


def on_disk(folder: Path, **changes: Any) -> Engine:
    return offloading(
        "llama", 40, 60, kv_offloading_dir=str(folder), kv_offloading_disk_size=0.01, **changes
    )  # fmt: skip


def test_a_directory_in_use_is_refused_before_the_weights_are_loaded(tmp_path: Path) -> None:
    stages: list[str] = []
    engine = on_disk(tmp_path)
    with pytest.raises(EnvironmentProblem, match=r"^KV offloading directory .* is in use by another process"):
        Engine(saved_model("llama"), engine.config, stages.append)
    assert stages == []
    engine.close()


def test_a_restart_finds_the_prompts_of_the_process_before(tmp_path: Path) -> None:
    prompts = random_tokens(50, 49)
    engine = on_disk(tmp_path)
    expected = [output.token_ids for output in engine.generate(prompts, greedy(6))]
    engine.close()
    engine = on_disk(tmp_path)
    assert engine.tiers is not None
    assert engine.tiers.host.num_bytes["fetch"] == 0
    outputs = engine.generate(prompts, greedy(6))
    assert [output.token_ids for output in outputs] == expected
    assert [output.num_cached_tokens for output in outputs] == [48, 48]
    assert engine.tiers.host.num_bytes["fetch"] > 0
    engine.close()


def test_a_damaged_prompt_is_computed_again(tmp_path: Path) -> None:
    (prompt,) = random_tokens(50)
    engine = on_disk(tmp_path)
    expected = engine.generate([prompt], greedy(6))[0].token_ids
    engine.close()
    for path in tmp_path.glob("*/*/*.g0"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    engine = on_disk(tmp_path)
    with pytest.warns(UserWarning, match="is damaged and was dropped"):
        (output,) = engine.generate([prompt], greedy(6))
    assert output.token_ids == expected
    assert output.num_cached_tokens == 0
    engine.close()


def test_another_models_files_are_not_read(tmp_path: Path) -> None:
    (prompt,) = random_tokens(50)
    engine = on_disk(tmp_path)
    engine.generate([prompt], greedy(2))
    engine.close()
    other = on_disk(tmp_path, load_format="dummy", seed=3)
    assert other.generate([prompt], greedy(2))[0].num_cached_tokens == 0
    other.close()


def test_a_pool_too_small_for_a_prompt_fetches_nothing_and_goes_on(tmp_path: Path) -> None:
    (prompt,) = random_tokens(60)
    engine = on_disk(tmp_path)
    expected = engine.generate([prompt], greedy(4))[0].token_ids
    engine.close()
    small = offloading("llama", 40, 5, kv_offloading_dir=str(tmp_path), kv_offloading_disk_size=0.01)
    assert small.generate([prompt], greedy(4))[0].token_ids == expected
    small.close()


KILLED = """
    import os, signal, sys
    from tests.support.small_engines import greedy, random_tokens
    from tests.engine.test_tiers import on_disk
    from pathlib import Path
    engine = on_disk(Path(sys.argv[1]))
    engine.generate(random_tokens(50), greedy(6))
    while engine.tiers.host.disk.num_files < 4:
        engine.step()
    print("written", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.full
def test_a_killed_process_leaves_files_that_are_found_again(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (-signal.SIGKILL, "written\n"), run.stderr
    engine = on_disk(tmp_path)
    (output,) = engine.generate(random_tokens(50), greedy(6))
    assert output.num_cached_tokens >= 16
    assert faults("llama", [output], 6) == []
    engine.close()


def test_several_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="one rank only"):
        EngineConfig(kv_offloading_size=1.0, tensor_parallel_size=2)


def test_a_simulation_loads_what_the_engine_loads() -> None:
    """Twenty prompts of few beginnings, one after the other, in a pool too small for two of them: what each finds on
    the device and what memory gives back, request by request."""
    prefixes = random_tokens(40, 44, 36, 40)
    picks = [0, 1, 0, 2, 3, 0, 1, 1, 2, 0, 3, 2, 1, 0, 3, 3, 2, 1, 0, 2]
    tails = random_tokens(*[5, 9, 3, 7] * 5, seed=1)
    prompts = [prefixes[pick] + tail for pick, tail in zip(picks, tails, strict=True)]
    engine = offloading("llama", num_blocks=26, num_chunks=40, async_scheduling=False)
    size = engine.config.block_size
    measured = []
    for prompt in prompts:
        seq = engine.submit(prompt, greedy(3)).seq
        while engine.has_unfinished:
            for output in engine.step():
                measured.append((output.num_cached_tokens - seq.num_loaded_tokens, seq.num_loaded_tokens))
    assert engine.tiers is not None
    tiers = TimedTiers((TierSpec("cpu", 40, 10**9),), engine.scheduler.blocks.groups, 1, 1)
    names: dict[tuple[int, ...], int] = {}  # a block's tokens and all before it -> its id

    def ids(prompt: list[int]) -> tuple[int, ...]:
        return tuple(names.setdefault(tuple(prompt[:end]), len(names)) for end in range(size, len(prompt) + 1, size))

    requests = [TraceRequest(place * 100.0, len(prompt), 3, ids(prompt)) for place, prompt in enumerate(prompts)]
    rules, groups = simulated(engine), engine.scheduler.blocks.groups
    run = Simulation(rules, 26, groups, (Reach(None),), Constant(1.0), Open(iter(requests)), size, tiers)
    run.run()
    assert list(zip(run.records.cached, run.records.loaded, strict=True)) == measured
    assert sum(loaded for _, loaded in measured) > 100
