"""Kinds of published results: those whose errors are alike, and are left out of a fit together."""

import math
import re
from collections.abc import Iterable

from benchmarks.timing.facts import Fact, name_of, spec_of
from benchmarks.timing.recipes import with_recipe
from kvplan.hardware.gpu import gpu
from kvplan.simulate import coverage
from kvplan.simulate.host import IN_TURN
from kvplan.simulate.kernels.choice import source_of

HELD = re.compile(r"minimax|glm|qwen3\.5", re.IGNORECASE)  # model families that no constant may see
FAMILIES = (
    "gpt-oss", "deepseek-r1-distill", "deepseek", "kimi", "llama-4", "llama-2", "codellama", "llama", "qwen2.5",
    "qwen3", "mixtral", "gemma", "phi", "nemotron", "ministral", "qwq", "minimax", "glm",
)  # fmt: skip
GENERATIONS = {
    70: "Volta", 75: "Turing", 80: "Ampere", 86: "Ampere", 87: "Ampere", 89: "Ada", 90: "Hopper", 100: "Blackwell",
    103: "Blackwell", 110: "Blackwell", 120: "Blackwell RTX", 121: "Blackwell RTX",
}  # fmt: skip


def is_faulty(fact: Fact) -> bool:
    """Whether a result contradicts itself or its hardware.

    Llama 8B under vLLM 0.12: 118,000 prompt tokens/s are 89 % of an H200's peak, where the best kernel reaches 55%:
    prompts came from the prefix cache. DeepSeek-R1 under TensorRT-LLM on B200: 11.1 ms at 8 users, 8.6 at 16.
    gpt-oss on H100 with 512 users: 5.6 ms, less than the same servers take with 64.
    """
    model = name_of(fact)
    return (
        (fact.version == "0.12.0" and model == "llama-3.1-8b-fp8")
        or (fact.engine == "trtllm" and fact.gpu == "b200" and model == "deepseek-r1")
        or (model == "gpt-oss-120b" and fact.gpu == "h100-80g" and fact.users == 512)
    )


AHEAD = 14  # vLLM 0.14 schedules ahead by default
SLOWER = 2
COMPILED = ("", "0.5.10.post1")  # SGLang's releases in whose results kernels were compiled while they were measured


def is_compiled(fact: Fact) -> bool:
    """Whether kernels were compiled during the measurement: 8,192 tokens took 1 to 5.6 s at 4 users, alone 0.2 s.

    Scored, but not fitted to.
    """
    return fact.engine == "sglang" and fact.src == "inferencex" and fact.version in COMPILED


def warming(facts: Iterable[Fact]) -> frozenset[tuple[str, str]]:
    """Sources and ids of results whose first token took more than twice as long as the same server's under a heavier
    load: kernels were compiled, or the first requests woke the server (1 request/s on 4 RTX 4090: 6.9 s; 8 requests/s:
    0.2 s). A factor of 1.5 or 3 says so of one more and of three fewer.
    """
    servers: dict[tuple[object, ...], dict[tuple[str, str], tuple[float, float]]] = {}
    for fact in facts:
        first, load = fact.stated("ttft"), fact.rate if fact.users is None else fact.users
        if first is not None and load is not None and load != math.inf:
            lengths = round(fact.input_len, -2), round(fact.output_len, -2)
            ranks = fact.tp, fact.ep, fact.dp, fact.users is None
            key = fact.src, fact.engine, fact.version, fact.model, fact.gpu, *ranks, *lengths
            servers.setdefault(key, {})[fact.src, fact.id] = load, first[1]
    return frozenset(
        name
        for own in servers.values()
        for name, (load, first) in own.items()
        if any(other > load and later * SLOWER < first for other, later in own.values())
    )


def has_other_kernel(fact: Fact) -> bool:
    """Whether the release ran another kernel than was measured: a step of Qwen3-235B in blocks of fp8 under vLLM 0.12
    takes 51 ms on 2 H200 with 4 users as with 20. Scored, but not fitted to: that its experts take whole blocks of
    tokens is derived, and no host explains what is left.
    """
    return fact.version.startswith("0.12") and fact.engine == "vllm" and "experts fp8_block" in form(fact)


def has_tables(fact: Fact) -> bool:
    """Whether kernels were measured on the fact's GPU."""
    return source_of(gpu(fact.gpu)).is_own


def is_held(fact: Fact) -> bool:
    """Whether a result is looked at once, at the end."""
    return HELD.search(name_of(fact)) is not None


def family(fact: Fact) -> str:
    name = name_of(fact)
    return next((family for family in FAMILIES if family in name), name)


def form(fact: Fact) -> str:
    """Dense or experts, and what the weights are stored in."""
    spec = spec_of(fact.model)
    kind = "experts" if spec.experts_per_token else "dense"
    stored = spec.quantization
    if stored is None:
        return f"{kind} 16 bits"
    return f"{kind} {stored.default.kind if stored.default else stored.method}"


def generation(fact: Fact) -> str:
    device = gpu(fact.gpu)
    return GENERATIONS.get(device.sm, device.architecture or device.vendor)


def release(fact: Fact) -> str:
    """The server, and its release without a patch number."""
    number = re.match(r"\d+\.\d+(\.\d+)?", fact.version)
    if number is None:
        return f"{fact.engine} ?"
    places = number[0].split(".")
    return f"{fact.engine} {'.'.join(places[: 3 if fact.engine == 'sglang' else 2])}"


def regime(fact: Fact) -> str:
    """The server's regime: vLLM schedules ahead from 0.14 on, and before where its source asked for it."""
    if fact.engine != "vllm" or with_recipe(fact).limits.get("async_scheduling"):
        return fact.engine
    number = re.match(r"0\.(\d+)", fact.version)
    return IN_TURN if number is not None and int(number[1]) < AHEAD else "vllm"


def is_recent(fact: Fact) -> bool:
    """Whether the server is of the last year: vLLM that schedules ahead, SGLang from 0.5.2 on."""
    return not fact.version.startswith("0.5.1.") if fact.engine == "sglang" else regime(fact) == "vllm"


def group(fact: Fact) -> coverage.Kind:
    """The kind of plans whose ranges come from this result."""
    return coverage.kind_of(spec_of(fact.model), gpu(fact.gpu), regime(fact))


def kind_of(fact: Fact) -> str:
    return ", ".join((family(fact), form(fact), generation(fact), release(fact)))
