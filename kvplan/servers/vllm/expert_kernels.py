"""Which kernels compute a model's experts (--moe-backend), and how wide they pad weights: a table asked of vLLM's code.

The table lists the compute capabilities that were asked, then names storage schemes and below them what starts: a line
has backends, capabilities, kinds, a condition on an expert's shape, and the multiples (width x hidden width) to which a
rank's weights are padded. Kinds are activations with `+` or `-` and a flag of FLAGS that must or must not hold. What no
line of a scheme has is refused. benchmarks/start_experts.py, whose text says what was asked and what derived, and
start_experts_table.py made it.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from kvplan.core.records import dataclass
from kvplan.models.spec import ModelSpec, Scheme, Weight
from kvplan.servers.plans.plan import Refusal, Request, unsupported
from kvplan.servers.plans.quantized import LISTS, key_of, listed, nearest, stored_weights
from kvplan.servers.plans.weights import draft_layout, online_scheme, weight_layout
from kvplan.servers.vllm.classes import type_of
from kvplan.servers.vllm.rules import expert_backend
from kvplan.servers.words.arguments import EngineArgs
from kvplan.sizing.weights import Layout, equals, local_shape, ranks_of, scheme_for

TABLE: Final = Path(__file__).with_name("moe_backends.txt")  # vLLM 0.33's answers
UNQUANTIZED: Final = "unquantized"
RELU2: Final = ("relu2", "squared_relu")
FLAGS: Final = ("plain", "spread", "lora")  # a softmax router that does not renormalize, expert parallelism, adapters
Sizes = tuple[int, int, int]
MEGA_DEEP_GEMM: Final = "flashinfer_moe_ep_mega_deep_gemm"
OWN_PATH: Final = "deep_gemm_mega_moe"  # a class of DeepSeek-V4's own, which was not asked
ASKED_AS: Final = {"fp8 nvfp4 g16": "modelopt nvfp4 g16"}  # DeepSeek-V4's class (models/deepseek_v4/quant_config.py)
B12X: Final = ("b12x", 120)  # backend and capability that were asked of one MXFP4 scheme only


@dataclass(frozen=True, slots=True)
class Kind:
    """What a kernel is chosen by, beside the scheme."""

    activation: str
    flags: frozenset[str]


@dataclass(frozen=True, slots=True)
class Line:
    """What some backends take: kinds of experts, and numbers that must divide their sizes.

    alternatives  one of them must; each is a width on a rank, a hidden width, a width on all ranks
    unless        they must not; 0: no such condition
    """

    backends: frozenset[str]
    capabilities: frozenset[int]
    activations: frozenset[str]  # empty: any
    flags: frozenset[tuple[str, bool]]
    alternatives: tuple[Sizes, ...]
    unless: Sizes
    units: tuple[int, int]  # of the width and of the hidden width

    def suits(self, kind: Kind) -> bool:
        named = not self.activations or kind.activation in self.activations
        return named and all((flag in kind.flags) is holds for flag, holds in self.flags)

    def runs(self, backend: str, sm: int, kind: Kind) -> bool:
        return backend in self.backends and sm in self.capabilities and self.suits(kind)

    def takes(self, sizes: Sizes) -> bool:
        return any(divide(multiples, sizes) for multiples in self.alternatives) and not divide(self.unless, sizes)


def divide(numbers: Sizes, sizes: Sizes) -> bool:
    return all(number and size % number == 0 for number, size in zip(numbers, sizes, strict=True))


def sizes_of(text: str) -> Sizes:
    numbers = {name: int(number) for name, _, number in (word.partition(":") for word in text.split())}
    return numbers.get("width", 1), numbers.get("hidden", 1), numbers.get("whole", 1)


def line_of(text: str) -> Line:
    backends, where, kinds, condition, units = (field.strip() for field in text.split(" | "))
    words = kinds.split()
    flags = frozenset((word[1:], word.startswith("+")) for word in words if word[0] in "+-")
    activations = frozenset(word for word in words if word[0] not in "+-" and word != "any")
    taken, has_exception, exception = f" {condition}".partition(" not ")
    alternatives = tuple(sizes_of(text) for text in taken.split(" or "))
    unless = sizes_of(exception) if has_exception else (0, 0, 0)
    width, _, hidden = units.partition("x")
    where = " ".join(listed(TABLE, "capabilities")) if where == "all" else where.replace(",", " ")
    return Line(frozenset(backends.split()), frozenset(map(int, where.split())), activations, flags, alternatives,
                unless, (int(width), int(hidden)))  # fmt: skip


@lru_cache(maxsize=1)
def lines() -> dict[str, tuple[Line, ...]]:
    """The table's lines by scheme."""
    answers: dict[str, tuple[Line, ...]] = {}
    keys: list[str] = []
    for text in TABLE.read_text(encoding="utf-8").splitlines():
        if text.startswith(LISTS):
            continue
        if text.startswith(" "):
            answers |= {key: (*answers[key], line_of(text)) for key in keys}
        else:
            keys = text.split("; ")
            answers |= dict.fromkeys(keys, ())
    return answers


# --- a model's experts -----------------------------------------------------------------------------------------------


def kind_of(spec: ModelSpec, args: EngineArgs) -> Kind:
    ranks = args.tensor_parallel_size * args.data_parallel_size * args.prefill_context_parallel_size
    holds = (not renormalizes(spec), args.enable_expert_parallel and ranks > 1, args.max_loras > 0)
    return Kind(activation(spec), frozenset(flag for flag, value in zip(FLAGS, holds, strict=True) if value))


def renormalizes(spec: ModelSpec) -> bool:
    """True if the router renormalizes the weights of the experts that it chose."""
    stated = text_config(spec).get("norm_topk_prob")
    return type_of(spec).renormalizes if stated is None else bool(stated)


