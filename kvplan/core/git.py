"""Files of a git repository at a revision, read with git commands that run no filter or hook."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from kvplan.core.errors import EnvironmentProblem, UsageError
from kvplan.core.files import exists, printable

TIMEOUT_S: Final = 60
MAX_FILE_BYTES: Final = 64 << 20
MAX_FILES: Final = 2000  # copied at once, of MAX_BYTES
MAX_BYTES: Final = 256 << 20
MAX_REVISION: Final = 250  # characters
# Never prompts, writes or fetches: a clone's own configuration names the program that fetches what it lacks. A commit
# is read itself, not what refs/replace puts in its place. Messages are in English, for parsing.
ENVIRONMENT: Final = {
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "",  # for versions before 2.44, which do not know the former
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_LITERAL_PATHSPECS": "1",
    "LC_ALL": "C",
}


class MissingObject(EnvironmentProblem):
    """An object that this clone does not have."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in a tree."""

    path: str
    kind: str  # blob, tree, commit (a submodule)
    is_link: bool
    oid: str


@dataclass(frozen=True, slots=True)
class Revision:
    """A commit of the repository whose work tree is at `top`."""

    text: str  # as the user wrote it
    oid: str
    top: Path


def release(package: str = "kvplan") -> str | None:
    """A package's version, or None if it is not installed: kvplan may run from a checkout."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git(arguments: Sequence[str], folder: Path) -> "subprocess.CompletedProcess[bytes]":
    """Run git without a shell. Raise EnvironmentProblem if git is missing or times out."""
    program = shutil.which("git")
    if program is None:
        raise EnvironmentProblem("git", "is not installed", "install it, or compare files")
    try:
        return subprocess.run(
            [program, "--no-pager", *arguments],
            cwd=folder,
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentProblem("git", f"no answer within {TIMEOUT_S} s", "try the same with git itself") from error
    except OSError as error:
        raise EnvironmentProblem("git", f"cannot be run ({error.strerror})", "try it by hand") from error


def checkout(root: Path) -> str | None:
    """Commit of a checkout with its top at `root`, with `-dirty` if it has changes, or None if it is not a checkout."""
    if not (root / ".git").exists():  # a package installed inside another repository does not belong to it
        return None
    try:
        done = git(["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], root)
    except EnvironmentProblem:
        return None
    return done.stdout.decode("utf-8", "replace").strip() or None


def complaint(done: "subprocess.CompletedProcess[bytes]") -> str:
    """First line of git's error message, after its warnings."""
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["no reason given"]
    first = next((line for line in lines if not line.startswith("warning: ")), lines[0])
    return printable(first.removeprefix("fatal: ").removeprefix("error: "), 200)


def top_of(folder: Path) -> Path:
    """Top of the work tree that contains `folder`."""
    done = git(["rev-parse", "--show-toplevel"], folder)
    if done.returncode:
        text, cure = complaint(done), "run kvplan inside the repository, or compare files"
        if "dubious ownership" in text:
            cure = f"if you trust it, run `git config --global --add safe.directory {text.partition(' at ')[2]}`"
        raise UsageError("git", text, cure)
    return Path(os.fsdecode(done.stdout.rstrip(b"\n")))


def revision(text: str, folder: Path, cure: str = "`git log --oneline` lists them") -> Revision:
    """Resolve a branch, tag or commit by any name that git accepts; `cure` is the next step if it is unknown."""
    label = printable(text, 80)
    if not text or text.startswith("-") or len(text) > MAX_REVISION or not text.isprintable():
        raise UsageError(
            f"revision '{label}'", "is not a valid revision name", "write a branch, a tag or a commit: main, HEAD~1"
        )
    top = top_of(folder)
    done = git(["rev-parse", "--verify", "--quiet", "--end-of-options", f"{text}^{{commit}}"], top)
    if done.returncode:
        raise UsageError(f"revision '{label}'", "no such commit", cure)
    return Revision(text, done.stdout.decode("ascii").strip(), top)


def has_commits(folder: Path) -> bool:
    """True if a repository has any commit: before the first one there is nothing to compare with."""
    done = git(["rev-list", "--all", "--max-count=1"], folder)
    return done.returncode != 0 or bool(done.stdout.strip())


def entries(revision: Revision, paths: Sequence[str]) -> list[Entry]:
    """Tree entries at these paths (from the top, `/` between names); a path that ends in / lists the names in that
    folder. Missing paths are omitted.
    """
    if not paths:
        return []
    done = git(["ls-tree", "-z", "--full-tree", revision.oid, "--", *paths], revision.top)
    if done.returncode:
        raise UsageError(f"revision '{printable(revision.text, 80)}'", f"{complaint(done)}", "try `git ls-tree`")
    return [_entry(record) for record in done.stdout.split(b"\0") if record]


def _entry(record: bytes) -> Entry:
    facts, _, path = record.partition(b"\t")
    mode, kind, oid = facts.decode("ascii").split()
    return Entry(os.fsdecode(path), kind, mode == "120000", oid)


