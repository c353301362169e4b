"""What the names in a quantization_config say about each module of a model.

An entry is a module's name, a glob, or `re:` and a regular expression. Entries that leave a module in the model's dtype
go before those that give it a scheme, as in vLLM 0.33 (ModelOpt's and compressed-tensors' lists).

A config's patterns come from strangers: `matches` is the one place where a pattern meets a name.
"""

import fnmatch
import re
from collections.abc import Iterable, Iterator
from dataclasses import field
from functools import lru_cache

from kvplan.names import LAYER_PREFIXES, OUTER_PREFIXES, in_layer, spellings, usual
from kvplan.records import dataclass
from kvplan.spec import ModelSpec, Quantization, Scheme, Weight

Answer = tuple[Scheme | None]  # what an entry says; its scheme, or None for "in the model's dtype"

# Modules outside the decoder's layers: towers, projectors, drafts. Their entries decide nothing that is sized by them.
_ELSEWHERE = re.compile(r"vis|audio|image|speech|talker|code2wav|encoder|project|merge|mtp|nextn|eagle|embed|patch")
# Modules that no server quantizes, whether the facts name them or not; transformers lists `indexers_proj` for GLM-5's
# `indexer.weights_proj`.
_NEVER = re.compile(r"(norm|bias|rotary_emb|inv_freq|conv1d|indexers_proj|(^|\.)(gate|router|attn|A_log|D|dt_bias))$")
_DIGIT = re.compile(r"\d|\\[Nxu]|\(\?P=")  # what could tell one layer's number from another's
_WILD = re.compile(r"[*?\[]")
_EXPERT = re.compile(r"(experts\\?\.)\d+(?=\\?\.|\*|\$|$)")  # one expert by its number


def matches(pattern: str, name: str) -> bool:
    """Whether an entry's pattern names a module: `re:` from the beginning of the name, a glob all of it."""
    return _compiled(pattern).match(name) is not None


@lru_cache(maxsize=8192)
def _compiled(pattern: str) -> re.Pattern[str]:
    """Raises re.error for what is not a regular expression."""
    return re.compile(pattern[3:] if pattern.startswith("re:") else fnmatch.translate(pattern))


def is_pattern(entry: str) -> bool:
    return entry.startswith("re:") or _WILD.search(entry) is not None


def own_layer(pattern: str) -> int | None:
    """The one layer that a pattern can match, from `layers.12.` in it; None when it may match others.

    In a regular expression the text must stand outside groups and alternatives, and its last dot stand for a dot: it
    is a plain one, or a letter follows.
    """
    if not pattern.startswith("re:"):
        head = _WILD.split(pattern, maxsplit=1)[0]
        _, mark, tail = head.rpartition("layers.")
        index, dot, _ = tail.partition(".")
        return int(index) if mark and dot and index.isdecimal() and len(index) < 6 else None
    number = re.search(r"layers\\?\.(\d{1,5})(?:\\\.(?![*+?{])|\.(?=[A-Za-z_]))", pattern)
    if number is None or "|" in pattern or "[" in pattern[: number.start()] or "(" in pattern[: number.start()]:
        return None
    return int(number.group(1))


