"""The loop: `step()` schedules, runs and takes in; a model is whatever computes the next tokens of a batch."""

from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from typing import Generic, Protocol, TypeVar

from engine.scheduler import Batch, Scheduler
from engine.sequence import Sequence


class Flight(Protocol):
    """A batch that a model was given and whose tokens have not been read yet."""

    @property
    def batch(self) -> Batch: ...

    def wait(self) -> Mapping[str, Several[int]]:
        """The new tokens of the batch's `samples`, by request id, once they are known."""


F = TypeVar("F", bound=Flight)


class EngineCore(Generic[F]):
    """A scheduler and a model in a loop, with as many batches in flight as the scheduler's config says."""

    def __init__(self, scheduler: Scheduler, model: Callable[[Batch], F]) -> None:
        """model  launches a batch, and returns without waiting for its tokens"""
        self.scheduler, self._model = scheduler, model
        self._in_flight: deque[F] = deque()  # the oldest first
        self._gaps: deque[int] = deque()  # behind each, places in the queue of batches of nothing (vLLM's batch queue)

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has anything to do."""
        return self.scheduler.has_unfinished or any(extension.is_busy for extension in self.scheduler.extensions)

    def run_to_end(self, seqs: Several[Sequence]) -> None:
        """Run sequences to their ends, beside those that run already."""
        for seq in seqs:
            self.scheduler.add(seq)
        while not all(seq.is_finished for seq in seqs):
            self.advance()

    def advance(self) -> None:
        """One step: schedule and run, and take in the oldest batch."""
        self._launch()
        self._take_in()

    def _launch(self) -> None:
        """Schedule and run until as many batches are in flight as may be."""
        if self._in_flight and all(seq.is_finished for seq in self._in_flight[0].batch.num_tokens):
            self._postprocess()  # nobody wants its tokens: all its sequences ended with the batch before it
        while len(self._in_flight) + sum(self._gaps) < self.scheduler.config.batch_queue_depth:
            batch = self._schedule()
            if batch.num_tokens:
                self._run(batch)
            elif self._gaps and self.scheduler.has_unfinished:
                self._gaps[-1] += 1
            else:
                break

    def _take_in(self) -> None:
        """Take in the oldest batch's tokens, and what extensions did meanwhile."""
        is_idle = not self._in_flight
        if not is_idle:
            self._postprocess()
        for poll in self.scheduler.hooks.poll:
            poll(is_idle)

    def _schedule(self) -> Batch:
        """The next batch; it is empty when nothing can run."""
        batch = self.scheduler.schedule()
        for launch in self.scheduler.hooks.launch:
            launch(batch)
        return batch

    def _run(self, batch: Batch) -> None:
        """Give a batch to the model and go on."""
        self._in_flight.append(self._model(batch))
        self._gaps.append(0)

    def _postprocess(self) -> None:
        """Wait for the oldest batch's tokens and give them to their sequences; those that ended meanwhile get none."""
        flight = self._in_flight.popleft()
        self._gaps.popleft()
        self.scheduler.update(flight.batch, self._tokens(flight))
        self._hand_out(flight)
        for settle in self.scheduler.hooks.settle:
            settle(flight.batch)

    def _tokens(self, flight: F) -> Mapping[str, Several[int]]:
        return flight.wait()

    def _hand_out(self, flight: F) -> None:
        """Tell whoever asked for them of a batch's tokens; here the sequences have them, and nobody else asks."""

    def close(self) -> None:
        """Finish what extensions have begun."""
        for close in self.scheduler.hooks.close:
            close()
