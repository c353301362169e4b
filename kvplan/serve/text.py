"""Tokenization: the model's own tokenizer, or a stand-in for a model with only a config."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Final

from engine.directory import read_tokenizer
from kvplan.core.errors import InvalidInputError
from kvplan.core.files import path_text

SPACE: Final = "\u0120"  # how byte-level tokenizers write a space
END: Final = "<|end|>"
NUM_BYTES: Final = 256


def tokenizer_of(directory: Path | None, vocab_size: int) -> Any:
    """Return a directory's tokenizer, or the stand-in without a directory (None if the vocabulary is too small)."""
    if directory is None:
        return stand_in(vocab_size)
    tokenizer = read_tokenizer(directory)
    if tokenizer is None:
        raise InvalidInputError(f"{path_text(directory)}", "has no tokenizer.json", "name the directory of a tokenizer")
    return tokenizer


def stand_in(vocab_size: int) -> Any:
    """Return a lossless tokenizer: up to three letters per token as far as the vocabulary allows, else bytes.

    It makes nearly twice as many tokens as a trained tokenizer; use the model's own if their number matters.
    Return None if the vocabulary has fewer than 256 tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    if vocab_size < NUM_BYTES:
        return None
    vocab = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for left, right in _merges():
        if left + right not in vocab:
            if len(vocab) + 1 >= vocab_size:  # one is reserved for the end token
                break
            vocab[left + right] = len(vocab)
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    pieces = pre_tokenizers.Split(Regex(" [a-z]{1,2}|[a-z]{1,3}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pieces, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    if len(vocab) < vocab_size:
        tokenizer.add_special_tokens([END])
    return tokenizer


def _merges() -> Iterator[tuple[str, str]]:
    """Yield BPE merges: first pairs of letters, then a third letter on either side."""
    firsts = SPACE + ascii_lowercase
    yield from product(firsts, ascii_lowercase)
    for first, middle, last in product(firsts, ascii_lowercase, ascii_lowercase):
        yield first + middle, last
        yield first, middle + last


def end_token_of(tokenizer: Any) -> int | None:
    """Return the stand-in's end-of-text token id, or None."""
    return None if tokenizer is None else tokenizer.token_to_id(END)
