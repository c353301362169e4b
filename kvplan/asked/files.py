"""A model from a path or the Hub: its config, and the sizes of its weights' files."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvplan.asked.question import WEIGHT_SUFFIXES, Resolved, Source, is_path, say_text_only
from kvplan.core.errors import EnvironmentProblem, InvalidInputError, KvplanError, UsageError, sentence
from kvplan.core.files import exists, printable
from kvplan.core.units import format_gib
from kvplan.models import catalog
from kvplan.models.families.config import Oddity
from kvplan.models.quant import EXPERTS, SIDE_FILE, STATED
from kvplan.models.spec import ModelSpec, Quantization, Scheme

if TYPE_CHECKING:
    from kvplan.models.tensors import Checkpoint

CONFIG: Final = "the model's config"  # what errors call it
FAR_OFF: Final = 0.02  # headers list a few buffers that are not parameters; beyond this, config and files disagree


def from_files(ref: str, known: str | None, source: Source) -> Resolved:
    """Facts of a path or a Hub id, or of the catalog's model `known` at a revision of its repository."""
    hub_id = catalog.facts(known)["id"] if known else ref
    model = from_path(ref, source) if is_path(ref) else from_hub(hub_id, source)
    say_notes(model, source)
    if model.spec.quantization is None and model.checkpoint is None and not source.weights_stated:
        say_named(model, Path(ref).resolve() if is_path(ref) else Path(model.spec.name))
    return model


def from_config(name: str, source: Source) -> Resolved:
    """Facts of a config that is there itself, without files."""
    from kvplan.models.hf_config import read_config

    values = json.loads(source.config or "")
    spec = read_config(values, CONFIG, name, **source.reading)
    model = Resolved(spec)
    say_notes(model, source)
    return model


def say_notes(model: Resolved, source: Source) -> None:
    for note in model.spec.notes:
        (model.warnings if isinstance(note, Oddity) else model.notes).append(note)
    say_text_only(model, source)


# A quantization in a model's name -> the scheme of its linear layers, in the group size that is usual.
NAMED: Final = {
    "NVFP4": Scheme("nvfp4", 16),
    "MXFP4": Scheme("mxfp4", 32),
    "FP8": Scheme("fp8_channel"),
    "AWQ": Scheme("awq", 128, zeros=True),
    "GPTQ": Scheme("gptq", 128),
}
BY_MODELOPT: Final = ("NVFP4", "FP8")  # stated in its own file by releases up to 0.29
_NAMED: Final = re.compile(rf"(?<![A-Za-z0-9])({'|'.join(NAMED)})(?![A-Za-z0-9])", re.IGNORECASE)


def say_named(model: Resolved, where: Path) -> None:
    """Warn of a name that states a quantization where none was found, with the weights in both readings."""
    from kvplan.sizing.weights import Layout, total_weights

    folder = where.parent.name if where.suffix == ".json" else where.name
    match = _NAMED.search(folder)
    if match is None:
        return
    scheme = NAMED[match[1].upper()]
    experts = any(weight.experts for weight in model.spec.weights)
    as_named = replace(model.spec, quantization=Quantization("", scheme))
    if scheme.kind == "mxfp4" and experts:
        as_named = replace(model.spec, quantization=Quantization("mxfp4", None, patterns=((EXPERTS, scheme),)))
    layout = Layout(dtype=model.spec.dtype)
    file = f"config.json with its {STATED}"
    if match[1].upper() in BY_MODELOPT:
        file += f", or ModelOpt's {SIDE_FILE}"
    read, named = (format_gib(total_weights(spec, layout)) for spec in (model.spec, as_named))
    model.warnings.append(
        f"{printable(folder, 200)}: the name says {match[1]}, but no quantization was found in config.json or next to "
        f"it: weights are {read} as read, about {named} as {match[1]}; take the published {file}, or state "
        "--weights-bytes"
    )


def from_path(ref: str, source: Source) -> Resolved:
    """Facts of a local model, named by the path as typed: this starts the server."""
    from kvplan.models.hf_config import folder_of, load_spec

    path = Path(ref)
    if path.suffix == ".gguf":
        return from_gguf(path, ref)
    if path.suffix in WEIGHT_SUFFIXES:
        raise weights_alone(path)
    is_there = exists(path)
    if is_there and path.is_dir():
        from kvplan.models.folders import config_folder

        path = config_folder(path)
    if is_there and not path.is_dir() and path.suffix != ".json":
        raise UsageError(
            f"model {printable(repr(str(path)), 400)}",
            "not a directory or a .json file",
            "name a config.json or the directory that holds one",
        )
    try:
        spec = load_spec(path, name=printable(ref, 1000), **source.reading)
    except KvplanError as error:
        if is_there:
            raise
        return by_name(ref, source, error)
    model = Resolved(spec)
    if is_there and (folder := folder_of(path)) is not None:
        weigh(model, folder, source, str(folder))
    return model


def from_gguf(path: Path, ref: str) -> Resolved:
    """Facts of a GGUF file, whose header states its model."""
    from kvplan.models.gguf_model import gguf_stored, stored_in

    stored = stored_in(path)
    model = gguf_stored(stored, printable(str(path), 400), printable(ref, 1000))
    note = (
        f"{printable(str(path), 200)}: {model.architecture}, {model.label}, read from the file's header alone; its "
        f"{format_gib(stored.total_bytes)} of weights are taken tensor by tensor"
    )
    return Resolved(model.spec, notes=[note], checkpoint=stored)


