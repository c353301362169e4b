"""Step times of no model, for tests of what a run counts and when its clock moves."""

from dataclasses import dataclass

from kvplan.simulate.host import Host
from kvplan.simulate.kernels.line import Line
from kvplan.simulate.work import StepWork


@dataclass(frozen=True, slots=True)
class Constant:
    """Every step takes as long."""

    step_s: float = 1.0
    text: str = "constant"
    host: Host | None = None

    def seconds(self, work: StepWork) -> float:
        return self.step_s

    def line(self, count: int, read: int) -> Line | None:
        return None


PIECE = 97  # tokens read, up to which a line is valid


@dataclass(frozen=True, slots=True)
class Odd:
    """Every count moves the clock; steps that only decode, with one kind of attention, are pieces of lines."""

    reads: tuple[float, ...] = (1.1e-4,)
    pairs: tuple[float, ...] = (2.1e-4,)
    text: str = "odd"
    host: Host | None = None

    def seconds(self, work: StepWork) -> float:
        if not work.num_tokens:
            return 0.0
        if len(self.reads) == 1 and not work.prompt_tokens and work.num_tokens == work.num_seqs:
            line = self.line(work.num_seqs, work.read[0])
            assert line is not None
            return max(line.base + line.slope * work.read[0], line.least)
        total = 9.9e-3 + 1.3e-3 * work.num_tokens + 1.9e-5 * work.num_seqs + 3.1e-4 * work.num_samples
        total += 7.7e-5 * work.num_prompts + 2.3e-4 * work.prompt_tokens
        for cost, read in zip(self.reads, work.read, strict=True):
            total += cost * read
        own_pairs = work.prompt_pairs or (0,) * len(self.pairs)  # a jump over steps without prompts leaves it out
        for cost, pairs, own in zip(self.pairs, work.pairs, own_pairs, strict=True):
            total += cost * (pairs + 0.3 * own)
        return total

    def line(self, count: int, read: int) -> Line | None:
        if len(self.reads) > 1:
            return None
        piece = -(-read // PIECE)
        slope = self.reads[0] * (1 + piece % 3)
        return Line(9.9e-3 + 1.3e-3 * count + 1e-3 * piece, slope, piece * PIECE, 2.3e-2)