def activation(spec: ModelSpec) -> str:
    text = text_config(spec)
    name = text.get("mlp_hidden_act") or text.get("hidden_act") or text.get("hidden_activation")
    return type_of(spec).activation or ("relu2_no_mul" if name in RELU2 else "silu")


def text_config(spec: ModelSpec) -> Mapping[str, Any]:
    inner = spec.config.get("text_config")
    return inner if isinstance(inner, dict) else spec.config


def schemes(spec: ModelSpec, online: str | None) -> Iterator[tuple[str, str]]:
    """(name in the table, kind) of each scheme in which a model's experts are stored; the kind of none is empty."""
    for index in sorted(set(equals(spec, online))):
        for weight in spec.layer_weights[index]:
            if weight.experts:
                yield named(spec, scheme_for(spec, weight, spec.first_layer + index, online), online)


def named(spec: ModelSpec, scheme: Scheme | None, online: str | None) -> tuple[str, str]:
    if scheme is None:
        return UNQUANTIZED, ""
    key = key_of(spec, scheme, online)
    return ASKED_AS.get(key, key), scheme.kind


TILED: Final = (128, 256)  # width, hidden width: tiles of Marlin's and TRT-LLM's MXFP4 experts


def units(request: Request, spec: ModelSpec) -> tuple[tuple[str, int, int], ...]:
    """(kind of a scheme, width, hidden width): the multiples to which a rank's experts are padded, if not 1.

    Experts that are quantized while loading are padded from the start. Before 0.33, what the table says without a
    stated backend is known of unquantized experts alone.
    """
    args, release, sm = request.args, request.release, nearest(request.gpu.sm, TABLE)
    if not sm:
        return ()
    name, online = expert_backend(args.moe_backend), online_scheme(request)
    answers: dict[str, tuple[int, int]] = {}
    for key, scheme in dict.fromkeys(schemes(spec, online)):
        is_read = release.has("tiled_experts") if not scheme else release.is_compared or name != "auto"
        matches = (line.units for line in lines().get(key, ()) if line.runs(name, sm, kind_of(spec, args)))
        if is_read and (sizes := next(matches, None)) is not None:
            answers |= dict.fromkeys((scheme, "") if online else (scheme,), sizes)
        if spec.is_later_v4 and scheme == "mxfp4":  # with inputs in 8 bits: no Triton's on 9.0
            answers[scheme] = TILED
    return tuple((stored, *sizes) for stored, sizes in answers.items())


# --- does it start ---------------------------------------------------------------------------------------------------


def refusal(request: Request) -> Refusal | None:
    """Return a refusal of a backend that vLLM has, but not for these experts, this GPU or this layout.

    On a GPU before those of the table only of one that runs on none of these either.
    """
    name = expert_backend(request.args.moe_backend)
    if name == "auto" or not request.release.is_compared or not request.gpu.sm:
        return None
    own = nearest(request.gpu.sm, TABLE)
    capabilities = [own] if own else sorted(map(int, listed(TABLE, "capabilities")))
    parts = [(request.spec, weight_layout(request, stage)) for stage in range(request.args.pipeline_parallel_size)]
    if request.draft is not None:
        parts.append((request.draft, draft_layout(request)))
    for spec, layout in parts:
        for layer, weight in stored_weights(spec, layout):
            if not weight.experts or weight.split != "outputs":
                continue
            key, _ = named(spec, scheme_for(spec, weight, layer, layout.online), layout.online)
            reasons = [reason(request, spec, key, weight, layout, sm) for sm in capabilities]
            if (why := reasons[0]) is not None and None not in reasons:
                return unsupported(f"--moe-backend {name} {why}", "moe_backend", ("auto",))
    return None


def reason(request: Request, spec: ModelSpec, key: str, weight: Weight, layout: Layout, sm: int) -> str | None:
    """Why the stated backend does not compute these experts on a GPU of the table, or None."""
    name, kind = expert_backend(request.args.moe_backend), kind_of(spec, request.args)
    is_v4 = spec.model_type.startswith("deepseek_v4")
    if name == MEGA_DEEP_GEMM and not is_v4:
        return "is for DeepSeek-V4 alone"
    if key not in lines() or (is_v4 and name == OWN_PATH) or ("mxfp4" in key and (name, sm) == B12X):
        return None
    what = "experts in the dtype of the model" if key == UNQUANTIZED else f"experts stored as {key}"
    mine = [line for line in lines()[key] if name in line.backends]
    if not mine:
        return f"is not for {what}"
    here = [line for line in mine if sm in line.capabilities]
    if not here:
        known = sorted(frozenset.union(*(line.capabilities for line in mine)))
        needed = " or ".join(f"{capability / 10:.1f}" for capability in known)
        return f"needs compute capability {needed}, this GPU has {request.gpu.sm / 10:.1f}"
    if not (suited := [line for line in here if line.suits(kind)]):
        return f"does not run {what} {obstacle(here, kind)}"
    ranks = ranks_of(weight, layout)
    inputs, parts = local_shape(weight, ranks)
    if any(line.takes((parts[0], inputs, parts[0] * ranks)) for line in suited):
        return None
    return f"does not run {what} of {parts[0]:,} x {inputs:,} on a rank"


def obstacle(here: list[Line], kind: Kind) -> str:
    """Which of a kind's properties no line has."""
    words = {"plain": "behind this router", "spread": "with expert parallelism", "lora": "with adapters"}
    for flag in FLAGS:
        other = Kind(kind.activation, kind.flags ^ {flag})
        if any(line.suits(other) for line in here):
            return words[flag] if flag in kind.flags else "without expert parallelism"
    return f"with the activation {kind.activation}"
