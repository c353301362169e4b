"""Releases of servers and the changes in each; a server's own are in its folder's `changes.py`."""

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvplan.core.records import dataclass

Number = tuple[int, int]
DEFAULT: Final = "vllm"  # the server if none is named


@dataclass(frozen=True, slots=True)
class ReleaseChange:
    """A difference present in every release of a server from `since` on.

    read  releases whose wheels confirm it; empty: it rests only on logs, notes or issues
    """

    since: tuple[int, ...]
    what: str
    source: str
    read: str = ""

    @property
    def evidence(self) -> str:
        """The source, and the releases whose code confirms it."""
        return f"{self.source}; read in {self.read}" if self.read else f"{self.source}; inferred, no wheel read"


@dataclass(frozen=True, slots=True)
class Releases:
    """Known releases of a server and their changes, as `changes.py` in its folder defines them.

    compared  releases whose own results the rules were compared with, case by case, as they are named
    changes   by name: present in each release from `since` on
    listed    whether an explanation of an older release lists later changes
    builds    (first release, CUDA that its published wheel and image are built for), oldest first
    called    what --engine calls the server, if not as its folder
    """

    oldest: Number
    newest: Number
    compared: tuple[tuple[int, ...], ...]
    changes: Mapping[str, ReleaseChange]
    listed: bool = False
    builds: tuple[tuple[tuple[int, ...], tuple[int, int]], ...] = ()
    called: str = ""


NONE: Final = Releases((0, 0), (0, 0), (), {})


@lru_cache(maxsize=16)
def releases_of(engine: str) -> Releases:
    """Return what is known of a server's releases; empty if its folder has no `changes.py`."""
    path = f"kvplan.servers.{engine}.changes"
    if find_spec(path.rpartition(".")[0]) is None or find_spec(path) is None:
        return NONE
    known: Releases = import_module(path).RELEASES
    return known


@lru_cache(maxsize=4)
def names_in(table: Path) -> Mapping[str, str]:
    """The names of a table of model classes, one a line, and the words beside each."""
    lines = (line.partition(" ") for line in table.read_text(encoding="utf-8").splitlines())
    return {name: words for name, _, words in lines}


# Words of a label beyond the release: word -> (field of Version, its value).
WORDS: Final[dict[str, tuple[str, bool]]] = {
    "v0": ("first_engine", True),
    "v1": ("first_engine", False),
    "flashinfer": ("flashinfer", True),
    "no-flashinfer": ("flashinfer", False),
    "runner-v1": ("runner_v2", False),
    "runner-v2": ("runner_v2", True),
    "no-graph-estimate": ("estimates_graphs", False),
    "unpinned-weights": ("pinned_weights", False),
}
INDEXER_LOGITS_MIB: Final = 512  # vLLM 0.33 envs.py (VLLM_SPARSE_INDEXER_MAX_LOGITS_MB)
SIZES_MIB: Final = range(1, 10**6)  # up to a terabyte
LAST = 10**6  # stands for the third field of a line's last release


