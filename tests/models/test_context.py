"""A config's lengths, with the defaults of its family, against transformers' own classes."""

from collections.abc import Mapping
from typing import Any

import pytest

from kvplan.models import catalog
from kvplan.models.families import rope
from kvplan.models.hf_config import MODULE_OF, OUTER_TIED, language_path

transformers = pytest.importorskip("transformers")

# Both servers read these with the class of deepseek_v3 (transformers_utils/config.py; hf_transformers/common.py).
OF_THE_SERVERS = {"deepseek_v32"}
# An encoder's context is less than its table: RoBERTa's first rows are its padding's, sentence-transformers has a
# length of its own; Whisper's is its decoder's. The published LLaVA-1.5 is read by its own code.
NO_LENGTHS = {"bert", "roberta", "xlm-roberta", "whisper", "llava"}
# Types whose class has a default under another key, which a config then always states, or which no server reads.
OTHER_KEYS = {"mpt", "whisper", "kimi_linear"}


def class_of(model_type: str) -> type | None:
    """The class of a model type; None: transformers has none."""
    try:
        config_class: type = transformers.CONFIG_MAPPING[model_type]
    except KeyError:
        return None
    return config_class


def default_of(model_type: str) -> int | None:
    config = class_of(model_type)
    assert config is not None
    return getattr(config().get_text_config(), "max_position_embeddings", None)


@pytest.mark.filterwarnings("ignore")
def test_a_familys_default_context_is_that_of_its_class() -> None:
    known = [kind for kind in MODULE_OF if class_of(kind) is not None and kind not in OF_THE_SERVERS | OTHER_KEYS]
    assert len(known) > 60
    assert {kind: rope.DEFAULT_OF.get(kind) for kind in known} == {kind: default_of(kind) for kind in known}


def test_an_outer_config_without_the_key_ties_the_embeddings_as_its_class_does() -> None:
    assert {kind: class_of(kind)().tie_word_embeddings for kind in OUTER_TIED} == OUTER_TIED  # type: ignore[misc]


def without_ropes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The catalog keeps the keys that sizes need; transformers refuses the rest of rope settings."""
    return {
        key: without_ropes(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if not key.startswith("rope")
    }


@pytest.mark.filterwarnings("ignore")
def test_every_catalog_entry_has_the_lengths_that_its_class_reads() -> None:
    wrong, compared = {}, 0
    for name in catalog.model_names():
        spec = catalog.load(name)
        kind = str(spec.config.get("model_type"))
        config_class = class_of(kind)
        if config_class is None or kind in OF_THE_SERVERS | NO_LENGTHS:
            continue
        text = config_class.from_dict(without_ropes(spec.config)).get_text_config()  # type: ignore[attr-defined]
        lengths = {key: getattr(text, key, None) for key in rope.KEYS if key in spec.lengths}
        compared += 1
        if lengths != spec.lengths:
            wrong[name] = (lengths, spec.lengths)
    assert not wrong
    assert compared > 200


def test_gemma_3_with_images_has_its_classes_context() -> None:
    """Its published configs state none; google's model card says 128K."""
    specs = [catalog.load(name) for name in catalog.model_names() if name.startswith("gemma-3-")]
    assert {spec.max_model_len for spec in specs if language_path(spec.config)} == {131_072}
