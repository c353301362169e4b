"""Effect of the names in a quantization_config on each module of a model.

An entry is a module's name, a glob, or `re:` and a regular expression. Entries that leave a module in the model's dtype
take precedence over those that give it a scheme, as in vLLM 0.33 (ModelOpt's and compressed-tensors' lists); of GPTQ's
`dynamic`, whose entries are all expressions, the first match decides.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import field
from functools import lru_cache

from kvplan.core.records import dataclass
from kvplan.models.names import LAYER_PREFIXES, OUTER_PREFIXES, WILD, in_layer, is_pattern, spellings, usual
from kvplan.models.patterns import Patterns
from kvplan.models.spec import ModelSpec, Quantization, Scheme, Weight

EntryScheme = tuple[Scheme | None]  # an entry's scheme, or None for "in the model's dtype"

# Modules outside the decoder's layers: towers, projectors, drafts. Their entries do not affect what is sized by them.
_ELSEWHERE = re.compile(r"vis|audio|image|speech|talker|code2wav|encoder|project|merge|mtp|nextn|eagle|embed|patch")
# Modules that no server quantizes, whether or not the facts name them; transformers lists `indexers_proj` for GLM-5's
# `indexer.weights_proj`.
_NEVER = re.compile(r"(norm|bias|rotary_emb|inv_freq|conv1d|indexers_proj|(^|\.)(gate|router|attn|A_log|D|dt_bias))$")
_DIGIT = re.compile(r"\d|\\x")  # may distinguish one layer's number from another's
_EXPERT = re.compile(r"(experts\\?\.)\d+(?=\\?\.|\*|\$|$)")  # a single expert's number


def own_layer(pattern: str) -> int | None:
    """The only layer that a pattern can match, from `layers.12.` in it, or None if it may match others.

    In a regular expression the text must be outside groups and alternatives, and its last dot must match a dot: it is
    escaped, or a letter follows.
    """
    if not pattern.startswith("re:"):
        head = WILD.split(pattern, maxsplit=1)[0]
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

    modules   layer -> role under its usual name -> entry
    experts   entries that name an expert by number, keyed by the first expert, which represents all
    trees     layer -> `role` of an entry `role*` -> its index, text and scheme: everything whose name starts with it
    patterns  all other patterns
    outside   names of modules outside the layers
    """

    modules: dict[int, dict[str, tuple[str, Scheme | None]]] = field(default_factory=dict)
    experts: dict[str, list[str]] = field(default_factory=dict)
    trees: dict[int, dict[str, tuple[int, str, Scheme | None]]] = field(default_factory=dict)
    patterns: list[tuple[str, Scheme | None]] = field(default_factory=list)
    outside: dict[str, Scheme | None] = field(default_factory=dict)
    matcher: Patterns = field(default_factory=lambda: Patterns(()))
    matched: dict[tuple[str, int], frozenset[int]] = field(default_factory=dict)
    has_digits: bool = False

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
        first, numbers = _EXPERT.subn(r"\g<1>0", pattern)
        if numbers:
            same = self.experts.setdefault(first, [])
            same.append(pattern)
            if len(same) > 1:
                return
        is_tree = own_layer(first) is not None and not is_pattern(first[:-1])
        if is_tree and (place := in_layer(first[:-1])):
            heads = self.trees.setdefault(place[0], {})
            heads.setdefault(place[1], (len(heads), first, scheme))
        else:
            self.patterns.append((first, scheme))
            self.has_digits = self.has_digits or _DIGIT.search(first) is not None

    def compile(self) -> None:
        """Compile the patterns. Raise UnsupportedModelError naming one that cannot be matched."""
        self.matcher = Patterns([pattern for pattern, _ in self.patterns])

    def find(self, layer: int, role: str) -> EntryScheme | None:
        """The entries' answer for a module of a layer, or None if there is none."""
        known = usual(role)
        if layer in self.modules:
            named = self.modules[layer]
            for name in parents(known):
                if name in named:
                    return (named[name][1],)
        heads = self.trees.get(layer, {})
        if heads and (trees := [heads[head] for head in beginnings(known) if head in heads]):
            return (min(trees, key=lambda tree: tree[0])[2],)
        places = self.matching(layer, role) if self.patterns else ()
        return (self.patterns[min(places)][1],) if places else None

    def find_outside(self, name: str) -> EntryScheme | None:
        """The entries' answer for a module outside the layers, whatever prefix its name has."""
        leaf = name.rpartition(".")[2]
        for listed, scheme in self.outside.items():
            if listed.rpartition(".")[2] == leaf:
                return (scheme,)
        places = self.matching_outside(leaf)
        return (self.patterns[min(places)][1],) if places else None

    def find_in_tower(self, name: str, *, whole_names: bool) -> EntryScheme | None:
        """The entries' answer for a module of a tower, with or without `model.` before its name.

        whole_names  names stand for modules themselves, not for those inside them
        """
        for full in (name, f"model.{name}"):
            for whole in (full,) if whole_names else parents(full):
                if whole in self.outside:
                    return (self.outside[whole],)
        places = self._matching((name, f"model.{name}"))
        return (self.patterns[min(places)][1],) if places else None

    def matching(self, layer: int, role: str) -> frozenset[int]:
        """Indexes of the patterns that match a module of a layer.

        A glob that does not mention experts does not select some of them: a server stores them as one module.
        """
        # Patterns without digits cannot distinguish layers whose numbers have equally many digits.
        key = (role, layer if self.has_digits else -len(str(layer)))
        if key not in self.matched:
            places = self._matching(full_names(layer, role))
            whole, dot, _ = role.partition(".experts.0.")
            if dot:
                in_parts = {place for place in places if sees_experts(self.patterns[place][0])}
                of_whole = self._matching(full_names(layer, f"{whole}.experts"))
                places = frozenset(
                    in_parts | {place for place in of_whole if not sees_experts(self.patterns[place][0])}
                )
            self.matched[key] = places
        return self.matched[key]

    def matching_outside(self, leaf: str) -> frozenset[int]:
        return self._matching(prefix + leaf for prefix in OUTER_PREFIXES)

    def _matching(self, names: Iterable[str]) -> frozenset[int]:
        return frozenset[int]().union(*map(self.matcher.matching, names)) if self.patterns else frozenset()


