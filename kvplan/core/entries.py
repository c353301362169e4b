"""Look up one entry of a large data file without parsing the rest.

models.yaml and gpus.yaml are mappings of entries. Parsing a whole 200 kB file with PyYAML takes hundreds of
milliseconds; splitting it at its top-level keys takes almost none, so a command about one model parses one entry.
Tests check the layout that this relies on: a top-level key starts in column 0, its entry is indented, and
`aliases: [a, b]` and `id: a/b` are on one line each.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

from kvplan.core.errors import UnknownNameError

_KEY = re.compile(r"^([^\s#:][^:\n]*):", re.MULTILINE)
_ALIASES = re.compile(r"^  aliases: \[([^\]]*)\]", re.MULTILINE)
_ROOMS = {"gpus.yaml": "hardware", "workloads.yaml": "workloads"}
_ID = re.compile(r"^  id: (\S+)$", re.MULTILINE)


@cache
def locate(file_name: str) -> Path:
    """Path of a data file: in its package, or next to kvplan (models.yaml in a checkout)."""
    package = Path(__file__).resolve().parents[1]
    path = package / _ROOMS.get(file_name, "") / file_name
    return path if path.exists() else package.parent / file_name


@cache
def sections(path: Path) -> dict[str, str]:
    """Entry name -> its YAML text, in file order."""
    text = path.read_text(encoding="utf-8")
    starts = list(_KEY.finditer(text))
    ends = [m.start() for m in starts[1:]] + [len(text)]
    return {m.group(1).strip("'\""): text[m.start() : end] for m, end in zip(starts, ends, strict=True)}


@cache
def names(path: Path) -> dict[str, str]:
    """Lower-case name, id or alias -> entry name."""
    table: dict[str, str] = {}
    for name, text in sections(path).items():
        table[name.lower()] = name
        hub_id = _ID.search(text)
        if hub_id:
            table[hub_id.group(1).lower()] = name
        match = _ALIASES.search(text)
        for alias in match.group(1).split(",") if match else ():
            if alias.strip():
                table[alias.strip().strip("'\"").lower()] = name
    return table


def resolve(path: Path, name: str) -> str | None:
    """The entry's own name for a name or alias, ignoring case, or None if there is none."""
    return name if name in sections(path) else names(path).get(name.lower())


@cache
def entry(path: Path, name: str) -> dict[str, Any]:
    """The parsed facts of one entry, by its own name."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    parsed = yaml.load(sections(path)[name], Loader=loader)
    facts: dict[str, Any] = next(iter(parsed.values()))
    return facts


def suggestions(path: Path, name: str) -> list[str]:
    """Up to three names or aliases similar to `name`: those that begin with it first, then by similarity."""
    import difflib

    table = {} if len(name) < 2 else names(path)  # everything resembles a single letter
    typed = name.lower()
    close = sorted((known for known in table if typed and known.startswith(typed)), key=len)
    close += difflib.get_close_matches(typed, table, n=6, cutoff=0.6)
    close += [known for known in table if typed in known and known not in close][:3]
    return list(dict.fromkeys(table[match] for match in close))[:3]


def unknown(path: Path, kind: str, name: str) -> UnknownNameError:
    """Error for a name without an entry, with near matches."""
    near = suggestions(path, name)
    hint = f"did you mean {', '.join(near)}?" if near else f"`kvplan {kind}s` lists the known ones"
    return UnknownNameError(f"{kind} {name!r}", "not in the catalog", hint)
