"""Requests that name LoRA adapters: their slots, their prefixes, and the least time that adapters add to a step.

vLLM multiplies the tokens of adapters' requests in every linear layer by two thin matrices, at --max-lora-rank whatever
an adapter's own rank: a kernel to the rank and one back. Both are taken at their bytes or FLOPs, whichever take longer:
no kernel was measured, so it is the least time. Not timed: experts' adapters, and loading an adapter into a slot.
Source: vLLM 0.33 lora/punica_wrapper/punica_gpu.py, lora/ops/triton_ops (lora_shrink, lora_expand).
"""

from dataclasses import field
from random import Random
from typing import Final

from engine.scheduler import Batch
from engine.sequence import Sequence
from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.core.units import parse_count, parse_fraction
from kvplan.hardware.gpu import GpuSpec
from kvplan.servers.base import abilities_of
from kvplan.servers.plans.plan import Plan
from kvplan.simulate.kernels.layers import Adapted, layers
from kvplan.simulate.kernels.roof import ELEMENT, roof
from kvplan.simulate.loop import Simulation
from kvplan.simulate.requests import BlockKeys, Content
from kvplan.simulate.work import StepWork

FLAG: Final = "--adapters"
MOST: Final = 10_000
BETWEEN: Final = 4  # bytes of a number between the two kernels
SHARE: Final = 1.0


@dataclass(frozen=True, slots=True)
class Adapters:
    """How many adapters requests name, each as often, and the share of the requests that name one."""

    count: int
    share: float
    rank: int
    gpu: GpuSpec
    layers: tuple[tuple[Adapted, int], ...]

    @property
    def text(self) -> str:
        return f"adapters of rank {self.rank} at their least time, not measured"

    def seconds(self, tokens: int, adapters: int) -> float:
        """Least seconds that so many tokens of so many adapters add to a step."""
        if not tokens:
            return 0.0
        total = 0.0
        for layer, times in self.layers:
            thin = BETWEEN * tokens * layer.slices * self.rank
            down = ELEMENT * layer.inputs * (adapters * layer.slices * self.rank + tokens) + thin
            up = ELEMENT * layer.outputs * (adapters * self.rank + 2 * tokens) + thin
            flops = 2.0 * tokens * self.rank
            total += times * roof(self.gpu, down, flops * layer.slices * layer.inputs)
            total += times * roof(self.gpu, up, flops * layer.outputs)
        return total


def adapters_of(text: str | None, plan: Plan) -> Adapters | None:
    """Parse `8`, or `8@0.5`."""
    if text is None:
        return None
    args, engine = plan.request.args, plan.request.release.engine
    if abilities_of(engine).prompts_first is not None:
        raise UsageError(f"{FLAG} {printable(text, 40)}", "needs vLLM's scheduler", "use --engine vllm")
    if not args.max_loras:
        raise UsageError(f"{FLAG} {printable(text, 40)}", "the server has no slot for adapters", "add --enable-lora")
    count, mark, share = text.partition("@")
    own = layers(plan).adapted
    return Adapters(
        parse_count(count, FLAG, MOST), parse_fraction(share, FLAG) if mark else SHARE, args.max_lora_rank,
        plan.request.gpu, tuple(own.items()),
    )  # fmt: skip


@dataclass(slots=True)
class AdapterRun(Simulation):
    """A Simulation whose requests name adapters."""

    adapters: Adapters | None = None

    luck: Random = field(default_factory=lambda: Random(0))

    def _queue(self, seq: Sequence, content: Content) -> None:
        adapters = self.adapters
        assert adapters is not None
        if self.luck.random() < adapters.share:
            own = 1 + self.luck.randrange(adapters.count)
            seq.adapter = str(own)
            chains = tuple(chain * (MOST + 1) + own for chain in content.chains)  # equal tokens, but another's KV
            named = Content(content.number, chains, content.run_len, content.shared_len)
            keys = {size: BlockKeys(named, size, len(names)) for size, names in seq.block_hashes.items()}
            seq.block_hashes = keys  # type: ignore[assignment]
        Simulation._queue(self, seq, content)

    def _work(self, batch: Batch) -> StepWork:
        assert self.adapters is not None
        named = [(seq.adapter, n) for seq, n in batch.num_tokens.items() if seq.adapter is not None]
        seconds = self.adapters.seconds(sum(n for _, n in named), len({name for name, _ in named}))
        return Simulation._work(self, batch)._replace(more=seconds)
