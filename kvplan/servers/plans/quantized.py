"""Which quantized layers a server creates, by GPU and by shape per rank: a table asked of the server's own code.

The table lists the compute capabilities that were asked, the methods that a config may name, the deprecated ones among
them, and those with scales of K and V in the checkpoint (`/stated`: only if it states a KV dtype). It then names a
storage scheme with its capabilities, or a format that is not read ("gptq 3-bit"), and below it what its layers do not
take: a line has kinds of layers, capabilities, a dtype, and `no: REASON` or conditions on a rank's shape (Divisors), of
which one must hold. `if-whole`: these must hold for a rank's shape if they hold for the whole one, by which the server
chooses its kernel. Kinds that no line names take any shape. benchmarks/start_quantization.py, whose text says what is
asked and what derived, and benchmarks/start_table.py made it.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from kvplan.core.errors import UnsupportedModelError
from kvplan.core.records import dataclass
from kvplan.models.quant import is_odd
from kvplan.models.spec import ModelSpec, Quantization, Scheme, Weight
from kvplan.servers.plans.plan import Refusal, Request, smaller, unsupported
from kvplan.servers.plans.weights import weight_layout
from kvplan.sizing import weights


@dataclass(frozen=True, slots=True)
class Divisors:
    """Numbers that must divide a rank's shape.

    parts   each fused part's outputs; of experts, their width
    front   all parts' outputs but the last's
    sum     the outputs of all parts
    inputs  the inputs; of experts, the hidden width
    most    instead of `inputs`: the inputs of all ranks are at most this; 0: not asked
    """

    parts: int = 1
    front: int = 1
    sum: int = 1
    inputs: int = 1
    most: int = 0

    def __str__(self) -> str:
        words = [f"{name}:{getattr(self, name)}" for name in self.__slots__]
        return " ".join(word for word in words if not word.endswith((":1", ":0"))) or "parts:1"

    def suit(self, parts: tuple[int, ...], inputs: int, whole_inputs: int = 0) -> bool:
        """True if a shape meets them; whole_inputs: those of all ranks, if its inputs are sharded."""
        return (
            all(n % self.parts == 0 for n in parts)
            and all(n % self.front == 0 for n in parts[:-1])
            and sum(parts) % self.sum == 0
            and inputs % self.inputs == 0
            and (not self.most or (whole_inputs or inputs) <= self.most)
        )


@dataclass(frozen=True, slots=True)
class Rule:
    """What layers of one scheme take: one of several conditions; none: nothing, for the given reason."""

    layers: frozenset[str]
    capabilities: frozenset[int]
    by_capability: bool
    dtype: str
    reason: str
    conditions: tuple[Divisors, ...]
    if_whole: Divisors | None

    def applies(self, layer: str, sm: int, dtype: str) -> bool:
        kinds = {layer, layer.partition("/")[0]}
        return bool(kinds & self.layers) and sm in self.capabilities and self.dtype in ("any dtype", dtype)


@dataclass(frozen=True, slots=True)
class Entry:
    """One scheme of the table: the capabilities that were asked, and its rules."""

    capabilities: frozenset[int]
    rules: tuple[Rule, ...]


def divisors_of(text: str) -> Divisors:
    pairs = (word.partition(":") for word in text.split())
    return Divisors(**{name: int(number) for name, _, number in pairs})


LISTS = ("capabilities", "methods", "deprecated", "scales")  # the table's first lines


@lru_cache(maxsize=8)
def listed(path: Path, name: str) -> frozenset[str]:
    """Words of one of the table's first lines; none without it."""
    rows = path.read_text(encoding="utf-8").splitlines()
    return frozenset(next((row for row in rows if row.startswith(f"{name} | ")), "").split()[2:])


@lru_cache(maxsize=4)
def entries(path: Path) -> dict[str, Entry]:
    """The table's schemes by name."""
    match: dict[str, Entry] = {}
    every = frozenset(map(int, listed(path, "capabilities")))
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = [field.strip() for field in line.split(" | ")]
        if fields[0] in LISTS:
            continue
        capabilities = every if fields[1] == "all" else frozenset(map(int, fields[1].split(",")))
        if not line.startswith(" "):
            key = fields[0]
            match[key] = Entry(capabilities, ())
            continue
        layers, _, dtype, rule = fields
        conditions, _, whole = rule.partition(" if-whole ")
        refused = rule.startswith("no: ")
        row = Rule(
            frozenset(layers.split()),
            capabilities,
            capabilities != every,
            dtype,
            rule.removeprefix("no: ") if refused else "",
            () if refused else tuple(divisors_of(text) for text in conditions.split(" or ")),
            divisors_of(whole) if whole else None,
        )
        match[key] = replace(match[key], rules=(*match[key].rules, row))
    return match