@dataclass(frozen=True, slots=True)
class Version:
    """A release of a server, and how it was installed and started, beyond its flags.

    Differences between releases follow from their changes. None: not given, the release's default.

    patch               the third field of the version number, if it matters
    estimates_graphs    False: the CUDA graph estimate is off (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0)
    first_engine        vLLM's V0 runs (VLLM_USE_V1=0, or a log's wording), in releases that have both
    flashinfer          FlashInfer samples: container images of 0.8 to 0.11 include it, `pip install vllm` does not;
                        False from 0.33 on: VLLM_USE_FLASHINFER_SAMPLER=0
    runner_v2           VLLM_USE_V2_MODEL_RUNNER
    pinned_weights      False: offloaded weights are not pinned (VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY=1)
    indexer_logits_mib  VLLM_SPARSE_INDEXER_MAX_LOGITS_MB
    expert_tokens       VLLM_FUSED_MOE_CHUNK_SIZE
    without             changes excluded from the plan, to see the effect of each
    """

    number: Number
    engine: str = DEFAULT
    patch: int | None = None
    estimates_graphs: bool = True
    first_engine: bool | None = None
    flashinfer: bool | None = None
    runner_v2: bool | None = None
    pinned_weights: bool = True
    indexer_logits_mib: int = INDEXER_LOGITS_MIB
    expert_tokens: int | None = None
    without: frozenset[str] = frozenset()

    @property
    def label(self) -> str:
        """`vllm@0.9`, or with options `vllm@0.9+flashinfer`; `--engine` accepts it."""
        suffixes = [f"+{word}" for word, (name, value) in WORDS.items() if getattr(self, name) is value]
        if self.indexer_logits_mib != INDEXER_LOGITS_MIB:
            suffixes.append(f"+indexer-{self.indexer_logits_mib}")
        if self.expert_tokens is not None:
            suffixes.append(f"+experts-{self.expert_tokens}")
        patch = "" if self.patch is None else f".{self.patch}"
        return f"{releases_of(self.engine).called or self.engine}@{self.number[0]}.{self.number[1]}{patch}{''.join(suffixes)}"

    def has(self, change: str) -> bool:
        """True if this release or an earlier one of the same server has the change; False for another server's
        change.
        """
        changes = releases_of(self.engine).changes
        return change in changes and self.fields >= changes[change].since and change not in self.without

    def is_within(self, first: tuple[int, ...], until: Number | None = None) -> bool:
        """True from the release `first` on and before `until`, as a row of a table states them."""
        return first <= self.number and (until is None or self.number < until)

    def since(self, other: "Version") -> dict[str, ReleaseChange]:
        """Changes introduced after another release of the same server up to this one, oldest first."""
        between = {
            name: change
            for name, change in releases_of(self.engine).changes.items()
            if other.fields < change.since <= self.fields
        }
        return dict(sorted(between.items(), key=lambda item: item[1].since))

    @property
    def is_compared(self) -> bool:
        """True if the rules were compared with this release's own code."""
        return (self.number if self.patch is None else self.fields) in releases_of(self.engine).compared

    @property
    def fields(self) -> tuple[int, ...]:
        """The version number with its third field; the line's last one if none was given."""
        return (*self.number, LAST if self.patch is None else self.patch)

    @property
    def utilization(self) -> float:
        """Default of gpu_memory_utilization."""
        return 0.92 if self.has("utilization_092") else 0.90

    @property
    def runs_first_engine(self) -> bool:
        """True if vLLM's V0 engine runs."""
        return bool(self.first_engine) or ("v1" in releases_of(self.engine).changes and not self.has("v1"))

    def lacks(self) -> list[ReleaseChange]:
        """Later changes, oldest first, if they are listed."""
        known = releases_of(self.engine)
        return [change for change in known.changes.values() if known.listed and self.fields < change.since]


# Fields of Version that say how it was started.
AS_INSTALLED: Final[Mapping[str, object]] = {
    field.name: field.default for field in fields(Version) if field.name not in ("number", "engine", "patch", "without")
}


def number_text(number: tuple[int, ...]) -> str:
    return ".".join(map(str, number))


def newest_of(engine: str) -> Version:
    """Return the newest known release of a server."""
    return Version(releases_of(engine).newest, engine)


def patches_of(release: Version) -> list[ReleaseChange]:
    """Changes that came within a release's line, oldest first."""
    changes = releases_of(release.engine).changes.values()
    return sorted(
        (change for change in changes if len(change.since) == 3 and change.since[:2] == release.number),
        key=lambda change: change.since,
    )


def patch_of(engine: str, number: tuple[int, ...]) -> int | None:
    """Third field of a version number if a change came within its line, or None if it makes no difference."""
    lines = {change.since[:2] for change in releases_of(engine).changes.values() if len(change.since) == 3}
    return number[2] if len(number) == 3 and number[:2] in lines else None
