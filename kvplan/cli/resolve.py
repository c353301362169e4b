"""MODEL as typed -> the model's facts: a catalog name, a path, or a Hub id."""

from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvplan.core.errors import InvalidInputError, KvplanError, UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.core.units import format_gib
from kvplan.models import catalog
from kvplan.models.families.config import Oddity
from kvplan.models.spec import ModelSpec

if TYPE_CHECKING:
    from kvplan.models.tensors import Checkpoint

WEIGHT_SUFFIXES = (".gguf", ".safetensors")
FAR_OFF = 0.02  # headers hold a few buffers that are no parameters; beyond this the config and the files disagree
# What a reader says when it met something odd and went on: worth a warning, where the rest are facts it derived.


TEXT_ONLY_WARNING = "--text-only: the vision or audio tower is left out; a server that loads it holds more"


@dataclass(slots=True)
class Resolved:
    """A model's facts and how they were found.

    weights_bytes, checkpoint  the files' sizes, where the config alone cannot say; None: to be computed
    """

    spec: ModelSpec
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    weights_bytes: int | None = None
    checkpoint: "Checkpoint | None" = None


@dataclass(frozen=True, slots=True)
class Source:
    """What goes with a MODEL argument."""

    revision: str | None = None
    offline: bool = False
    assume_dense: bool = False
    text_only: bool = False
    weights_stated: bool = False


def resolve(ref: str, source: Source) -> Resolved:
    """The facts of MODEL.

    A catalog name wins over a path of the same name (`./name` is the path); a revision asks for the Hub.
    Raises UsageError with near misses for a name that is none of them.
    """
    if ref in ("", "-"):
        raise UsageError(
            f"model {ref!r}",
            "is not a model, and none is read from standard input",
            "name one of `kvplan models`, a config.json or a Hub id",
        )
    if "huggingface.co/" in ref.lower() or "hf.co/" in ref.lower():
        from kvplan.models.hub import ref_of_url

        ref = ref_of_url(ref) or ref
    known = catalog.find(ref)
    if known is not None and source.revision is None:
        found = Resolved(called(catalog.load(known, text_only=source.text_only), ref))
        if "note" in catalog.facts(known):
            found.notes.append(catalog.facts(known)["note"])
        say_text_only(found, source)
        if is_path(ref) and Path(ref).exists():
            found.notes.append(f"{printable(ref)}: taken from the catalog; ./{printable(ref)} is the path of that name")
        return found
    hub_id = catalog.facts(known)["id"] if known else ref
    found = from_path(ref, source) if is_path(ref) else from_hub(hub_id, source)
    for note in found.spec.notes:
        (found.warnings if isinstance(note, Oddity) else found.notes).append(note)
    say_text_only(found, source)
    return found


def quantized(found: Resolved, name: str, method: str, source: Source) -> Resolved:
    """The catalog's checkpoint that is stored as `method`, for a catalog name whose own is not quantized; with a note.

    A method that a server makes while it loads, a Hub id and a path are left as they are.
    """
    from kvplan.servers.weights import ONLINE_METHODS

    own = catalog.find(name)
    if own is None or "/" in name or source.revision is not None or found.spec.quantization is not None:
        return found
    sibling = None if method in ONLINE_METHODS else catalog.quantized(own, method)
    if sibling is None:
        return found
    taken = resolve(sibling, source)
    hub_id = catalog.facts(sibling)["id"]
    taken.notes.append(f"--quantization {method}: {own} is not quantized; {sibling} ({hub_id}) is taken, which is")
    return taken


def say_text_only(found: Resolved, source: Source) -> None:
    """What --text-only left out, or that there was nothing to leave out."""
    if not source.text_only:
        return
    if found.spec.text_only:
        found.warnings.append(TEXT_ONLY_WARNING)
    else:
        found.notes.append(
            f"--text-only: {printable(found.spec.name, 200)} has no vision or audio tower; it is sized whole"
        )


def called(spec: ModelSpec, ref: str) -> ModelSpec:
    """The catalog's facts under the Hub id that was asked for, so that the command printed serves that very model."""
    facts = catalog.facts(spec.served_name)
    for alias in facts.get("aliases", ()):
        if "/" in alias and alias.lower() == ref.lower():
            return replace(spec, name=alias + spec.name.removeprefix(spec.served_name))
    return spec


def is_path(ref: str) -> bool:
    """Whether MODEL is meant as a path: it looks like one, or there is such a file. (A shell expands `~` itself.)"""
    if ref.startswith((".", "/", "~")) or ref.endswith((".json", *WEIGHT_SUFFIXES)):
        return True
    try:
        return Path(ref).exists()
    except (OSError, ValueError):
        return False


