"""The files of a Hugging Face directory other than weights: config, tokenizer, end-of-text tokens."""

from pathlib import Path
from typing import Any

from kvplan.core.errors import InvalidInputError
from kvplan.core.files import MIB, load_json, read_text
from kvplan.models import hf_config
from kvplan.models.spec import ModelSpec

MAX_TOKENIZER_BYTES = 256 * MIB  # Gemma 3's has 33 MB


def read_spec(directory: Path) -> ModelSpec:
    """The model of a directory's config.json; raises InvalidInputError for no directory or a damaged file."""
    if not directory.is_dir():
        raise InvalidInputError(f"{directory}: is not a directory; give a model directory, or a ModelSpec")
    return hf_config.load_spec(directory)


def read_tokenizer(directory: Path) -> Any:
    """The directory's tokenizer; None where it has none."""
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    from tokenizers import Tokenizer

    text = read_text(path, MAX_TOKENIZER_BYTES)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise InvalidInputError(f"{path}: is not a tokenizer ({error})") from error
    tokenizer.no_truncation()  # left over from training; a prompt is served whole or refused
    tokenizer.no_padding()
    return tokenizer


def read_eos_token_ids(directory: Path) -> frozenset[int]:
    """The tokens that end a text, by generation_config.json or else config.json."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        if not path.exists():
            continue
        config = load_json(path)
        stated = config.get("eos_token_id")
        if stated is not None:
            ids = stated if isinstance(stated, list) else [stated]
            if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
                raise InvalidInputError(f"{path}: eos_token_id must be a token id or a list of them ({stated!r:.60})")
            return frozenset(ids)
    return frozenset()
