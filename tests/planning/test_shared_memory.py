"""Where the GPU and the host share one memory, and a machine has one of both."""

import pytest

from tests.support.cli import Run
from tests.support.cli import run as run  # the fixture

LARGE = ("estimate", "llama-3.1-70b", "--ctx", "8k", "--memory-in-use", "2GiB")


@pytest.mark.parametrize("name", ["gb10", "jetson-thor"])
def test_no_remedy_is_a_second_gpu_of_the_machine(name: str, run: Run) -> None:
    fixes = run(*LARGE, "--gpu", name, "--format", "json").json["fixes"]
    assert fixes
    assert not any("parallel" in fix["flag"] for fix in fixes)


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


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (("--engine", "llamacpp", "-ngl", "99", "-ts", "3,1"), "on GPU 0"),
        (("--pp", "2"), "on each GPU of stage 1"),
        (("--tp", "2"), "on each GPU"),
    ],
)
def test_a_shortage_names_the_gpus_that_lack_the_bytes(words: tuple[str, ...], where: str, run: Run) -> None:
    """A tensor split of 3 to 1 puts three quarters of the layers on the first GPU; stage 1 of 2 has the larger half."""
    answer = run("estimate", "llama-3.1-70b", "--ctx", "8k", "--gpu", "2xl4", *words).out.splitlines()[0]
    assert answer.endswith(f" short {where}")
