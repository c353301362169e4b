"""A model's config.json and the small files beside it from the Hugging Face Hub or its cache, through huggingface_hub.

Only these small files are fetched, never weights. Failures are reported in one line with the remedy. A token is read
from where huggingface_hub looks for it (HF_TOKEN, its token file), never from a flag.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from kvplan.core.errors import EnvironmentProblem, KvplanError, UsageError
from kvplan.core.files import MAX_CONFIG_BYTES, load_json, printable
from kvplan.models.checkpoint import INDEX_NAME, MAX_INDEX_BYTES, index_files
from kvplan.models.hub_files import fetch, remote_tensors
from kvplan.models.quant import SIDE_FILE, needs_side_file
from kvplan.models.tensors import Checkpoint

# The Hub's rule for an id (huggingface_hub, validate_repo_id); the organization is required.
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_MODEL_ID = re.compile(rf"{_PART}/{_PART}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]*")
_MAX_ID_LEN = 96
_MAX_FILES = 1000  # of weights; DeepSeek-V3 has 163
_MAX_REVISION_LEN = 200


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """Directory with the model's config.json, and notes for the user on how it was found."""

    directory: Path
    notes: tuple[str, ...]


_URL = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<path>[^?#]*)(?:[?#].*)?", re.IGNORECASE)
_AT_REVISION = ("tree", "blob", "resolve", "raw", "commit")
_OTHER_KINDS = ("datasets", "spaces", "papers", "docs", "collections", "blog", "models")


def ref_of_url(text: str) -> str | None:
    """Parse a Hub page's address to `org/name` or `org/name@revision`, or return None if a text is not such an address.

    main is the default revision and left out. Raise UsageError for a page that is not a model's.
    """
    match = _URL.fullmatch(text.strip())
    if match is None:
        return None
    parts = [part for part in match["path"].split("/") if part]
    if len(parts) < 2 or parts[0].lower() in _OTHER_KINDS:
        raise UsageError(
            f"model '{printable(text)}'", "is not a model's page", "write org/name, or https://huggingface.co/org/name"
        )
    model_id = "/".join(parts[:2])
    if parts[-1].endswith((".gguf", ".safetensors")):
        raise UsageError(
            f"model '{printable(text)}'", "is one file of weights", f"write the repository, {printable(model_id)}"
        )
    at_revision = len(parts) > 3 and parts[2] in _AT_REVISION and parts[3] != "main"
    return f"{model_id}@{parts[3]}" if at_revision else model_id


def is_model_id(ref: str) -> bool:
    """True if `ref` has the form of a Hub id (`org/name`), whether or not the model exists."""
    return len(ref) <= _MAX_ID_LEN and _MODEL_ID.fullmatch(ref) is not None and not re.search(r"--|\.\.|\.git$", ref)


def split_ref(ref: str, revision: str | None = None) -> tuple[str, str]:
    """Split `org/name` or `org/name@revision` into (Hub id, revision); the default revision is "main"."""
    model_id, separator, pinned = ref.partition("@")
    if not is_model_id(model_id):
        raise UsageError(
            f"model '{printable(ref)}'",
            "not a Hub id",
            "write org/name, or the path of a config.json or model directory",
        )
    if separator and revision is not None and revision != pinned:
        raise UsageError(
            f"model '{printable(ref)}'", f"two revisions (the other is '{printable(revision)}')", "give one"
        )
    pin = pinned if separator else revision or "main"
    if len(pin) > _MAX_REVISION_LEN or not _REVISION.fullmatch(pin) or ".." in pin:
        raise UsageError(f"revision '{printable(pin)}'", "not a branch, tag or commit", f"write one of {model_id}")
    return model_id, pin


def resolve_model(ref: str, *, revision: str | None = None, offline: bool = False) -> ResolvedModel:
    """Return the local copy of a Hub model's config.json (and weight index, if any), fetching it if it is not cached.

    With `offline`, or HF_HUB_OFFLINE set, only the cache is used. If the network fails, the cached copy is used with a
    note.
    """
    model_id, revision = split_ref(ref, revision)
    library = _library()
    cached = _cached_directory(library, model_id, revision)
    if offline or library.constants.HF_HUB_OFFLINE:
        if cached is None:
            raise EnvironmentProblem(
                model_id,
                f"not in the Hub cache at {printable(revision)} (offline)",
                "run once without --offline and HF_HUB_OFFLINE, or pass a local config.json",
            )
        return ResolvedModel(cached, (f"{model_id}: offline, the cached copy {cached.name[:12]} is used",))
    try:
        config = fetch(library, model_id, "config.json", revision, MAX_CONFIG_BYTES)
    except Exception as error:  # any HTTP library's, by version; each becomes a line with a remedy
        problem, server_answered = _problem(library, model_id, revision, error)
        if cached is None:
            raise problem from error
        if server_answered:
            raise problem.changed(remedy=f"{problem.remedy} (or use the cached copy with --offline)") from error
        return ResolvedModel(cached, (f"{problem}; the cached copy {cached.name[:12]} is used",))
    return ResolvedModel(config.parent, _fetch_beside(library, model_id, revision, config))


def remote_checkpoint(ref: str, *, revision: str | None = None) -> Checkpoint | None:
    """Read the tensors of a Hub model's safetensors files with range requests for their headers; None if it has
    none.
    """
    model_id, revision = split_ref(ref, revision)
    library = _library()
    try:
        files = _weight_files(library, model_id, revision)
        tensors = tuple(tensor for name in files for tensor in remote_tensors(library, model_id, name, revision))
    except library.errors.EntryNotFoundError:
        return None
    except Exception as error:  # as above
        raise _problem(library, model_id, revision, error)[0] from error
    return Checkpoint("safetensors", tensors, sum(tensor.num_bytes for tensor in tensors), files, ())


def _weight_files(library: ModuleType, model_id: str, revision: str) -> tuple[str, ...]:
    """The files that the weight index names, or the one of a model without an index."""
    try:
        names = index_files(fetch(library, model_id, INDEX_NAME, revision, MAX_INDEX_BYTES))
    except library.errors.EntryNotFoundError:
        return ("model.safetensors",)
    if len(names) > _MAX_FILES:
        raise EnvironmentProblem(model_id, f"{INDEX_NAME} names {len(names):,} files, at most {_MAX_FILES:,}")
    return names


def _library() -> ModuleType:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise EnvironmentProblem(
            "huggingface_hub",
            "not installed, so no model can be fetched from the Hub",
            "run `pip install huggingface_hub`, or pass a local config.json",
        ) from error
    except ValueError as error:  # it reads its settings on import
        raise EnvironmentProblem(
            "huggingface_hub", f"cannot be loaded ({printable(str(error))})", "correct the HF_* variables"
        ) from error
    library: Any = huggingface_hub
    library.utils.logging.set_verbosity_error()  # we print its warnings as a line of our own
    if library.constants.HF_HUB_DISABLE_PROGRESS_BARS is None:  # unless the user has set it
        library.utils.disable_progress_bars()
    return huggingface_hub


def _cached_directory(library: ModuleType, model_id: str, revision: str) -> Path | None:
    path = library.try_to_load_from_cache(model_id, "config.json", revision=revision)
    return Path(path).parent if isinstance(path, str) else None


def _fetch_beside(library: ModuleType, model_id: str, revision: str, config: Path) -> tuple[str, ...]:
    """Fetch the weight index into the cache, and the quantization if config.json states none; return a note for each
    file that exists and cannot be fetched.
    """
    files = {INDEX_NAME: (MAX_INDEX_BYTES, "the weight index is missing")}
    if needs_side_file(load_json(config)):
        files[SIDE_FILE] = (MAX_CONFIG_BYTES, f"{SIDE_FILE} is missing")
    notes = []
    for name, (max_bytes, lack) in files.items():
        try:
            fetch(library, model_id, name, revision, max_bytes)
        except library.errors.EntryNotFoundError:
            continue  # a single weight file, or other formats
        except Exception as error:  # as above; the config alone is enough for a plan
            notes.append(f"{_problem(library, model_id, revision, error)[0]}; {lack}")
    return tuple(notes)


def _problem(library: ModuleType, model_id: str, revision: str, error: BaseException) -> tuple[KvplanError, bool]:
    """(error with remedy, whether it is the server's definitive reply: then a cached copy is not used
    automatically).
    """
    errors = library.errors
    status = getattr(getattr(error, "response", None), "status_code", None)
    match error:
        case KvplanError():
            return error, True
        case errors.GatedRepoError():
            fault = "gated", f"accept the license at https://huggingface.co/{model_id} and set HF_TOKEN"
        case errors.RevisionNotFoundError():
            fault = f"no revision {printable(revision)}", f"check it at https://huggingface.co/{model_id}/tree/main"
        case errors.RepositoryNotFoundError():
            fault = "not found on the Hub, or private", "check the name, or set HF_TOKEN to a token that may read it"
        case errors.LocalEntryNotFoundError():
            cause = error.__cause__
            if cause is not None:
                return _problem(library, model_id, revision, cause)
            return _offline_problem(library, model_id, error), False
        case errors.EntryNotFoundError():
            cure = "pass the model it was made from, or a local config.json"
            fault = f"has no config.json at {printable(revision)}", cure
        case _ if status in (401, 403):
            cure = f"check HF_TOKEN and your access at https://huggingface.co/{model_id}"
            fault = f"access denied ({status})", cure
        case _ if status == 429:
            return EnvironmentProblem(model_id, "the Hub's rate limit is reached (429)", f"{_retry(error)}"), False
        case errors.HfHubHTTPError():
            return EnvironmentProblem(model_id, f"the Hub failed ({status})", "retry in a few minutes"), False
        case _:
            return _offline_problem(library, model_id, error), False
    return EnvironmentProblem(model_id, *fault), True


def _retry(error: Any) -> str:
    wait = error.response.headers.get("Retry-After", "")
    when = f"retry in {wait} s" if re.fullmatch(r"\d{1,6}", wait) else "retry in a few minutes"
    return f"{when}, or set HF_TOKEN for a higher limit"


def _offline_problem(library: ModuleType, model_id: str, error: BaseException) -> EnvironmentProblem:
    """Error for a request without a response: a timeout, no connection, or no place to store the file."""
    kind = type(error).__name__
    endpoint = printable(library.constants.ENDPOINT)
    if "Timeout" in kind:
        seconds = library.constants.HF_HUB_ETAG_TIMEOUT
        return EnvironmentProblem(
            model_id, f"no answer from {endpoint} (timeout after {seconds} s)", "retry, or pass a local config.json"
        )
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
        cache = printable(str(library.constants.HF_HUB_CACHE))
        return EnvironmentProblem(
            model_id, f"the Hub cache {cache} cannot be used ({error.strerror})", "set HF_HOME to a writable folder"
        )
    return EnvironmentProblem(
        model_id, f"no network to {endpoint} ({kind})", "check the connection or proxy, or pass a local config.json"
    )
