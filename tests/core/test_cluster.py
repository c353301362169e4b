"""Work on a Ray cluster of two nodes of this machine: what one process answers, whatever becomes of a worker."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvplan.core.cluster import Cluster
from kvplan.core.errors import EnvironmentProblem, UsageError
from kvplan.core.processes import in_order
from tests.support.cli import Run
from tests.support.cli import refused as refused_line
from tests.support.cli import run as run  # the fixture

WITHOUT = """
import sys
from kvplan.cli.main import main
code = main(["sweep", "llama-3.1-8b", "--gpu", "a100-80g,h100-80g", "--ctx", "8k", "-q", "--jobs", "1"])
print(f"exit code {code}; loaded:", *(name for name in sys.modules if name.split(".")[0] == "ray"), file=sys.stderr)
"""


def test_without_a_cluster_nothing_of_ray_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=900, check=False)
    assert done.stderr.strip().splitlines()[-1:] == ["exit code 0; loaded:"], done.stderr


@pytest.mark.parametrize(
    "address",
    [
        "",
        " ",
        "--quiet",
        "head",
        "1:2:3",
        "ray://head",
        "http://head:1",
        "10.0.0.1:6379x",
        ":6379",
        "127.0.0.1:99999",
    ],
)
def test_an_address_that_names_no_cluster_is_refused(run: Run, address: str) -> None:
    done = run("sweep", "llama-3.1-8b", "--gpu", "a100-80g", f"--ray={address}")
    assert "--ray names no cluster" in refused_line(done)


def test_ray_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplan.core.cluster.find_spec", lambda name: None)
    with pytest.raises(EnvironmentProblem, match="ray is not installed"):
        list(in_order(square, 1, range(3), Cluster("auto"), name="x"))


def test_a_home_that_ray_cannot_write_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def init(**_: object) -> None:
        raise PermissionError(13, "Permission denied", "/nonexistent")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(EnvironmentProblem) as caught:
        list(in_order(square, 1, range(3), Cluster("auto"), name="x"))
    assert str(caught.value) == (
        "--ray auto: Ray cannot write /nonexistent (Permission denied); set HOME and TMPDIR to writable folders"
    )


@pytest.mark.parametrize(
    ("address", "problem"), [("local", "Ray did not start here"), ("auto", "no Ray cluster answers there")]
)
@pytest.mark.parametrize(
    ("error", "reason"),
    [  # Node._wait_for_node_address and connect of ray 2.60
        (Exception("The current node timed out during startup. This could happen."), "timed out during startup."),
        (ConnectionError("Could not find any running Ray instance.\nPlease start one."), "any running Ray instance)"),
        (RuntimeError(), "(RuntimeError)"),
    ],
)
def test_a_ray_that_does_not_start_is_said(
    monkeypatch: pytest.MonkeyPatch, address: str, problem: str, error: Exception, reason: str
) -> None:
    import ray

    def init(**_: object) -> None:
        raise error

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(EnvironmentProblem) as caught:
        list(in_order(square, 1, range(3), Cluster(address), name="x"))
    assert f"--ray {address}: {problem} (" in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "[::1]:1"])
def test_a_cluster_that_does_not_answer_is_said_at_once(run: Run, address: str) -> None:
    pytest.importorskip("ray")
    done = run("sweep", "llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "8k", "--ray", address)
    assert "nothing answers there" in refused_line(done, 3)


def square(base: int, number: int) -> int:
    return base + number * number


def killed_once(folder: str, number: int) -> int:
    mark = Path(folder) / "killed"
    if number == 3 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def node_of(_: None, number: int) -> str:
    import time

    import ray

    time.sleep(0.05)  # long enough for the other node to take its share
    return str(ray.get_runtime_context().get_node_id())


def refused(_: None, number: int) -> int:
    if number == 2:
        raise UsageError("x", "is refused", "remove it")
    return number


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two nodes of one core each, as Ray starts them for its own tests."""
    pytest.importorskip("ray")
    import ray
    from ray.cluster_utils import Cluster as LocalCluster

    nodes = LocalCluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_two_nodes_answer_as_one_process(cluster: Any, run: Run, tmp_path: Path) -> None:
    there = Cluster(cluster.address)
    assert list(in_order(square, 100, range(7), there, name="x")) == [100, 101, 104, 109, 116, 125, 136]
    assert len(set(in_order(node_of, None, range(40), there, name="x"))) == 2
    # a worker that is killed loses nothing
    assert list(in_order(killed_once, str(tmp_path), range(9), there, name="x")) == list(range(9))
    assert (tmp_path / "killed").exists()
    # an error of a task is the command's; tasks after it are given up
    with pytest.raises(UsageError, match="is refused"):
        list(in_order(refused, None, range(5), there, name="x"))
    # the commands
    quiet = ("-q", "--format", "json")
    load = ("--prompt-tokens", "uniform:100-900", "--output-tokens", "40", "--num-requests", "60", *quiet)
    commands = [
        ("sweep", "llama-3.1-8b", "qwen3-8b", "--gpu", "a100-80g,h100-80g", "--ctx", "4k,8k", *quiet),
        ("simulate", "llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "8k", "--rate", "4", "--replicas", "3", "--router",
         "random", *load),
        ("tune", "llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "8k", "--max-num-seqs", "64",
         "--max-num-batched-tokens", "8192", "--no-fp8", "--gpu-memory-utilization", "0.9", "--block-size", "16",
         "--slo", "ttft=2s,tpot=50ms", *load),
    ]  # fmt: skip
    for command in commands:
        alone = run(*command, "--jobs", "1")
        assert alone.code == 0, alone.err
        assert run(*command, "--ray", cluster.address).json == alone.json


