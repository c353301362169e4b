"""Launches every kernel variant before serving begins: a compile later would stall all requests for seconds.

A variant is a kernel with its tile, dtypes and which of its tensors are there. Which tile follows from the tokens of a
step and of its longest chunk; whether decode work is cut, from its contexts; which tensors sampling has, from the
parameters of the rows.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.batch import BatchArrays
from engine.config import SamplingParams

SMALL_BLOCKS = 3  # beside the null block

Lens = NDArray[np.signedinteger[Any]]

GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams()
# Ways to draw a row, by what they ask of the kernels: nothing, a floor that is known, a floor that is to be found.
WAYS = (DRAWN, SamplingParams(min_p=0.1), SamplingParams(top_p=0.9))


def blank_step(query_lens: Lens, context_lens: Lens, num_groups: int, max_blocks: int) -> BatchArrays:
    """A step with these lengths [num_seqs], decodes first; reads only block 0 and stores nothing."""
    starts = np.concatenate(([0], np.cumsum(query_lens)))
    num_decodes = int((query_lens == 1).sum())
    return BatchArrays(
        seqs=[],
        num_decodes=num_decodes,
        token_ids=np.zeros(starts[-1], np.int64),
        positions=np.zeros(starts[-1], np.int64),
        context_lens=context_lens.astype(np.int32),
        query_start=(starts[num_decodes:] - starts[num_decodes]).astype(np.int32),
        last_tokens=starts[1:] - 1,
        block_tables=(np.zeros((len(query_lens), max_blocks), np.int32),) * num_groups,
        slot_mapping=(np.full(starts[-1], -1),) * num_groups,
    )


def small_steps(num_groups: int, block_size: int, max_blocks: int, max_model_len: int) -> Iterator[BatchArrays]:
    """Steps of one sequence each, in blocks 1 to SMALL_BLOCKS of every group: a decode, a prompt, a prompt's second
    chunk. Token ids are small numbers; what the cache holds before is the caller's."""
    for num_tokens, context in ((1, 40), (24, 24), (9, 21)):
        context = min(context, max_model_len, SMALL_BLOCKS * block_size)
        num_tokens = min(num_tokens, context)
        table = np.zeros((1, max_blocks), np.int32)
        table[0, :SMALL_BLOCKS] = np.arange(1, SMALL_BLOCKS + 1)[:max_blocks]
        positions = np.arange(context - num_tokens, context)
        slots = table[0, positions // block_size] * block_size + positions % block_size
        step = blank_step(np.array([num_tokens]), np.array([context]), num_groups, max_blocks)
        yield replace(
            step,
            token_ids=positions + 1,
            positions=positions,
            block_tables=(table,) * num_groups,
            slot_mapping=(slots.astype(np.int64),) * num_groups,
        )


def lengths(max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> Iterator[tuple[Lens, Lens]]:
    """(query_lens, context_lens) of steps that use each tile: decodes of one long context and of several short
    ones, then prefills of more and more tokens, one sequence while it holds them."""
    max_rows = min(max_num_seqs, max_num_batched_tokens)
    for num_seqs in sorted({1, min(2, max_rows), max_rows}):
        yield np.ones(num_seqs, np.int64), np.full(num_seqs, max_model_len if num_seqs == 1 else 1)
    tokens, largest = 2, min(max_num_batched_tokens, max_num_seqs * max_model_len)
    while tokens < 2 * largest:
        whole, remainder = divmod(min(tokens, largest), max_model_len)
        query_lens = np.array([*[remainder] * (remainder > 0), *[max_model_len] * whole], np.int64)
        yield query_lens, query_lens
        tokens *= 2


def samplings() -> Iterator[list[SamplingParams]]:
    """Sampling parameters for one or two rows: every method, with and without a greedy row and penalties."""
    for way, others in product((GREEDY, *WAYS), ([], [GREEDY], [DRAWN])):
        yield [way, *others]
        yield [replace(way, presence_penalty=0.1), *others]
