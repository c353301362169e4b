"""Folders of models without a config.json: what they hold, and the command that answers for it."""

import re
import shlex
from pathlib import Path
from typing import Any, Final

from kvplan.core.errors import InvalidInputError, KvplanError, UnsupportedModelError
from kvplan.core.files import exists, load_json, os_problem, printable, read_text

MOST_FILES: Final = 10_000
MOST_BYTES: Final = 1024  # of a reference in the Hub's cache: one commit
RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)  # of --max-lora-rank in vLLM 0.33, config/lora.py
TRAINING: Final = ("trainer_state.json", "optimizer.pt", "latest", ".metadata", "zero_to_fp32.py", "scheduler.pt")


def config_folder(path: Path) -> Path:
    """The folder that holds the config.json: of the Hub's cache the snapshot of its main branch, else the folder. Raise
    KvplanError if the folder holds something else than a model.
    """
    if exists(path / "config.json"):
        return path
    main = path / "refs" / "main"
    if exists(main) and exists(path / "snapshots"):
        commit = read_text(main, MOST_BYTES).strip()
        snapshot = path / "snapshots" / commit
        return snapshot if re.fullmatch("[0-9a-f]{40}", commit) and exists(snapshot / "config.json") else path
    error = what_it_is(path)
    if error is not None:
        raise error
    return path


def what_it_is(path: Path) -> KvplanError | None:
    """Error that names what a folder without a config.json holds; None if nothing says it."""
    label = printable(str(path), 400)
    if exists(path / "adapter_config.json"):
        return adapter(path, label)
    if exists(path / "model_index.json"):
        kind = printable(str(text(load_json(path / "model_index.json"), "_class_name") or "diffusers"), 60)
        problem = f"is a diffusion pipeline ({kind})"
        return UnsupportedModelError(label, problem, "kvplan sizes models that generate or embed text")
    try:
        names = sorted(file.name for _, file in zip(range(MOST_FILES), path.iterdir(), strict=False))
        ggufs = [name for name in names if name.endswith(".gguf") and not name.startswith("mmproj")]
        size = (path / ggufs[0]).stat().st_size if ggufs else 0
    except OSError as error:
        return os_problem(path, error)
    if ggufs:
        remedy = f"run `kvplan estimate MODEL --weights-bytes {size}` with the model that it was made from"
        return InvalidInputError(label, f"holds GGUF files and no config.json ({printable(ggufs[0], 80)})", remedy)
    if any(name in TRAINING or name.startswith("global_step") for name in names):
        problem = "is a checkpoint of a training run without a config.json"
        return InvalidInputError(label, problem, "export the model (save_pretrained), or name the model it trains")
    return None


def adapter(path: Path, label: str) -> KvplanError:
    """Error for an adapter, with the command that plans its base with it."""
    config = load_json(path / "adapter_config.json")
    base, rank = text(config, "base_model_name_or_path"), config.get("r")
    kind = printable(str(text(config, "peft_type") or "LoRA"), 40)
    of, command = (f" of {printable(base, 200)}", shlex.quote(printable(base, 200))) if base else ("", "MODEL")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 < rank <= RANKS[-1]:
        return InvalidInputError(label, f"is an adapter ({kind}){of}, not a model", f"run `kvplan estimate {command}`")
    slot = next(size for size in RANKS if size >= rank)
    remedy = f"run `kvplan estimate {command} --enable-lora --max-lora-rank {slot}`"
    return InvalidInputError(label, f"is an adapter ({kind}, rank {rank}){of}, not a model", remedy)


def text(config: dict[str, Any], key: str) -> str | None:
    value = config.get(key)
    return value if isinstance(value, str) and value else None