@dataclass(slots=True)
class Table:
    """Entries of one kind, by what they can match.

    modules   layer -> role by its usual name -> entry
    experts   entries that name an expert by number, by what they say of the first, which stands for all
    trees     layer -> entries `role*`: everything whose name begins so
    single    layer -> patterns that match in no other layer
    shaped    patterns that hold no digit: alike for all layers whose numbers have as many digits
    others    patterns left over
    outside   names of modules that stand in no layer
    """

    modules: dict[int, dict[str, tuple[str, Scheme | None]]] = field(default_factory=dict)
    experts: dict[str, list[str]] = field(default_factory=dict)
    trees: dict[int, list[tuple[str, str, Scheme | None]]] = field(default_factory=dict)
    single: dict[int, list[tuple[str, Scheme | None]]] = field(default_factory=dict)
    shaped: list[tuple[str, Scheme | None]] = field(default_factory=list)
    others: list[tuple[str, Scheme | None]] = field(default_factory=list)
    outside: dict[str, Scheme | None] = field(default_factory=dict)
    memo: dict[tuple[str, int], Answer | None] = field(default_factory=dict)

    def add_name(self, name: str, scheme: Scheme | None) -> None:
        place = in_layer(name)
        if place is None:
            self.outside[name] = scheme
            return
        layer, role = place
        known = usual(role)
        modules = self.modules.get(layer)
        if modules is None:
            modules = self.modules[layer] = {}
        if known not in modules:
            modules[known] = (name, scheme)
            if "experts.0" in known:
                self.experts[f"{layer}.{known}"] = [name]
        elif "experts.0" in known:
            self.experts[f"{layer}.{known}"].append(name)

    def add_pattern(self, pattern: str, scheme: Scheme | None) -> None:
        layer = own_layer(pattern)
        first, numbers = _EXPERT.subn(r"\g<1>0", pattern)
        if numbers:
            same = self.experts.setdefault(first, [])
            same.append(pattern)
            if len(same) > 1:
                return
        pattern = first
        tree = in_layer(pattern[:-1]) if layer is not None and not is_pattern(pattern[:-1]) else None
        if tree is not None:
            self.trees.setdefault(tree[0], []).append((tree[1], pattern, scheme))
        elif layer is not None:
            self.single.setdefault(layer, []).append((pattern, scheme))
        else:
            (self.others if _DIGIT.search(pattern) else self.shaped).append((pattern, scheme))

    def find(self, layer: int, role: str) -> Answer | None:
        """What the entries say of a module of a layer; None: nothing."""
        known = usual(role)
        if layer in self.modules:
            named = self.modules[layer]
            for name in parents(known):
                if name in named:
                    return (named[name][1],)
        for head, _, scheme in self.trees.get(layer, ()):
            if starts(known, head):
                return (scheme,)
        answer = first_match(self.single.get(layer, ()), layer, role)
        if answer is None:
            key = (role, len(str(layer)))
            if key not in self.memo:
                self.memo[key] = first_match(self.shaped, layer, role)
            answer = self.memo[key] or first_match(self.others, layer, role)
        return answer

    def find_outside(self, name: str) -> Answer | None:
        """What the entries say of a module that stands in no layer, whatever stands before its name."""
        leaf = name.rpartition(".")[2]
        for listed, scheme in self.outside.items():
            if listed.rpartition(".")[2] == leaf:
                return (scheme,)
        for pattern, scheme in (*self.shaped, *self.others):
            if any(matches(pattern, prefix + leaf) for prefix in OUTER_PREFIXES):
                return (scheme,)
        return None


def starts(role: str, head: str) -> bool:
    """Whether a module's name begins with the text of a tree, under any of its spellings."""
    return any(name.startswith(head) for name in spellings(role))


def parents(role: str) -> Iterator[str]:
    """`a.b.c` -> itself, `a.b`, `a`, and the layer as a whole."""
    while role:
        yield role
        role = role.rpartition(".")[0]
    yield ""


def full_names(pattern: str, layer: int, role: str) -> Iterator[str]:
    """The names under which a pattern may know a module of a layer.

    A glob that does not speak of experts does not single out a part of them: a server holds them as one module.
    """
    if not pattern.startswith("re:") and "expert" not in pattern:
        role = role.partition(".experts.0.")[0] + ".experts" if ".experts.0." in role else role
    for prefix in LAYER_PREFIXES:
        for name in spellings(role):
            yield f"{prefix}{layer}.{name}"


def first_match(patterns: Iterable[tuple[str, Scheme | None]], layer: int, role: str) -> Answer | None:
    for pattern, scheme in patterns:
        if any(matches(pattern, name) for name in full_names(pattern, layer, role)):
            return (scheme,)
    return None


