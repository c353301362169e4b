"""Options of the bundled engine that `serve` and `profile` share: adapters, speculation and offloading."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvplan.asked.question import Source, resolve
from kvplan.cli.fields import Texts
from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.units import GIB
from kvplan.servers.words.argument_values import gib, read_argument

if TYPE_CHECKING:
    from engine.draft_rules import SpeculativeConfig

SPECULATIVE: Final = ("method", "num_speculative_tokens", "model", "prompt_lookup_min", "prompt_lookup_max")
ENABLE_LORA: Final = ("--enable-lora/--no-enable-lora", "Reserve memory for LoRA adapters.")
SPECULATIVE_CONFIG: Final = (
    "--speculative-config JSON",
    'Speculative decoding, e.g. \'{"method": "ngram", "num_speculative_tokens": 4}\', or "draft_model" with '
    '"model": DIR.',
)
OFFLOADING_DISK: Final = ("--kv-offloading-disk-size GIB", "Size of the files in --kv-offloading-dir, in GiB.")


def slots_of(enable_lora: bool | None, max_loras: str | None) -> int:
    """Adapter slots of the bundled engine: --enable-lora without --max-loras is one, as in vLLM."""
    count = 0 if max_loras is None else read_argument("max_loras", max_loras, "--max-loras")
    if enable_lora is False and count:
        raise UsageError("--no-enable-lora", "contradicts --max-loras", "use only one")
    return count or int(enable_lora is True)


def modules_of(texts: Texts, max_loras: int, taken: Iterable[str]) -> dict[str, str]:
    """Parse --lora-modules: directories by the names that clients use; a name in `taken` is refused."""
    modules: dict[str, str] = {}
    for text in texts or []:
        where = f"--lora-modules {printable(text, 60)}"
        if not max_loras:
            raise UsageError(where, "there is no slot for adapters", "add --enable-lora, or --max-loras N")
        name, path = module_of(text, where)
        if name in modules or name in taken:
            raise UsageError(where, f"{printable(name, 60)!r} is named twice", "choose another name")
        modules[name] = path
    return modules


def module_of(text: str, where: str) -> tuple[str, str]:
    """Parse (name, path) from NAME=DIR, or from a JSON object, as in vLLM."""
    name, _, path = text.partition("=")
    if text.startswith("{"):
        try:
            values = json.loads(text)
            name, path = values.pop("name"), values.pop("path")
        except (ValueError, KeyError) as error:
            raise UsageError(where, "is no object with name and path", "write NAME=DIR") from error
        if set(values) - {"base_model_name"}:
            raise UsageError(where, f"has {sorted(values)[0]!r}, which is not known", "write NAME=DIR")
    if not (isinstance(name, str) and isinstance(path, str) and name and path):
        raise UsageError(where, "must be NAME=DIR", "write my-adapter=/path/to/it")
    return name, path


def has_weights(path: Path) -> bool:
    return path.is_dir() and any(path.glob("*.safetensors"))


def speculative_of(text: str | None, source: Source, *, is_dummy: bool) -> "SpeculativeConfig | None":
    """Parse vLLM's JSON of the speculative method; an unsupported key is rejected by name."""
    from engine.draft_rules import SpeculativeConfig

    flag = "--speculative-config"
    if text is None:
        return None
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        problem = f"is not a JSON object ({printable(text, 60)!r})"
        raise UsageError(flag, problem, """write '{"method": "ngram", "num_speculative_tokens": 4}'""")
    if odd := [name for name in settings if name not in SPECULATIVE]:
        raise UsageError(
            f"{flag}: {printable(odd[0], 40)}",
            f"is not a key that the bundled engine has ({', '.join(SPECULATIVE)})",
            "remove it",
        )
    stated: dict[str, Any] = settings  # SpeculativeConfig checks the values
    stated.setdefault("method", "draft_model" if "model" in stated else "ngram")
    stated.setdefault("num_speculative_tokens", 0)
    model = stated.get("model")
    if isinstance(model, str) and not has_weights(Path(model)):
        if not is_dummy:
            raise UsageError(f"{flag}: model {printable(model, 80)}", "has no weights", "name a directory with weights")
        stated["model"] = resolve(model, source).spec
    return SpeculativeConfig(**stated)


def offloading(size: int, directory: str | None, disk_size: str | None) -> dict[str, Any]:
    """Offloading settings in the engine's GiB: `size` bytes of host memory (0: none), and files."""
    disk = None if disk_size is None else gib(disk_size, "--kv-offloading-disk-size")
    return {
        "kv_offloading_size": size / GIB if size else None,
        "kv_offloading_dir": directory,
        "kv_offloading_disk_size": None if disk is None else disk / GIB,
    }