NOISY = """
import os, sys, threading
from kvplan.cli import output
with output.answers_only():
    with output.standard_output():
        output.put("[1,\\n")
    print("of a library")
    thread = threading.Thread(target=lambda: sys.stdout.write("of its thread\\n"))
    thread.start()
    thread.join()
    os.write(1, b"of its compiled part\\n")
    os.system("echo of its process")
    output.show([((" 2]", ""),)], "never")
print()
"""


def test_standard_output_is_for_the_answer_whoever_else_prints() -> None:
    done = subprocess.run([sys.executable, "-c", NOISY], capture_output=True, text=True, timeout=900, check=False)
    assert json.loads(done.stdout) == [1, 2]
    assert sorted(done.stderr.splitlines()) == [
        "of a library", "of its compiled part", "of its process", "of its thread",
    ]  # fmt: skip


def rows_of_mortals(folder: str, grid: Any, part: tuple[int, int]) -> Any:
    """Rows of a sweep, whose first worker is killed."""
    mark = Path(folder) / "killed"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return grid.rows(*part)


KILLED = """
import sys
from functools import partial
from kvplan.cli.main import main
from kvplan.planning import sweep
from tests.core.test_cluster import rows_of_mortals
sweep._rows = partial(rows_of_mortals, sys.argv[1])
sys.exit(main(["sweep", "llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "4k,8k", "--format", "json", "--ray", "local"]))
"""


@pytest.mark.full
def test_the_answer_is_json_though_a_worker_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    words = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=False)
    assert (tmp_path / "killed").exists()
    assert done.returncode == 0, done.stderr
    assert [row["max_model_len"] for row in json.loads(done.stdout)["rows"]] == [4096, 8192]
    assert "kvplan: note: --ray local: Ray started on this machine, " in done.stderr


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_the_cluster_is_named_unless_quiet(cluster: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    command = ("sweep", "llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "4k", "--format", "json")
    for address in ("auto", cluster.address):
        done = run(*command, "--ray", address)
        assert f"--ray {address}: Ray cluster found at {cluster.address}, 2 nodes, 2 CPUs" in done.err
    assert run(*command, "--ray", "auto", "-q").err == ""


@pytest.mark.parametrize("command", ["sweep", "simulate"])
def test_an_answer_begins_when_the_cluster_is_reached(run: Run, command: str) -> None:
    pytest.importorskip("ray")
    load = ("--replicas", "2", "--router", "random", "--prompt-tokens", "9", "--output-tokens", "9", "--rate", "1")
    words = (command, "llama-3.1-8b", "--gpu", "a100-80g", "--ctx", "8k", *(load if command == "simulate" else ()))
    done = run(*words, "--format", "json", "--ray", "127.0.0.1:1")
    assert "nothing answers there" in refused_line(done, 3)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_a_node_that_is_lost_loses_nothing(cluster: Any) -> None:
    node = cluster.add_node(num_cpus=2)
    results = in_order(node_of, None, range(60), Cluster(cluster.address), name="x")
    seen = [next(results) for _ in range(10)]
    cluster.remove_node(node, allow_graceful=False)
    assert len(seen) + len(list(results)) == 60
