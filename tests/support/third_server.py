"""A third server, for tests of the seam: it takes four fifths of a GPU, and pages by 32 what the weights leave.

At worst it has half of that.

It has words of its own in every place where a server's words are printed, and none of another's.
"""

import sys
from functools import partial
from typing import Literal, cast

from kvplan.models.catalog import model_id
from kvplan.models.spec import ModelSpec
from kvplan.servers.base import Abilities, Explanation, Launch, Outputs, Pasted, Sources, Starts, Terms
from kvplan.servers.logs import rows as log_rows
from kvplan.servers.logs.bench import Generator
from kvplan.servers.logs.failures import Failures, Wording
from kvplan.servers.logs.log import Logs
from kvplan.servers.logs.log import Wording as LogWording
from kvplan.servers.logs.metrics import Metrics
from kvplan.servers.plans.plan import (
    BUDGET_ROWS,
    Budget,
    Estimate,
    HostRow,
    Plan,
    PoolShare,
    Request,
    Sized,
    check_load,
)
from kvplan.servers.plans.pool import Capacity, KVGroup, Paging, Pool, attention_spec
from kvplan.servers.plans.weights import rank_weights
from kvplan.servers.releases import Version
from kvplan.servers.words.arguments import EngineArgs, Settings
from kvplan.servers.words.command import Other, ServeCommand, Started, Variable
from kvplan.sizing.weights import Layout

SHARE, PAGE, SEQS = 0.8, 32, 100
CODE = "acme server.c"
name, rest_last = "acme", False
terms = Terms(
    title="Acme", engines=("acme",), example="acme@1.0",
    budget="Acme takes {budget} ({share} of it)", log="acme_tokens={tokens}",

    share_argument="gpu_memory_utilization", slots_flag=None,
    risk="may be slow", risk_row="may be slow", shorter="A lower --ctx-size is safer.", outside="left to Acme",
    uncompared=("{label} by its manual", "Acme's manual"),
    known_by="its manual",
    own_flags={"gpu_memory_utilization": "--share", "max_num_seqs": "--slots", "max_model_len": "--ctx-size"},
    sources=Sources(CODE, CODE, CODE, CODE, CODE, None),
)  # fmt: skip
abilities = Abilities(keeps_share=True)


starts = Starts(("acme",), "model", False, ("Acme", ("acme",)), {})
flags: tuple[dict[str, str], dict[str, Other]] = ({}, {})
variables: dict[str, Variable] = {}
program, image, port, worker = ("acme",), "acme/acme:v{release}", 8000, 0


def release(numbers: tuple[int, ...] | None, words: list[str]) -> Version:
    return Version((1, 0), name)


def labels() -> tuple[str, ...]:
    return ("acme", "acme@1.0")


def as_read(spec: ModelSpec, args: EngineArgs) -> ModelSpec:
    return spec


def context(spec: ModelSpec) -> int:
    return spec.max_model_len


def seqs_cure(spec: ModelSpec, args: EngineArgs, max_num_seqs: int) -> str:
    return "--slots"


def drafter(request: Request) -> tuple[Request, list[str]]:
    return request, []


def settings(request: Request) -> Settings:
    args, stated_len = request.args, request.args.max_model_len
    length = stated_len if isinstance(stated_len, int) else request.spec.max_model_len
    seqs = args.max_num_seqs or SEQS
    return Settings(request.release, length, False, PAGE, seqs, 0, SHARE, "bfloat16", "bfloat16")


