"""Servers over several GPUs: as cheap as the best of all assignments, and every GPU's servers start."""

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, product

import pytest

from kvplan.core.errors import UsageError
from kvplan.hardware.gpu import gpu
from kvplan.planning.assign import Assignment, assign
from kvplan.planning.pack import Pool, Tenant, pack
from tests.planning.test_pack import check_starts, request
from tests.support.cli import Run, run

__all__ = ["run"]
MODELS = ("qwen3-0.6b", "qwen3-4b", "qwen3-8b", "llama-3.1-8b-fp8", "qwen3-30b-a3b", "qwen3-32b", "llama-3.1-70b-fp8")
Server = tuple[str, str, int]  # its name, its model, its users


def tenant(server: Server, gpu_name: str, size: int) -> Tenant:
    name, model, users = server
    alone = request(model, gpu_name, 8192, "vllm")
    return Tenant(name, replace(alone, args=replace(alone.args, tensor_parallel_size=size)), users)


@cache
def start(servers: tuple[Server, ...], gpu_name: str, size: int) -> bool:
    try:
        return pack([tenant(server, gpu_name, size) for server in servers], 0).fits
    except UsageError:  # one is too large even alone
        return False


def device_sets(pools: Sequence[Pool]) -> list[tuple[tuple[str, int], ...]]:
    """Every set of 1, 2 or 4 GPUs of a kind, each GPU with a name of its own."""
    return [
        devices
        for pool in pools
        for size in (1, 2, 4)
        for devices in combinations([(pool.gpu.name, number) for number in range(pool.count)], size)
    ]


def cheapest(servers: Sequence[Server], pools: Sequence[Pool]) -> tuple[float, int, int] | None:
    """Dollars, GPUs and bytes of the best of all assignments, tried one by one; None if none starts."""
    dollars = {pool.gpu.name: pool.dollars for pool in pools}
    narrowest = {
        (server, pool.gpu.name): next((size for size in (1, 2, 4) if start((server,), pool.gpu.name, size)), None)
        for server in servers
        for pool in pools
    }
    every = device_sets(pools)
    narrow = [[devices for devices in every if narrowest[server, devices[0][0]] == len(devices)] for server in servers]
    for choices in (narrow, [every] * len(servers)):
        costs = [
            (sum(dollars[kind] for kind, _ in used), len(used), sum(gpu(kind).total_memory for kind, _ in used))
            for sets in product(*choices)
            if (used := {device for devices in sets for device in devices}) and works(servers, sets)
        ]
        if costs:
            return min(costs)
    return None


def works(servers: Sequence[Server], sets: Sequence[tuple[tuple[str, int], ...]]) -> bool:
    """Whether no GPU is in two different sets, and the servers of each set start together."""
    groups: dict[tuple[tuple[str, int], ...], list[Server]] = {}
    for server, devices in zip(servers, sets, strict=True):
        groups.setdefault(devices, []).append(server)
    if any({*first} & {*second} for first, second in combinations(groups, 2)):
        return False
    return all(start(tuple(group), devices[0][0], len(devices)) for devices, group in groups.items())


def drawn(draw: random.Random) -> tuple[list[Server], list[Pool]]:
    servers = [(f"s{number}", draw.choice(MODELS), draw.choice((1, 4, 16))) for number in range(draw.choice((2, 3, 4)))]
    kinds = draw.sample(("rtx-4090", "l40s", "a100-80g", "h200"), draw.choice((1, 2)))
    has_prices = draw.random() < 0.5
    limit = 3 if len(kinds) == 1 else 2
    return servers, [
        Pool(gpu(kind), draw.randint(1, limit), draw.choice((1.0, 1.5, 2.0, 4.0)) if has_prices else 0.0)
        for kind in kinds
    ]


def checked_cost(assignment: Assignment) -> tuple[float, int, int]:
    """What the GPUs in use cost, after every GPU's servers were started by the servers' own arithmetic."""
    devices: list[tuple[str, int]] = []
    dollars = 0.0
    for group, packing in zip(assignment.groups, assignment.packings, strict=True):
        pool = assignment.pools[group.pool]
        assert packing.started[0].plan.request.gpu == pool.gpu
        assert packing.started[0].plan.request.args.num_gpus == len(group.devices)
        check_starts(packing)
        devices += [(pool.gpu.name, device) for device in group.devices]
        dollars += pool.dollars * len(group.devices)
    assert len(devices) == len({*devices})
    assert all(number < pool.count for pool in assignment.pools for kind, number in devices if kind == pool.gpu.name)
    return dollars, len(devices), sum(gpu(kind).total_memory for kind, _ in devices)


def cases(seed: int, count: int) -> Iterator[tuple[list[Server], list[Pool]]]:
    draw = random.Random(seed)
    for _ in range(count):
        yield drawn(draw)


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 12), *(pytest.param(seed, 60, marks=pytest.mark.full) for seed in (1, 2))]
)
def test_no_assignment_costs_less_and_what_is_refused_has_none(seed: int, count: int) -> None:
    fitting = refused = 0
    for servers, pools in cases(seed, count):
        best = cheapest(servers, pools)
        tenants = [[tenant(server, pool.gpu.name, 1) for pool in pools] for server in servers]
        try:
            assignment = assign(tenants, pools, 0)
        except UsageError:  # one is too large even alone
            assert best is None
            refused += 1
            continue
        assert assignment.is_complete
        assert assignment.fits == (best is not None), (servers, pools)
        cost = checked_cost(assignment)
        if best is not None:
            names = {server.tenant.name for packing in assignment.packings for server in packing.started}
            assert names == {name for name, _, _ in servers}
            assert cost == pytest.approx(best), (servers, pools)
            fitting += 1
        else:
            refused += 1
            if assignment.enough:
                assert cheapest(servers, assignment.enough) is not None or max(p.count for p in assignment.enough) > 4
    assert min(fitting, refused) > count // 10


