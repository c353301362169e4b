"""Files beside a config: how images, videos and audio are converted to tokens, and how long an encoded text may be.

Precedence of the files as in transformers 5.23 (image_processing_base.py, video_processing_utils.py): the nested
settings of processor_config.json first, then the modality's own file, then preprocessor_config.json.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvplan.core.files import load_json

IMAGES, VIDEOS, AUDIO = "images_kwargs", "videos_kwargs", "audio_kwargs"
WHOLE: Final = "preprocessor_config.json"
NESTED: Final = "processor_config.json"
SENTENCES: Final = "sentence_bert_config.json"
# Scope of --mm-processor-kwargs -> its part of processor_config.json, and files with only that part.
PARTS: Final = {
    IMAGES: (("image_processor",), (WHOLE,)),
    VIDEOS: (("video_processor",), ("video_preprocessor_config.json", WHOLE)),
    AUDIO: (("feature_extractor", "audio_processor"), (WHOLE,)),
}


def settings_of(directory: Path) -> Mapping[str, Any]:
    """Settings of each modality by scope, and those of the processor as a whole; empty without such files."""
    nested = read(directory / NESTED)
    settings: dict[str, Any] = {key: value for key, value in nested.items() if not isinstance(value, Mapping)}
    for scope, (parts, files) in PARTS.items():
        scope_values = [nested[part] for part in parts if isinstance(nested.get(part), Mapping)]
        scope_values += [values for name in files if (values := read(directory / name))]
        if scope_values:
            settings[scope] = scope_values[0]
    return settings


def with_sentence_length(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """`config` with the `max_seq_length` of sentence-transformers' file, which vLLM prefers to the config's own."""
    length = read(directory / SENTENCES).get("max_seq_length")
    return config if length is None else {**config, "max_seq_length": length}


def read(file: Path) -> Mapping[str, Any]:
    """Values of a file, or an empty mapping if it does not exist."""
    try:
        if not file.is_file():
            return {}
    except OSError:
        return {}
    return load_json(file)
