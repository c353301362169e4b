"""Images within prompts, and what an encoder may do for them in a step, as a scheduler sees both."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """An image: a run of a prompt's positions whose embeddings an encoder computes.

    content  what tells images apart: equal ones are computed once
    ranges   of its positions, from its first on, the half-open ones that take an embedding; (): all
    """

    offset: int
    length: int
    content: str
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def end(self) -> int:
        """The position after its last."""
        return self.offset + self.length

    @property
    def num_embeds(self) -> int:
        """Embeddings that the encoder computes for it."""
        return self.embeds_in(0, self.length)

    def embeds_in(self, start: int, end: int) -> int:
        """Embeddings that its positions from `start` to `end` take."""
        ranges = self.ranges or ((0, self.length),)
        return sum(max(0, min(end, last) - max(start, first)) for first, last in ranges)


@dataclass(frozen=True, slots=True)
class EncoderRules:
    """What a step may ask of the encoder.

    compute_budget  embeddings computed in a step, at most
    cache_size      embeddings kept for prompts that are not past their image, or for the next that has it
    chunks_inputs   False: a step has all of an image's positions or none (vLLM's disable_chunked_mm_input)
    """

    compute_budget: int
    cache_size: int
    chunks_inputs: bool = True