def nearest(sm: int, path: Path) -> int:
    """The capability of the table that a GPU counts as: the next lower one of its generation (8.7 as 8.6)."""
    known = map(int, listed(path, "capabilities"))
    return max((each for each in known if each <= sm and each // 10 == sm // 10), default=0)


def scheme_key(quantization: Quantization, scheme: Scheme) -> str:
    """Name of a scheme in the table: the config's method and all that a server's choice of a kernel depends on."""
    method = f"{quantization.method}{'-mixed' if quantization.mixed else ''}"
    return " ".join(filter(None, (method, *scheme_words(scheme))))


def scheme_keys(quantization: Quantization) -> list[str]:
    """Names of a checkpoint's schemes in the table; of a format that is not read, that of the part that is not."""
    if quantization.unread:
        return [f"{quantization.method} {quantization.unread}"]
    schemes = {
        quantization.default: None,
        **dict.fromkeys(quantization.names.values()),
        **dict.fromkeys(scheme for _, scheme in quantization.patterns),
    }
    return [scheme_key(quantization, scheme) for scheme in schemes if scheme is not None]


def scheme_words(scheme: Scheme) -> list[str]:
    block = "x".join(map(str, scheme.block)) if scheme.block else ""
    group = f"g{scheme.group_size}" if scheme.group_size else ""
    flags = [word for word, holds in (("static", scheme.static), ("zeros", scheme.zeros)) if holds]
    inputs = f"inputs:{scheme.inputs.replace(' ', '-')}" if scheme.inputs else ""
    return [scheme.kind, block, group, *flags, scheme.variant, inputs]


# --- a plan's layers -------------------------------------------------------------------------------------------------


def refusal(request: Request, path: Path, dtype: str, unchecked: frozenset[str] = frozenset()) -> Refusal | None:
    """Return the first refusal of a quantized layer of the request's model, or None if its server creates them all.

    path       the server's table
    dtype      the model's dtype in effect
    unchecked  names of weights that the model's class creates in any shape
    """
    spec, sm = request.spec, nearest(request.gpu.sm, path)
    if spec.quantization is not None and (refused := method_refusal(request, spec.quantization, path)) is not None:
        return refused
    if not sm or (spec.quantization is None and request.args.quantization is None):
        return None
    known, answers = entries(path), set()
    for stage in range(request.args.pipeline_parallel_size):
        layout = weight_layout(request, stage)
        for layer, weight in stored_weights(spec, layout):
            scheme = created_as(spec, weight, layer, layout.online)
            key = key_of(spec, scheme, layout.online)
            entry = known.get(key)
            if scheme is None or entry is None or sm not in entry.capabilities:
                continue
            if key not in answers and (refused := config_refusal(entry, dtype, sm)) is not None:
                return refused
            answers.add(key)
            text = shape_refusal(weight, layout, entry, dtype, sm) if weight.name not in unchecked else None
            if text is None:
                continue
            if weight.experts and layout.ep == 1 and layout.tp > 1:
                return unsupported(text, "enable_expert_parallel", (True,))
            return unsupported(text, "tensor_parallel_size", smaller(layout.tp))
    return None


def stored_weights(spec: ModelSpec, layout: weights.Layout) -> Iterator[tuple[int | None, Weight]]:
    """The weights on one stage's rank, those of layers that are alike once, with the layer's number."""
    yield from ((None, weight) for weight in spec.other_weights if weights.on_stage(weight.place, layout))
    first = weights.equals(spec, layout.online)
    for index in sorted({first[index] for index in weights.layers_on(spec, layout)}):
        yield from ((spec.first_layer + index, weight) for weight in spec.layer_weights[index])


def created_as(spec: ModelSpec, weight: Weight, layer: int | None, online: str | None) -> Scheme | None:
    """The scheme a layer is created for: a --quantization while loading reaches towers, too, whose size it leaves."""
    if weight.serves and weight.quantizable and online in weights.ONLINE and not is_odd(spec.config):
        return weights.ONLINE[online]
    return weights.scheme_for(spec, weight, layer, online)


def key_of(spec: ModelSpec, scheme: Scheme | None, online: str | None) -> str:
    if online is not None:
        return f"online {online}"
    return scheme_key(spec.quantization, scheme) if spec.quantization is not None and scheme is not None else ""


def method_of(stored: Quantization) -> str:
    """The method that a checkpoint's config names."""
    return stored.stated or stored.method


def method_refusal(request: Request, stored: Quantization, path: Path) -> Refusal | None:
    """Refusal of a method that the server does not have, or of a format of it that kvplan does not read."""
    name = method_of(stored)
    if name not in listed(path, "methods"):
        by_flag = request.args.quantization == name
        return unsupported(f"Unknown quantization method: {name}", *(("quantization", (None,)) if by_flag else ()))
    entry = entries(path).get(scheme_keys(stored)[0]) if stored.unread else None
    rules = () if entry is None else entry.rules
    applied = ("config", "whole")  # every model has layers of the second kind
    sm = nearest(request.gpu.sm, path)
    reasons = (rule.reason for rule in rules if any(rule.applies(layer, sm, "any dtype") for layer in applied))
    return next((unsupported(reason) for reason in reasons if reason), None)


def check_sized(request: Request, refused: Refusal | None) -> None:
    """Reject weights that neither kvplan can size nor their server loads: a size would not make them start."""
    stored = request.spec.quantization
    if refused is None or stored is None or stored.known or request.weights_bytes or request.checkpoint:
        return
    where = f"{request.spec.name} on {request.release.label}"
    raise UnsupportedModelError(where, refused.text, "name another checkpoint")


def stores_scales(stored: Quantization, path: Path) -> bool:
    """True if the server reads scales of K and V from the checkpoint, by a method of its quantization."""
    name = "modelopt_mixed" if stored.mixed else method_of(stored)
    known = listed(path, "scales")
    return name in known or (stored.kv_dtype is not None and f"{name}/stated" in known)


def config_refusal(entry: Entry, dtype: str, sm: int) -> Refusal | None:
    """Refusal of the whole checkpoint, in the server's words."""
    for rule in entry.rules:
        if rule.applies("config", sm, dtype):
            return unsupported(rule.reason)
    return None


@dataclass(frozen=True, slots=True)
class Shard:
    """A weight's shape on one of its ranks: outputs of each fused part (of experts: their width), and inputs."""

    outputs: tuple[int, ...]
    inputs: int
    ranks: int
    by_inputs: bool

    @property
    def whole_outputs(self) -> tuple[int, ...]:
        return self.outputs if self.by_inputs else tuple(n * self.ranks for n in self.outputs)

    @property
    def whole_inputs(self) -> int:
        return self.inputs * self.ranks if self.by_inputs else self.inputs


def shard_of(weight: Weight, layout: weights.Layout) -> Shard:
    ranks = weights.ranks_of(weight, layout)
    if weight.even and weight.even % ranks:
        ranks = 1
    inputs, parts = weights.local_shape(weight, ranks)
    return Shard((parts[0],) if weight.experts else tuple(parts), inputs, ranks, weight.split == "inputs")


def shape_refusal(weight: Weight, layout: weights.Layout, entry: Entry, dtype: str, sm: int) -> str | None:
    """Why a weight's shape on a rank is refused, or None."""
    if not weights.is_built(weight, layout) or (weight.experts and weight.split != "outputs"):
        return None  # the last projection of experts was asked with those before it
    shard = shard_of(weight, layout)
    kind = kind_of(weight, layout, shard.ranks)
    for rule in entry.rules:
        if rule.applies(kind, sm, dtype) and not takes(rule, shard):
            return shape_text(weight, rule, shard, sm)
    return None


def takes(rule: Rule, shard: Shard) -> bool:
    if not any(divisors.suit(shard.outputs, shard.inputs, shard.whole_inputs) for divisors in rule.conditions):
        return False
    if rule.if_whole is None:
        return True
    holds = rule.if_whole.suit(shard.whole_outputs, shard.whole_inputs)
    return not holds or rule.if_whole.suit(shard.outputs, shard.inputs)


def kind_of(weight: Weight, layout: weights.Layout, ranks: int) -> str:
    """The table's word for a kind of layer; sharded ones have an `s`."""
    if weight.experts:
        spread = "/spread" if layout.ep > 1 else ""
        return f"experts/{activation(weight)}{spread}"
    if weight.split == "none":
        return "whole"
    is_fused = len(weight.parts) > 1 and not weights.repeats_groups(weight, ranks)
    kind = "row" if weight.split == "inputs" else "fused" if is_fused else "column"
    return f"{kind}s" if ranks > 1 else kind


def activation(weight: Weight) -> str:
    """The table's word for the activation of experts: those with a bias clamp it, those without a gate square it."""
    if weight.bias:
        return "swigluoai"
    return "relu2_no_mul" if len(weight.parts) == 1 else "silu"


def shape_text(weight: Weight, rule: Rule, shard: Shard, sm: int) -> str:
    where = f" on compute capability {sm / 10:.1f}" if rule.by_capability else ""
    if not rule.conditions:
        return f"{weight.name} cannot be created{where}: {rule.reason}"
    share = f" on each of {shard.ranks} ranks" if shard.ranks > 1 else ""
    size = " + ".join(f"{n:,}" for n in shard.outputs)
    return f"{weight.name} is {size} x {shard.inputs:,}{share}, and its kernels{where} need {needed(rule)}"


def needed(rule: Rule) -> str:
    """A rule's conditions in words; small inputs, which are no remedy, are left out."""
    texts = []
    for divisors in rule.conditions:
        if divisors.most:
            continue
        outputs = max(divisors.parts, divisors.front, divisors.sum)
        words = [f"outputs in multiples of {outputs}"] if outputs > 1 else []
        words += [f"inputs in multiples of {divisors.inputs}"] if divisors.inputs > 1 else []
        texts.append(" and ".join(words))
    return ", or ".join(texts) or "another shape"
