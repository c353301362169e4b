"""Where the GPU and the host share one memory, and a machine has one of both."""

import pytest

from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

LARGE = ("estimate", "llama-3.1-70b", "--ctx", "8k", "--memory-in-use", "2GiB")


@pytest.mark.parametrize("name", ["gb10", "jetson-thor"])
def test_no_remedy_is_a_second_gpu_of_the_machine(name: str, run: Run) -> None:
    fixes = run(*LARGE, "--gpu", name, "--format", "json").json["fixes"]
    assert fixes and not any("parallel" in fix["flag"] for fix in fixes)


def test_two_machines_are_two_nodes(run: Run) -> None:
    result = run(*LARGE, "--gpu", "gb10", "--tp", "2")
    assert "--nnodes 2 --node-rank 0" in result.out


@pytest.mark.parametrize("name", ["m4-max-128g", "strix-halo"])
def test_a_server_of_one_machine_is_not_spread_over_two(name: str, run: Run) -> None:
    words = ("estimate", "llama-3.1-8b", "--gpu", name, "--engine", "llamacpp", "--ctx", "8k")
    result = run(*words, "--tp", "2")
    assert result.code == 2
    assert "is one GPU with the host's memory" in result.errors[0]
    assert run(*words, "--tp", "1").code == 0


def test_weights_moved_to_the_host_stay_in_the_one_memory(run: Run) -> None:
    result = run("estimate", "llama-3.1-8b", "--gpu", "gb10", "--ctx", "8k", "--cpu-offload-gb", "4")
    assert result.code == 2
    assert "GPU and host share one memory" in result.errors[0]