# --- on the command line ----------------------------------------------------------------------------------------------

SHORT = "--max-model-len 8192"
SERVERS = (f"chat=qwen3-32b {SHORT} --users 2", f"code=qwen3-8b {SHORT} --users 4", f"embed=qwen3-0.6b {SHORT}")


def test_each_command_has_its_gpu_and_a_port_of_its_own(run: Run) -> None:
    document = run("pack", *SERVERS, "--gpu", "2xl40s,h100-80g", "--format", "json").json
    assert document["fits"]
    commands = {
        (group["pack"]["gpu"], *group["devices"]): [server["command"] for server in group["pack"]["servers"]]
        for group in document["groups"]
    }
    # 61 GiB of weights are more than an L40S has, and beside them 4 GiB are left on an H100, less than 15.
    assert [len(commands["h100-80g", 0]), len(commands["l40s", 0])] == [1, 2]
    assert "Qwen/Qwen3-32B" in commands["h100-80g", 0][0]
    assert commands["h100-80g", 0][0].startswith("vllm serve")  # the only one needs no variable
    assert all(command.startswith("CUDA_VISIBLE_DEVICES=0 vllm serve") for command in commands["l40s", 0])
    ports = re.findall(r"--port (\d+)", " ".join(command for texts in commands.values() for command in texts))
    assert sorted(ports) == ["8000", "8001", "8002"]
    for (kind, _), texts in commands.items():
        for command in texts:
            assert run("estimate", "--from-command", command, "--gpu", kind, "--format", "json").json["fits"]


def test_the_first_line_says_which_server_goes_where(run: Run) -> None:
    words = ("pack", *SERVERS, "--gpu", "2xl40s,h100-80g")
    assert run(*words).out.startswith("Yes: 3 servers fit: code and embed on l40s 0, chat on h100-80g\n")
    # 1.10 and 3.00; both models of the L40S beside each other cost less than one on each of two
    priced = run(*words, "--prices", "l40s=1.1,h100-80g=3").out
    assert priced.startswith("Yes: 3 servers fit: code and embed on l40s 0, chat on h100-80g; $4.10 per hour\n")


def test_prices_decide_which_kind_of_gpu_is_used(run: Run) -> None:
    words = ("pack", f"qwen3-8b {SHORT}", "--gpu", "h200,2xl40s")
    for prices, kind in (("l40s=2,h200=3", "l40s 0"), ("l40s=3,h200=2", "h200")):
        assert run(*words, "--prices", prices).out.startswith(f"Yes: 1 server fits: qwen3-8b on {kind}; $2.00 per hour")


def test_gpus_that_would_be_enough_are_enough(run: Run) -> None:
    words = ("pack", "--exit-code", *SERVERS, f"more=qwen3-32b {SHORT}")
    ran = run(*words, "--gpu", "2xl40s,h100-80g")
    assert ran.code == 1
    assert ran.out.startswith("No: 4 servers do not fit on 2 x l40s and 1 x h100-80g; no room for ")
    remedy = re.search(r"use --gpu (\S+),", ran.out)
    assert remedy is not None
    assert run(*words, "--gpu", remedy[1]).code == 0


def test_a_stated_number_of_ranks_is_kept(run: Run) -> None:
    words = ("--gpu", "4xh100-80g", "--format", "json")
    (group,) = run("pack", f"qwen3-32b {SHORT} --tensor-parallel-size 4", *words).json["groups"]
    assert group["devices"] == [0, 1, 2, 3]
    too_large = f"llama-3.1-70b {SHORT} --tensor-parallel-size 1"  # 131 GiB of weights
    assert "cannot serve 1 user on 4 x h100-80g" in run("pack", too_large, *words).errors[0]
    (group,) = run("pack", f"llama-3.1-70b {SHORT}", *words).json["groups"]
    assert group["devices"] == [0, 1]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("qwen3-8b", "--gpu", "l40s,h200", "--prices", "l40s=1"), "--prices: h200 has no price"),
        (("qwen3-8b", "x.yaml", "--gpu", "2xl40s"), "x.yaml: a policy is packed alone"),
        (("qwen3-8b", "--gpu", "2xl40s,l40s"), "names l40s twice"),
        (("qwen3-8b", "qwen3-8b", "--gpu", "2xl40s"), "is named twice"),
        (("qwen3-8b", "--gpu", "2xl40s", "--rest", "x"), "--rest x: no such server"),
        (("deepseek-v3", "--gpu", "2xl40s,h200"), "cannot serve 1 user on 2 x l40s or 1 x h200 even alone"),
        (("qwen3-8b", "--gpu", "2xno-such"), "no-such"),
        (("qwen3-8b",), "--gpu: missing"),
    ],
)
def test_what_cannot_be_assigned_is_one_line(run: Run, words: tuple[str, ...], problem: str) -> None:
    ran = run("pack", *words, "-q")
    assert ran.code == 2
    (line,) = ran.errors
    assert problem in line


def test_more_ranks_than_needed_are_taken_where_nothing_else_fits(run: Run) -> None:
    # 15.3 GiB of weights and 3 x 1.125 GiB of KV cache each: no two fit on an L40S of 44.3 GiB, all three fit on two.
    servers = [f"{name}=qwen3-8b {SHORT} --users 3" for name in "abc"]
    (group,) = run("pack", *servers, "--gpu", "2xl40s", "--format", "json").json["groups"]
    assert group["devices"] == [0, 1]
    assert len(group["pack"]["servers"]) == 3
    pools = [Pool(gpu("l40s"), 2)]
    assert cheapest([(name, "qwen3-8b", 3) for name in "abc"], pools) is not None