def sees_experts(pattern: str) -> bool:
    return pattern.startswith("re:") or "expert" in pattern


@lru_cache(maxsize=65536)
def beginnings(role: str) -> frozenset[str]:
    """Every prefix of a module's name, in any of its spellings."""
    return frozenset(name[:end] for name in spellings(role) for end in range(len(name) + 1))


def parents(role: str) -> Iterator[str]:
    """`a.b.c` -> itself, `a.b`, `a`, and the whole layer."""
    while role:
        yield role
        role = role.rpartition(".")[0]
    yield ""


def full_names(layer: int, role: str) -> Iterator[str]:
    """Names by which a pattern may refer to a module of a layer."""
    for prefix in LAYER_PREFIXES:
        for name in spellings(role):
            yield f"{prefix}{layer}.{name}"


@dataclass(frozen=True, slots=True)
class Lists:
    """A quantization's entries: modules that stay in the model's dtype, and modules with a scheme."""

    unquantized: Table
    chosen: Table
    memo: dict[tuple[int | None, tuple[str, ...], str], Scheme | None] = field(default_factory=dict)

    def find(self, layer: int | None, role: str) -> EntryScheme | None:
        if layer is None:
            return self.unquantized.find_outside(role) or self.chosen.find_outside(role)
        return self.unquantized.find(layer, role) or self.chosen.find(layer, role)


