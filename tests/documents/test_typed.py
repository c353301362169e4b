"""Reports and commands look into typed documents only: mypy knows every key, whether it is written out or not."""

from pathlib import Path

import pytest

from tests.support.untyped import untyped_lookups

ROOT = Path(__file__).resolve().parents[2]
PLANTED = """from collections.abc import Mapping
from typing import Any, Literal, TypedDict, cast

Key = Literal["total"]

class Memory(TypedDict):
    total: int

class Doc(TypedDict):
    memory: Memory

def f(doc: Doc, loose: dict[str, Any], mapping: Mapping[str, Any], sizes: dict[str, int], any: Any) -> None:
    print(doc["memory"]["total"], sizes["total"], f"{doc['memory']['total']:,}")
    print(loose["total"])
    print(f"{mapping['memory']['total']:,}")
    print(any.get("total"))
    loose["total"] = 1
    print(any.total, doc, loose, [0][0], sizes[str(doc)])

def by_name(doc: Doc, loose: dict[str, Any], objects: Mapping[str, object], name: str, key: Key) -> None:
    print(loose[name], objects.get(name))
    print(doc["memory"][key])
    print(dict(doc["memory"])[name])
    cast(Mapping[str, int], doc["memory"])
"""


# What fills in a form of values; the other files of the room read manifests, whose every value is looked at.
FORMS = ("call", "files", "form", "log", "question", "speculation", "words")
# What is left: (file, function) -> why no type can know the key.
READ = "of a file of unknown origin: every value is looked at before it is used"
ARGUMENTS = "of the servers' arguments, which the argument table reads and checks by name"
JSON_OPTION = "of a JSON option, whose keys and values are checked by the type made of it"
ANSWERS = "of an answer's own document, whose schema the tests check, by the names that it has there"
FOREIGN = "of another program's document: promtool checks the rules and their tests, a test the dashboard"
LEFT = {
    ("asked/call.py", "config_name"): READ,
    **{("report/answers.py", name): ANSWERS for name in ("holds", "placements", "cures", "rows", "names", "run")},
    ("report/run_record.py", "number"): READ,
    ("report/atlas_site.py", "manifest"): READ,
    ("cli/mcp.py", "answer"): ANSWERS,
    ("cli/mcp.py", "words_of"): "of a tool's arguments, whose names are checked, and which its command reads",
    ("report/operations.py", "tests_of"): FOREIGN,
    ("report/operations.py", "grafana"): FOREIGN,
    ("measure/evidence.py", "_read"): READ,
    ("measure/evidence.py", "of_reconciliation"): READ,
    ("measure/evidence.py", "stated_error"): READ,
    ("policy/compared.py", "kind"): READ,
    ("cli/engine_options.py", "speculative_of"): JSON_OPTION,
    ("asked/form.py", "add_pair"): ARGUMENTS,
    ("asked/form.py", "contexts_of"): ARGUMENTS,
    ("asked/form.py", "engine_args"): ARGUMENTS,
    ("asked/form.py", "given"): ARGUMENTS,
    ("asked/form.py", "is_on"): ARGUMENTS,
    ("asked/form.py", "text"): ARGUMENTS,
    ("asked/form.py", "texts"): ARGUMENTS,
    ("asked/log.py", "completed"): ARGUMENTS,
    ("asked/speculation.py", "config_of"): JSON_OPTION,
    ("cli/serve.py", "config_of"): ARGUMENTS,
    ("report/request_rows.py", "as_parquet"): "of an optional package: pyarrow's types",
}


def test_a_lookup_in_an_untyped_mapping_is_found(tmp_path: Path) -> None:
    """`mapping['memory']` is untyped, and so is what it gives; a document that `dict` or `cast` loosens is, too."""
    file = tmp_path / "planted.py"
    file.write_text(PLANTED, encoding="utf-8")
    work = tmp_path / "work"
    work.mkdir()
    loosened = "print(reveal_type(dict(*reveal_type((reveal_type(doc)['memory'],))))[name])"
    assert [(lookup.function, lookup.statement) for lookup in untyped_lookups([file], tmp_path, work)] == [
        ("f", "print(reveal_type(loose)['total'])"),
        ("f", "print(str((reveal_type(reveal_type(mapping)['memory'])['total'],)))"),
        ("f", "print(str((reveal_type(reveal_type(mapping)['memory'])['total'],)))"),
        ("f", "print(reveal_type(any).get('total'))"),
        ("f", "reveal_type(loose)['total'] = 1"),
        *[("by_name", "print(reveal_type(loose)[name], reveal_type(objects).get(name))")] * 2,
        *[("by_name", loosened)] * 2,
        ("by_name", "cast(Mapping[str, int], reveal_type((reveal_type(doc)['memory'],)))"),
    ]


@pytest.mark.full
def test_reports_and_commands_look_into_no_untyped_mapping(tmp_path: Path) -> None:
    """By mypy, which reads all of kvplan for it: half a minute."""
    files = [file for room in ("report", "cli") for file in sorted((ROOT / "kvplan" / room).glob("*.py"))]
    files += [ROOT / "kvplan/asked" / f"{name}.py" for name in FORMS]
    files += [ROOT / "kvplan" / name for name in ("measure/evidence.py", "policy/compared.py")]
    lookups = {
        (lookup.file.removeprefix("kvplan/"), lookup.function): lookup
        for lookup in untyped_lookups(files, ROOT, tmp_path)
    }
    assert {place: lookup for place, lookup in lookups.items() if place not in LEFT} == {}
    assert LEFT.keys() == lookups.keys(), "a reason is left for what is gone"