def from_path(ref: str, source: Source) -> Resolved:
    """The facts of a local model, under the path as it was typed: what a server is started with."""
    from kvplan.models.hf_config import load_spec

    path = Path(ref)
    if path.suffix in WEIGHT_SUFFIXES:
        raise weights_alone(path)
    try:
        is_dir = path.is_dir()
        exists = path.exists()
    except (OSError, ValueError):
        is_dir = exists = False
    if exists and not is_dir and path.suffix != ".json":
        raise UsageError(
            f"model {printable(repr(str(path)), 400)}",
            "not a directory or a .json file",
            "name a config.json or the directory that holds one",
        )
    found = Resolved(
        load_spec(path, name=printable(ref, 1000), assume_dense=source.assume_dense, text_only=source.text_only)
    )
    if is_dir:
        weigh(found, path, source, str(path))
    return found


def weights_alone(path: Path) -> KvplanError:
    """A file of weights has no config.json: refused, with the size that would do beside one."""
    from kvplan.models.checkpoint import read_checkpoint

    found = read_checkpoint(path)
    size = found.total_bytes if found else 0
    kind = path.suffix.removeprefix(".")
    return InvalidInputError(
        f"{printable(str(path), 400)}",
        f"a {kind} file alone does not state the model's shape in a form kvplan reads",
        f"name the model it was made from and add --weights-bytes {size}",
    )


def from_hub(ref: str, source: Source) -> Resolved:
    from kvplan.models import hub
    from kvplan.models.hf_config import load_spec

    model_id = ref.partition("@")[0]
    if "/" not in ref:
        raise catalog.unknown(printable(model_id, 100))
    try:
        resolved = hub.resolve_model(ref, revision=source.revision, offline=source.offline)
    except KvplanError as error:
        why = catalog.missing(model_id)
        if why is None:
            raise
        raise error.changed(remedy=f"{error.remedy} (the catalog lacks it: {why})") from error
    spec = load_spec(resolved.directory, name=model_id, assume_dense=source.assume_dense, text_only=source.text_only)
    found = Resolved(spec, notes=list(resolved.notes))
    weigh(found, resolved.directory, source, model_id)
    if not is_sized(found) and not source.offline and not source.weights_stated:
        stored = hub.remote_checkpoint(ref, revision=source.revision)
        if stored is not None:
            use_stored(found, stored, model_id)
    return found


def is_sized(found: Resolved) -> bool:
    return not is_unknown(found.spec) or found.weights_bytes is not None or found.checkpoint is not None


def is_unknown(spec: ModelSpec) -> bool:
    return spec.quantization is not None and not spec.quantization.known


def weigh(found: Resolved, directory: Path, source: Source, where: str) -> None:
    """Take the size of the weights' files, where there are any, and hold it against what the config says."""
    if source.weights_stated:
        return
    if found.spec.text_only:
        found.notes.append(f"{printable(where, 200)}: the config is taken, not the files, which hold the tower too")
        return
    from kvplan.models.checkpoint import read_checkpoint

    stored = read_checkpoint(directory)
    if stored is None:
        return
    found.warnings += stored.notes
    if stored.format == "gguf" or stored.tensors or is_unknown(found.spec):
        use_stored(found, stored, where)
    if stored.format != "gguf" and stored.total_bytes and not is_unknown(found.spec):
        compare(found, stored, where)


def use_stored(found: Resolved, stored: "Checkpoint", where: str) -> None:
    """Take the files' sizes: tensor by tensor where their headers say them, else the total spread evenly.

    Raises InvalidInputError for files of less than a bit a parameter, which no format stores.
    """
    from kvplan.sizing.weights import num_params

    parameters = sum(num_params(found.spec).values())
    if 8 * stored.total_bytes < parameters:
        raise InvalidInputError(
            f"{printable(where, 200)}",
            f"its weight files hold {stored.total_bytes:,} bytes, less than one bit for each of {parameters:,} "
            "parameters",
            "fetch them again, or state --weights-bytes",
        )
    if stored.tensors:
        found.checkpoint, how = stored, "tensor by tensor"
    else:
        found.weights_bytes, how = stored.total_bytes, "spread evenly over the ranks"
    reason = ""
    if is_unknown(found.spec) and found.spec.quantization is not None:
        reason = f"{found.spec.quantization.problem}; "
    found.notes.append(
        f"{printable(where, 200)}: {reason}the files' own {format_gib(stored.total_bytes)} of weights are taken, {how}"
    )


def compare(found: Resolved, stored: "Checkpoint", where: str) -> None:
    """A note where the files hold clearly more or less than the config says, once both are in the server's dtype."""
    from kvplan.sizing.weights import Layout, total_weights

    layout = Layout(dtype=found.spec.dtype)
    computed, held = total_weights(found.spec, layout), stored.total_bytes
    if found.checkpoint is not None:
        from kvplan.sizing.stored import stored_weights

        held = sum(stored_weights(found.spec, found.checkpoint, layout).values())
    if abs(held - computed) > FAR_OFF * computed:
        taken = "the files are taken" if found.checkpoint else "the config is taken; or say --weights-bytes"
        found.warnings.append(
            f"{printable(where, 200)}: the files come to {held:,} bytes in {found.spec.dtype}, the config to "
            f"{computed:,}; check that they belong together ({taken})"
        )