def content(revision: Revision, entry: Entry) -> bytes:
    """A file's bytes, as stored."""
    where = f"{printable(revision.text, 80)}:{printable(entry.path, 200)}"
    if entry.is_link:
        raise UsageError(where, "is a symbolic link", "name the file it points to")
    size = int(_object(["-s", entry.oid], revision, where, entry.path))
    if size > MAX_FILE_BYTES:
        raise UsageError(
            where,
            f"is too large to be read from a revision ({size:,} bytes, at most {MAX_FILE_BYTES:,})",
            "check the revision out",
        )
    return _object(["blob", entry.oid], revision, where, entry.path)


def _object(arguments: Sequence[str], revision: Revision, where: str, path: str) -> bytes:
    done = git(["cat-file", *arguments], revision.top)
    if done.returncode:
        fetch = printable(f"git show {shlex.quote(f'{revision.text}:{path}')}", 400)
        remedy = f"`{fetch}` fetches it in a partial clone, and `git fsck` names damage"
        raise MissingObject(where, f"this clone does not have it ({complaint(done)})", remedy)
    return done.stdout


def lay_out(revision: Revision, paths: Iterable[str], target: Path) -> set[str]:
    """Write these files, and the files directly in these folders, below `target` with their paths in the tree; return
    the paths that exist.
    """
    inner_paths = sorted({path for path in paths if is_inside(path)})
    top_entries = entries(revision, inner_paths)
    inner = entries(revision, [f"{entry.path}/" for entry in top_entries if entry.kind == "tree"])
    chosen = [*top_entries, *(entry for entry in inner if not entry.is_link)]
    where, left = f"revision '{printable(revision.text, 80)}'", MAX_BYTES
    if len(chosen) > MAX_FILES:
        raise UsageError(where, f"{len(chosen):,} files are named, more than {MAX_FILES:,}", "name fewer folders")
    for entry in chosen:
        file = target / entry.path
        if entry.kind == "tree":
            file.mkdir(parents=True, exist_ok=True)
        elif entry.kind == "blob":
            file.parent.mkdir(parents=True, exist_ok=True)
            left -= file.write_bytes(content(revision, entry))
            if left < 0:
                raise UsageError(where, f"the files named have more than {MAX_BYTES:,} bytes", "name fewer folders")
    return {entry.path for entry in top_entries}


def is_inside(path: str) -> bool:
    """True if a path from the top stays below it, and is possible in a tree."""
    return path not in ("", ".", "..") and not path.startswith(("/", "../")) and "\0" not in path


def from_top(revision: Revision, path: str) -> str | None:
    """Convert a path from the working directory to one from the top of the repository, or None if it is outside."""
    here = Path(os.path.realpath(path)) if Path(path).is_absolute() else Path.cwd().resolve() / path
    relative = os.path.relpath(os.path.normpath(here), revision.top.resolve())
    return None if relative == ".." or relative.startswith(f"..{os.sep}") else Path(relative).as_posix()


def place(revision: Revision, path: Path) -> str:
    """A file's path from the top without following links: the revision's own tree resolves them."""
    top = revision.top.resolve()
    for here in (Path(os.path.abspath(path)), path.parent.resolve() / path.name):  # noqa: PTH100 -- no link followed
        if here.is_relative_to(top):
            return here.relative_to(top).as_posix()
    raise UsageError(f"{printable(str(path), 200)}", "lies outside the repository", "name a file inside it")


MAX_LINKS: Final = 40  # as in Linux


def copy(revision: Revision, name: str, target: Path) -> bool:
    """Write a file below `target` under its path from the top, following links; False if the tree lacks it."""
    todo, num_links = name.split("/"), 0
    done: list[str] = []
    entry: Entry | None = None
    while todo:
        part = todo.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            if not done:
                return False
            done.pop()
            continue
        entry = next(iter(entries(revision, ["/".join([*done, part])])), None)
        if entry is None or num_links > MAX_LINKS:
            return False
        if entry.is_link:
            num_links += 1
            link = os.fsdecode(content(revision, replace(entry, is_link=False)))
            if link.startswith("/"):
                return False
            todo = [*link.split("/"), *todo]
        else:
            done.append(part)
    if entry is None or entry.kind != "blob" or entry.is_link:
        return False
    file = target / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content(revision, entry))
    return True


def split(text: str) -> tuple[str, str] | None:
    """Split "REV:path" into (revision, path); None for anything else, such as a file with a colon in its name."""
    rev, colon, path = text.partition(":")
    return None if exists(text) or not (colon and rev and path) else (rev, path)


def names_of(texts: Iterable[str], folder: str) -> Iterator[str]:
    """Yield words that may name files, as paths from the top; `folder` is what they are relative to."""
    for text in texts:
        if len(text) <= 400 and "\n" not in text and "\0" not in text and not text.startswith("/"):
            yield from with_folder(Path(os.path.normpath(Path(folder) / text)).as_posix())


def with_folder(path: str) -> Iterator[str]:
    """Yield a path that is inside the tree, and the folder of a model's config.json, whose files are read with it."""
    if is_inside(path):
        yield path
        folder, _, name = path.rpartition("/")
        if folder and name == "config.json":
            yield folder