@lru_cache(maxsize=64)
def lists(quantization: Quantization) -> Lists:
    """Compile a quantization's entries. Raise UnsupportedModelError naming a pattern that cannot be matched."""
    tables = Lists(Table(), Table())
    for name, scheme in quantization.names.items():
        (tables.unquantized if scheme is None else tables.chosen).add_name(name, scheme)
    for pattern, scheme in quantization.patterns:
        in_order = quantization.method == "gptq" and pattern.startswith("re:")
        (tables.unquantized if scheme is None and not in_order else tables.chosen).add_pattern(pattern, scheme)
    tables.unquantized.compile()
    tables.chosen.compile()
    return tables


# --- entries that match nothing ------------------------------------------------------------------------------------


def roles_of(weights: tuple[Weight, ...]) -> frozenset[str]:
    """Modules of a layer's weights, by their usual names."""
    return frozenset(
        name for weight in weights for role in (weight.name, *weight.sources) for name in parents(usual(role))
    )


def unmatched(spec: ModelSpec, quantization: Quantization) -> Iterator[str]:
    """Entries that name a decoder layer of the model but no module in it, or a module that the model lacks."""
    tables = lists(quantization)
    known: dict[int, frozenset[str]] = {}
    for index, weights in enumerate(spec.layer_weights):
        if id(weights) not in known:
            known[id(weights)] = roles_of(weights)
        roles = known[id(weights)]
        for table in (tables.unquantized, tables.chosen):
            yield from unmatched_in(table, index, roles)
    for table in (tables.unquantized, tables.chosen):
        for name, scheme in table.outside.items():
            is_layer = re.search(r"(layers|h)\.\d+\.", name) is not None
            if (is_layer or scheme is not None) and not _ELSEWHERE.search(name) and not is_outer(spec, name):
                yield name
    yield from unused(spec, tables.chosen)


def some_experts(spec: ModelSpec, quantization: Quantization) -> Iterator[str]:
    """Entries that name only some of a layer's experts, which are stored as one."""
    tables = lists(quantization)
    num_experts = min((weight.experts for weight in spec.weights if weight.experts), default=0)
    for table in (tables.unquantized, tables.chosen):
        for entries in table.experts.values():
            if len(entries) < num_experts:
                yield f"{entries[0]} (and {len(entries) - 1} of the {num_experts - 1} other experts)"


def unmatched_in(table: Table, layer: int, roles: frozenset[str]) -> Iterator[str]:
    named = table.modules.get(layer, {})
    for role in named.keys() - roles:
        name, scheme = named[role]
        if scheme is not None or not _NEVER.search(name):
            yield name
    heads = table.trees.get(layer, {})
    known = frozenset[str]().union(*map(beginnings, roles)) if heads else frozenset()
    for head, (_, text, scheme) in heads.items():
        if head not in known and (scheme is not None or not _NEVER.search(head)):
            yield text
    if own := [place for place, (pattern, _) in enumerate(table.patterns) if own_layer(pattern) == layer]:
        matched = frozenset[int]().union(*(table.matching(layer, role) for role in roles))
        yield from (table.patterns[place][0] for place in own if place not in matched)


def is_outer(spec: ModelSpec, name: str) -> bool:
    """True if a name is that of a weight outside the layers; a tied head has none of its own."""
    leaf = name.rpartition(".")[2]
    return leaf in ("lm_head", "head") or any(weight.name.rpartition(".")[2] == leaf for weight in spec.other_weights)


def unused(spec: ModelSpec, table: Table) -> Iterator[str]:
    """Patterns without a layer number that match no weight."""
    left = {
        place: pattern
        for place, (pattern, scheme) in enumerate(table.patterns)
        if scheme is not None and own_layer(pattern) is None and not _ELSEWHERE.search(pattern)
    }
    for leaf in ("lm_head", *(weight.name.rpartition(".")[2] for weight in spec.other_weights)):
        for place in table.matching_outside(leaf):
            left.pop(place, None)
    for index, weights in enumerate(spec.layer_weights):
        if not left:
            return
        for role in (role for weight in weights for role in (weight.name, *weight.sources)):
            for place in table.matching(index, role):
                left.pop(place, None)
    yield from left.values()
