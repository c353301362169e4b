"""Batches in flight on the device, and which sequences a batch with NaN logits has damaged."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass, field

from engine.batch import BatchArrays
from engine.block_manager import NULL_BLOCK
from engine.drafting import DraftStep
from engine.sampler import Deferred, SampledAhead, SampledTokens, TokenLogprobs
from engine.scheduler import Batch
from engine.sequence import Sequence
from engine.speculation import CheckedAhead, CheckedTokens


@dataclass(slots=True)
class Flight:
    """A batch that was launched and whose tokens have not been read yet."""

    batch: Batch
    arrays: BatchArrays
    ahead: SampledAhead | SampledTokens | CheckedAhead | Deferred
    num_prompt_tokens: int
    discarded: set[Sequence] = field(default_factory=set)  # what it computes for these means nothing, and is known to
    sampled: SampledTokens | CheckedTokens = field(init=False)  # from wait() on; rows: of each sequence
    rows: dict[Sequence, tuple[Several[int], Several[TokenLogprobs | None]]] = field(default_factory=dict)

    def wait(self) -> Mapping[str, Several[int]]:
        """The tokens of each sequence, by request id."""
        self.sampled = self.ahead.wait()
        self.rows = dict(zip(self.arrays.seqs, self.sampled.by_seq, strict=True))
        return {seq.request_id: tokens for seq, (tokens, _) in self.rows.items()}

    def choose(self) -> None:
        """Choose the batch's tokens, now that those before them are known."""
        if isinstance(self.ahead, Deferred):
            self.ahead.begin()

    def forget_samples(self, seqs: Iterable[Sequence]) -> None:
        """Ignore the batch's tokens for these sequences."""
        for seq in seqs:
            if seq in self.batch.samples:
                self.batch.samples.remove(seq)
                seq.num_placeholders -= 1 + len(self.batch.extra(DraftStep).drafts.get(seq, ()))

    def num_tokens_of(self, seq: Sequence) -> int:
        """Tokens of a sequence after this batch."""
        return int(self.arrays.context_lens[self.arrays.seqs.index(seq)])


def num_prompt_tokens(batch: Batch) -> int:
    """Prompt tokens of a batch that was just scheduled."""
    total = 0
    for seq, n in batch.num_tokens.items():
        left = seq.num_prompt_tokens - seq.num_computed_tokens + n  # before the batch
        if left > 0:
            total += min(n, left)
    return total


def own_blocks(seqs: list[Sequence], running: list[Sequence]) -> set[int]:
    """Blocks that these sequences hold and no other running one does."""
    return _blocks(seqs) - _blocks(seq for seq in running if seq not in seqs)


@dataclass(frozen=True, slots=True)
class Damage:
    """The sequences and blocks that NaN values have reached.

    failed   sequences whose own logits are no numbers: they end
    victims  sequences whose nan may be another's: they run on, and this step's token is forgotten
    touched  sequences that share or have taken over a damaged block: they begin again
    blocks   what nobody may read before it is 0 again
    """

    failed: list[Sequence]
    victims: list[Sequence]
    touched: list[Sequence]
    blocks: set[int]

    @classmethod
    def of(cls, bad: list[Sequence], flight: Flight, ahead: tuple[Flight, ...], running: list[Sequence]) -> "Damage":
        """Damage from a flight's bad sequences, in it and in the batches launched since.

        Attention gives a masked key the weight 0, and 0 x nan is nan, so that even the blocks before the bad token are
        damaged from the second layer on.
        """
        victims = _victims(flight, bad)
        failed = [seq for seq in bad if seq not in victims]
        tainted, known = _written((flight, *ahead), failed), set[int]()
        touched: list[Sequence] = []
        while tainted != known:
            known = tainted
            touched = [seq for seq in running if seq not in failed and _blocks([seq]) & tainted]
            tainted = tainted | _written(ahead, touched)
        return cls(failed, victims, touched, tainted | own_blocks([*failed, *touched], running))


def _victims(flight: Flight, bad: list[Sequence]) -> list[Sequence]:
    """Sequences of `bad` whose NaN may come from another: they hold a block that another wrote in this step.

    Blocks are shared forwards only, so that somebody remains to be blamed; a victim that is bad itself fails when it
    runs again.
    """
    written = {seq: flight.arrays.written_blocks(seq) for seq in bad}
    return [seq for seq in bad if any(_blocks([seq]) & written[other] for other in bad if other is not seq)]


def _blocks(seqs: Iterable[Sequence]) -> set[int]:
    """The blocks these sequences hold."""
    return {block for seq in seqs for table in seq.block_table for block in table} - {NULL_BLOCK}


def _written(flights: Iterable[Flight], seqs: list[Sequence]) -> set[int]:
    """The blocks that these sequences write in these batches."""
    return {block for flight in flights for seq in seqs for block in flight.arrays.written_blocks(seq)}
