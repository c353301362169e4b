"""A tokenizer for the small models, whose token 2 ends a text as their configs say, and constraints to try."""

import json
from functools import cache
from itertools import product
from typing import Any

from engine import Engine
from engine.config import Constraint
from tests.support import small_models
from tests.support.small_engines import engine_for

END = 2


@cache
def small_tokenizer() -> Any:
    """Byte-level, of what ASCII can write, and of pairs of letters; 0 to 2 are special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = dict(zip(range(256), _byte_names(), strict=True))
    tokens = ["<unk>", "<s>", "</s>", *(names[byte] for byte in (9, 10, 13, *range(32, 127)))]
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = []
    for left, right in (*product(names[32], "ax1"), *product("etaoinshrdlu", repeat=2)):
        if len(vocab) < small_models.VOCAB:
            vocab[left + right] = len(vocab)
            merges.append((left, right))
    for token in ('"a', '":', '{"', '",', '"}', "],", "true", "12", "0."):
        if len(vocab) < small_models.VOCAB:
            vocab[token] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens[:3])
    return tokenizer


def _byte_names() -> list[str]:
    """How byte-level tokenizers write each byte (Radford et al. 2019)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def constrained_engine(**changes: Any) -> Engine:
    engine = engine_for("llama", **changes)
    engine.tokenizer = small_tokenizer()
    return engine


def schema(document: Any) -> Constraint:
    return Constraint("json", json.dumps(document))