@dataclass(frozen=True, slots=True)
class Lists:
    """A quantization's entries: what stays in the model's dtype, and what has which scheme."""

    kept: Table
    chosen: Table
    memo: dict[tuple[int | None, tuple[str, ...], str], Scheme | None] = field(default_factory=dict)

    def find(self, layer: int | None, role: str) -> Answer | None:
        if layer is None:
            return self.kept.find_outside(role) or self.chosen.find_outside(role)
        return self.kept.find(layer, role) or self.chosen.find(layer, role)


@lru_cache(maxsize=64)
def lists(quantization: Quantization) -> Lists:
    tables = Lists(Table(), Table())
    for name, scheme in quantization.names.items():
        (tables.kept if scheme is None else tables.chosen).add_name(name, scheme)
    for pattern, scheme in quantization.patterns:
        (tables.kept if scheme is None else tables.chosen).add_pattern(pattern, scheme)
    return tables


# --- entries that match nothing ------------------------------------------------------------------------------------


def roles_of(weights: tuple[Weight, ...]) -> frozenset[str]:
    """Every module that a layer's weights stand in, by its usual name."""
    return frozenset(
        name for weight in weights for role in (weight.name, *weight.sources) for name in parents(usual(role))
    )


def unmatched(spec: ModelSpec, quantization: Quantization) -> Iterator[str]:
    """Entries that name a decoder layer of the model and no module in it, or a module that the model lacks."""
    tables = lists(quantization)
    known: dict[int, frozenset[str]] = {}
    for index, weights in enumerate(spec.layer_weights):
        if id(weights) not in known:
            known[id(weights)] = roles_of(weights)
        roles = known[id(weights)]
        for table in (tables.kept, tables.chosen):
            yield from unmatched_in(table, index, roles)
    for table in (tables.kept, tables.chosen):
        for name, scheme in table.outside.items():
            is_layer = re.search(r"(layers|h)\.\d+\.", name) is not None
            if (is_layer or scheme is not None) and not _ELSEWHERE.search(name) and not is_outer(spec, name):
                yield name
    for pattern, scheme in (*tables.chosen.shaped, *tables.chosen.others):
        if scheme is not None and not _ELSEWHERE.search(pattern) and not is_used(spec, pattern):
            yield pattern


def some_experts(spec: ModelSpec, quantization: Quantization) -> Iterator[str]:
    """Entries that name some of a layer's experts, which are stored as one."""
    tables = lists(quantization)
    num_experts = min((weight.experts for weight in spec.weights if weight.experts), default=0)
    for table in (tables.kept, tables.chosen):
        for entries in table.experts.values():
            if len(entries) < num_experts:
                yield f"{entries[0]} (and {len(entries) - 1} of the {num_experts - 1} other experts)"


def unmatched_in(table: Table, layer: int, roles: frozenset[str]) -> Iterator[str]:
    named = table.modules.get(layer, {})
    for role in named.keys() - roles:
        name, scheme = named[role]
        if scheme is not None or not _NEVER.search(name):
            yield name
    for head, text, scheme in table.trees.get(layer, ()):
        if not any(starts(role, head) for role in roles) and (scheme is not None or not _NEVER.search(head)):
            yield text
    for text, _ in table.single.get(layer, ()):
        if not any(matches(text, name) for role in roles for name in full_names(text, layer, role)):
            yield text


def is_outer(spec: ModelSpec, name: str) -> bool:
    """Whether a name is that of a weight outside the layers; a tied head has none of its own."""
    leaf = name.rpartition(".")[2]
    return leaf in ("lm_head", "head") or any(weight.name.rpartition(".")[2] == leaf for weight in spec.other_weights)


def is_used(spec: ModelSpec, pattern: str) -> bool:
    seen: set[int] = set()
    for index, weights in enumerate(spec.layer_weights):
        if id(weights) in seen and not _DIGIT.search(pattern):
            continue
        seen.add(id(weights))
        for weight in weights:
            for role in (weight.name, *weight.sources):
                if any(matches(pattern, name) for name in full_names(pattern, index, role)):
                    return True
    leaves = {"lm_head", *(weight.name.rpartition(".")[2] for weight in spec.other_weights)}
    return any(matches(pattern, prefix + leaf) for leaf in leaves for prefix in OUTER_PREFIXES)