def weights_alone(path: Path) -> KvplanError:
    """Error for a weights file without config.json, with the size to use with a config."""
    from kvplan.models.checkpoint import read_checkpoint

    checkpoint = read_checkpoint(path)
    size = checkpoint.total_bytes if checkpoint else 0
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
        return by_name(ref, source, catalog.unknown(printable(model_id, 100)))
    try:
        resolved = hub.resolve_model(ref, revision=source.revision, offline=source.offline)
    except KvplanError as error:
        known = catalog.find(model_id) if source.revision is not None else None
        if known is not None and isinstance(error, EnvironmentProblem):
            own = f"the catalog's copy is planned, not revision {printable(str(source.revision), 60)}"
            warning = f"{sentence(error.subject, error.problem)}; {own}"
            return Resolved(catalog.load(known, text_only=source.text_only), warnings=[warning])
        why = catalog.missing(model_id)
        if why is not None:
            raise error.changed(remedy=f"{error.remedy} (the catalog lacks it: {why})") from error
        return copy_of(model_id, source, error)
    spec = load_spec(resolved.directory, name=model_id, **source.reading)
    model = Resolved(spec, notes=list(resolved.notes))
    weigh(model, resolved.directory, source, model_id)
    if not is_sized(model) and not source.offline and not source.weights_stated:
        stored = hub.remote_checkpoint(ref, revision=source.revision)
        if stored is not None:
            use_stored(model, stored, model_id)
    return model


def copy_of(model_id: str, source: Source, error: KvplanError) -> Resolved:
    """The catalog's model that a repository copies by its name, if the repository itself cannot be read."""
    from kvplan.asked.question import taken_as
    from kvplan.models.lookup import copied

    known = None if source.revision is not None else copied(model_id)
    if known is None:
        return by_name(model_id, source, error)
    spec = catalog.load(known, text_only=source.text_only)
    return Resolved(spec, [f"{sentence(error.subject, error.problem)}; {taken_as(known)}"])


def by_name(ref: str, source: Source, error: KvplanError) -> Resolved:
    """A quantized copy of a catalog model as its name has it, for a model that cannot be read; else raise the error."""
    from kvplan.models.copies import sized
    from kvplan.models.lookup import explained

    known = None if source.revision is not None else sized(ref, text_only=source.text_only)
    if known is None:
        raise explained(ref, error) from error
    spec, note = known
    return Resolved(spec, [f"{sentence(error.subject, error.problem)}; {note}"])


def is_sized(model: Resolved) -> bool:
    return not is_unknown(model.spec) or model.weights_bytes is not None or model.checkpoint is not None


def is_unknown(spec: ModelSpec) -> bool:
    return spec.quantization is not None and not spec.quantization.known


def weigh(model: Resolved, directory: Path, source: Source, where: str) -> None:
    """Add the size of the weights' files, if there are any, and compare it with the config."""
    if source.weights_stated:
        return
    if model.spec.text_only:
        model.notes.append(f"{printable(where, 200)}: the config is taken, not the files, which hold the tower too")
        return
    from kvplan.models.checkpoint import read_checkpoint

    stored = read_checkpoint(directory)
    if stored is None:
        return
    model.warnings += stored.notes
    if stored.format == "gguf" or stored.tensors or is_unknown(model.spec):
        use_stored(model, stored, where)
    if stored.format != "gguf" and stored.total_bytes and not is_unknown(model.spec):
        compare(model, stored, where)


def use_stored(model: Resolved, stored: "Checkpoint", where: str) -> None:
    """Use the files' sizes: per tensor if their headers have them, else the total spread evenly.

    Raises InvalidInputError if the files have less than a bit per parameter, which no format can.
    """
    from kvplan.sizing.weights import num_params

    parameters = sum(num_params(model.spec).values())
    if 8 * stored.total_bytes < parameters:
        raise InvalidInputError(
            f"{printable(where, 200)}",
            f"its weight files hold {stored.total_bytes:,} bytes, less than one bit for each of {parameters:,} "
            "parameters",
            "fetch them again, or state --weights-bytes",
        )
    if stored.tensors:
        model.checkpoint, how = stored, "tensor by tensor"
    else:
        model.weights_bytes, how = stored.total_bytes, "spread evenly over the ranks"
    reason = ""
    if is_unknown(model.spec) and model.spec.quantization is not None:
        reason = f"{model.spec.quantization.problem}; "
    model.notes.append(
        f"{printable(where, 200)}: {reason}the files' own {format_gib(stored.total_bytes)} of weights are taken, {how}"
    )


def compare(model: Resolved, stored: "Checkpoint", where: str) -> None:
    """Note a clear difference between the files' size and the config's, both in the server's dtype."""
    from kvplan.sizing.weights import Layout, total_weights

    layout = Layout(dtype=model.spec.dtype)
    computed, actual = total_weights(model.spec, layout), stored.total_bytes
    if model.checkpoint is not None:
        from kvplan.sizing.stored import stored_weights

        actual = sum(stored_weights(model.spec, model.checkpoint, layout).values())
    if abs(actual - computed) > FAR_OFF * computed:
        taken = "the files are taken" if model.checkpoint else "the config is taken; or say --weights-bytes"
        model.warnings.append(
            f"{printable(where, 200)}: the files come to {actual:,} bytes in {model.spec.dtype}, the config to "
            f"{computed:,}; check that they belong together ({taken})"
        )