def size(request: Request) -> Sized:
    args, own = request.args, settings(request)
    check_load(request, own.max_model_len)
    how = Paging(
        request.gpu.sm, own.kv_dtype, own.dtype, args.tensor_parallel_size, 1, 1, PAGE, False, False, False,
        frozenset(), frozenset(), 0, None, 0, 0,
    )  # fmt: skip
    groups = rank_weights(request, 0)
    budget = int(request.gpu.total_memory * SHARE)
    room = budget - sum(groups.values())
    none = Estimate(0, 0, 0, "nothing", CODE, "formula")
    stage = Budget(budget, groups, dict.fromkeys((*BUDGET_ROWS, "context", "in_use"), none), (room // 2, room, room))
    pool = pool_of(request.spec, how)
    room_capacity = capacity(pool, own, room)
    ends = (room_capacity.num_blocks // 2, room_capacity.num_blocks)
    users = (ends[0] / room_capacity.blocks_per_request, room_capacity.max_concurrency)
    size = room_capacity.num_blocks * room_capacity.bytes_per_block
    return Sized(own, pool, [stage], room_capacity, ends, users, (PoolShare(size, size),))


def pool_of(spec: ModelSpec, how: Paging) -> Pool:
    """All layers in one group: their pages lie side by side in a block."""
    page = partial(attention_spec, block=PAGE, dtype=how.kv_dtype, tp=how.tp, flat=True, encoder=0, model_type="")
    layers = tuple((index, page(cache)) for index, caches in enumerate(spec.layers) for cache in caches)
    group = KVGroup(layers, tuple(dict.fromkeys(paged for _, paged in layers)))
    return Pool((group,), (sum(paged.page for _, paged in layers),), how)


def capacity(pool: Pool, own: Settings, room: int) -> Capacity:
    cost, context = pool.stage_bytes[0], own.max_model_len
    blocks, charged = room // cost, pool.charged(context, own)
    deficit = max(0, (charged + 1) * cost - room)
    return Capacity(
        blocks, cost, 0, context, charged, blocks / charged, blocks * PAGE, fits=not deficit, deficit=deficit
    )


def start(words: list[str]) -> Started | None:
    return Started(words[1:]) if words[:1] == [name] else None


def parse(words: list[str]) -> ServeCommand:
    slots = words[words.index("--slots") + 1] if "--slots" in words else None
    model = words[words.index("--model") + 1] if "--model" in words else words[0]
    return ServeCommand(model=model, engine=name, args={} if slots is None else {"max_num_seqs": int(slots)})


def scheduling() -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    return {}, {}, {}


def read_pair(text: str) -> None:
    return None


def layout(request: Request, spec: ModelSpec) -> Layout:
    return Layout(dtype=request.spec.dtype)


def gate(plan: Plan, end: Literal["low", "likely"]) -> None:
    return None


def kept_back(plan: Plan) -> int:
    return 0


def asleep(plan: Plan) -> dict[str, Estimate]:
    return {}


def words(plan: Plan) -> list[str]:
    seqs = str(plan.settings.max_num_seqs)
    return ["acme", model_id(plan.request.spec), "--ctx-size", str(plan.capacity.max_model_len), "--slots", seqs]


def remedies(plan: Plan) -> tuple[()]:
    return ()


def host(plan: Plan) -> tuple[HostRow, ...]:
    return ()


FAILED = Wording("no_kv_memory", "acme: nothing left for tokens", "1.0", "acme server.c", phase="pool")
failures = Failures((FAILED,), (), (), ("acme serves",), ("acme begins",), {}, own_marks=True)
metrics = Metrics(
    prefix="acme:",
    figures={"running": ("acme:busy",)},
    facts={"acme:tokens": "kv_tokens"},
    flags={},
    workload="Acme counts nothing",
)
LINES = (
    LogWording(name, "acme weights ", "acme weights <weights> GiB", "1.0", CODE),
    LogWording(name, "acme_tokens=", "acme_tokens=<kv_tokens>, acme_pool=<available_kv>", "1.0", CODE),
)
logs = Logs(LINES, log_rows.plain_figures, log_rows.plain, lists=("acme_args(",), commands=("acme ",))
bench = Generator(
    "acme bench", r"\bacme\s+bench\b", "random", 64, lambda tokens, ratio: (tokens, tokens), marks=("acme",)
)


def outputs() -> Outputs:
    return cast("Outputs", sys.modules[__name__])


def pasted() -> Pasted:
    return cast("Pasted", sys.modules[__name__])


def launch() -> Launch:
    return cast("Launch", sys.modules[__name__])


def explain(plan: Plan) -> Explanation:
    return Explanation(f"pages of {PAGE} tokens", (), (f"{SHARE} of the GPU",), (f"{plan.concurrency.max:.2f}",))
