"""A step's time as the sum of its kernels, and of what the host adds."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import pairwise
from math import exp, log
from typing import Final

from kvplan.core.errors import UsageError
from kvplan.core.units import plural
from kvplan.hardware.gpu import GpuSpec
from kvplan.servers.plans.plan import Plan
from kvplan.simulate.host import Host, host_of
from kvplan.simulate.kernels.layers import Layers, Linear, Module, draft_layers, layers
from kvplan.simulate.kernels.library import Kernels, Shares
from kvplan.simulate.kernels.line import Known, Line
from kvplan.simulate.work import Reach, StepWork

TOKENS: Final = (
    1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144,
    8192, 12288, 16384, 24576, 32768, 65536,
)  # fmt: skip
LOGS: Final = tuple(map(log, TOKENS))
CONTEXTS: Final = (64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 131072.0, 1048576.0)
LAST: Final = len(CONTEXTS) - 1
TYPICAL: Final = (16, 1024)  # sequences, and tokens of each, of the step whose parts are named
LARGEST: Final = 5  # parts that are named
SAMPLER_PASSES: Final = 4  # over the logits in 32 bits: softmax, and the choice of a token
# Models whose whole attention layers were measured, by hidden size; the same layers under several names.
MODULES: Final[Mapping[str, Mapping[str, int]]] = {
    "dsa": {"DeepSeek-V3.2": 7168, "GLM-5": 6144, "GLM-5-FP8": 6144, "GLM-5.2-NVFP4": 6144},
    "dsv4_csa": {"DeepSeek-V4-Flash-FP8": 4096, "DeepSeek-V4-Pro-FP8": 7168, "DeepSeek-V4-Pro": 7168},
    "dsv4_hca": {"DeepSeek-V4-Flash-FP8": 4096, "DeepSeek-V4-Pro-FP8": 7168, "DeepSeek-V4-Pro": 7168},
    "msa": {"MiniMax-M3": 6144},
}


class Curve(Known[float, float]):
    """Seconds over tokens on a grid, linear in logarithms, computed where they are asked for."""

    __slots__ = ("_values",)

    def __init__(self, make: Callable[[float], float]) -> None:
        super().__init__(self._between)
        self._values = Known[int, float](lambda index: log(max(make(TOKENS[index]), 1e-12)))
        self[0] = 0.0

    def _between(self, tokens: float) -> float:
        index = min(max(bisect_right(TOKENS, tokens) - 1, 0), len(TOKENS) - 2)
        low = self._values[index]
        if tokens == TOKENS[index]:
            return exp(low)
        share = (log(tokens) - LOGS[index]) / (LOGS[index + 1] - LOGS[index])
        return exp(low + share * (self._values[index + 1] - low))


class Attention:
    """Kernels of all layers that read as far back: seconds of decoding and of prompts."""

    def __init__(
        self, decode: Callable[[float, float, float], float], prefill: Callable[[float, float], float]
    ) -> None:
        """decode: of so many sequences, of their context, and of the tokens that each of them computes."""
        self.decode = decode
        self.prefill = lru_cache(maxsize=1 << 16)(prefill)  # prompts of the same length come again and again
        self.lines = Known(self._made)  # by sequences, and tokens that each of them computes

    def line(self, count: int, read: int, queries: float = 1.0) -> Line:
        return self.lines[count, queries][bisect_left(CONTEXTS, read / count, 1, LAST) - 1]

    def _made(self, key: tuple[int, float]) -> tuple[Line, ...]:
        """Lines between contexts; more tokens never take less time."""
        count, queries = key
        lines, low_s = [], self.decode(count, CONTEXTS[0], queries)
        for low, high in pairwise(CONTEXTS):
            high_s = max(low_s, self.decode(count, high, queries))
            slope = (high_s - low_s) / (count * (high - low))
            lines.append(Line(low_s - slope * count * low, slope, count * high))
            low_s = high_s
        lines[-1] = lines[-1]._replace(until=float("inf"))
        return tuple(lines)


class KernelStep:
    """Step time of a plan made of kernels; device, link: factors on kernels and on links, as calibrated."""

    def __init__(
        self,
        own: Layers,
        kernels: Kernels,
        reaches: tuple[Reach, ...],
        host: Host,
        device: float = 1.0,
        link: float = 1.0,
    ) -> None:
        self.layers, self.kernels, self.reaches, self.host = own, kernels, reaches, host
        self._device, self._link = device, link
        self._tokens = Curve(lambda tokens: sum(self.parts(tokens).values()))
        self._prompts = Curve(self._only_prompts)
        self._head = Curve(self._sampled)
        self._plain = Known[int, float](  # a step in which so many tokens are decoded, without attention and host
            lambda count: self._tokens[count] + self._head[count] + self._states("generation", count)
        )
        self._lines = Known(self._made)
        self._scheduling = Known(host.scheduling)
        self.attention = tuple(self._attention(reach) for reach in reaches)

    def __reduce__(self) -> tuple[object, ...]:
        return KernelStep, (self.layers, self.kernels, self.reaches, self.host, self._device, self._link)

    # --- kernels by what they depend on

    def parts(self, tokens: float) -> dict[str, float]:
        """Seconds of all kernels but attention and the head at so many tokens, by name."""
        own, kernels, device = self.layers, self.kernels, self._device
        parts = {
            f"{name.form} {name.outputs} x {name.inputs}": device
            * times
            * kernels.gemm(name.form, tokens, name.outputs, name.inputs)
            for name, times in own.linear.items()
        }
        peers, exchanging, exchanges = own.exchange
        for name, times in own.gathered.items():
            seconds = device * times * kernels.gemm(name.form, peers * tokens, name.outputs, name.inputs)
            parts[f"{name.form} {name.outputs} x {name.inputs} for all ranks"] = seconds
        for (form, shape), times in own.experts.items():
            seconds = device * times * kernels.experts(form, peers * tokens, shape, own.law)
            parts[f"{shape.experts} experts {form} {shape.inter:,} x {shape.hidden:,}"] = seconds
        if exchanges:  # tokens are gathered before, and sums scattered after: the two halves of an all-reduce
            seconds = kernels.all_reduce(exchanging, peers * tokens * own.hidden)
            parts["exchange of tokens"] = self._link * exchanges * seconds
        if own.sums:
            parts["all-reduces"] = self._link * own.sums * kernels.all_reduce(own.ranks, tokens * own.hidden)
        small = sum(times * kernels.small(tokens, width) for width, times in own.small.items())
        parts["norms, rotations, activations"] = device * small
        return parts

    def _only_prompts(self, tokens: float) -> float:
        linear = self.layers.prompt_linear
        return self._device * sum(
            times * self.kernels.gemm(name.form, tokens, name.outputs, name.inputs) for name, times in linear.items()
        )

    def _sampled(self, tokens: float) -> float:
        head: Linear = self.layers.head
        passes = self.kernels.small(tokens, 2 * SAMPLER_PASSES * head.outputs)
        return self._device * (self.kernels.gemm(head.form, tokens, head.outputs, head.inputs) + passes)

    def _attention(self, reach: Reach) -> Attention:
        own, kernels, device = self.layers, self.kernels, self._device
        heads = [(shape, times) for shape, times in own.heads.items() if (shape.window or None) == reach.tokens]
        is_whole = reach.tokens is None
        latents = list(own.latents.items()) if is_whole else []
        modules = list(own.modules.items()) if is_whole else []

        def decode(count: float, context: float, queries: float) -> float:
            total = sum(times * kernels.decode(count, context, shape, queries) for shape, times in heads)
            for rank_heads, times in latents:
                total += times * kernels.latent_decode(count, context, rank_heads, own.kv_bytes, queries)
                total += times * kernels.timed("latent_bmm", (rank_heads,), queries * count)
            for module, times in modules:
                total += times * self._module("generation", module, queries * count, context)
            return device * total

        def prefill(tokens: float, pairs: float) -> float:
            total = 0.0
            for shape, times in heads:
                total += times * kernels.prefill(tokens, pairs, shape)
            for rank_heads, times in latents:
                total += times * kernels.latent_prefill(tokens, pairs, rank_heads)
            for module, times in modules:
                total += times * self._module("context", module, tokens)
            return device * total

        return Attention(decode, prefill)

    def _module(self, phase: str, module: Module, *place: float) -> float:
        own, sizes = self.layers, MODULES[module.kind]
        nearest = min(abs(size - own.hidden) for size in sizes.values())
        models = [name for name, size in sizes.items() if abs(size - own.hidden) == nearest]
        kvs = ("fp8", "bf16") if own.kv_bytes == 1 else ("bf16", "fp8")
        names = [
            tuple(f"{module.kind}_{phase}/{model}/{kv}/{form}" for model in models)
            for kv in kvs
            for form in module.forms
        ]
        return self.kernels.timed_first(names, (module.heads,), *place)

    def _states(self, phase: str, tokens: float) -> float:
        total = 0.0
        for state, times in self.layers.states.items():
            seconds = self.kernels.timed(f"delta_{phase}", (state.k_heads, state.v_heads), tokens)
            total += times * seconds * (1.0 if state.is_measured else state.elements / (state.v_heads * 128 * 128))
        return self._device * total

    # --- steps

    def share_of_parts(self) -> dict[str, float]:
        """Shares of a typical step's time, by part, the largest first."""
        count, context = TYPICAL
        parts = self.parts(count) | {
            "attention": sum(kind.decode(count, context, 1.0) for kind in self.attention),
            "states": self._states("generation", count),
            "head and sampler": self._sampled(count),
        }
        kernels = sum(parts.values())
        total = self.host.seconds(kernels, count)
        parts["host"] = total - kernels
        return {name: part / total for name, part in sorted(parts.items(), key=lambda item: -item[1]) if part > 0}

    @property
    def borrowed(self) -> tuple[str, ...]:
        """What stands for kernels of this model that were not measured."""
        context = TYPICAL[1]
        self.share_of_parts()
        self._only_prompts(context)
        self._states("context", context)
        for kind in self.attention:
            kind.prefill(context, context * context / 2)
        exchange = ("exchange of tokens as all-reduces",) if self.layers.exchange.times else ()
        return (*sorted(self.kernels.borrowed), *exchange)

    @property
    def text(self) -> str:
        count, context = TYPICAL
        largest = [f"{share:.0%} {name}" for name, share in list(self.share_of_parts().items())[:LARGEST]]
        borrowed = f"; borrowed: {'; '.join(self.borrowed)}" if self.borrowed else ""
        if self.layers.exchange.times:
            others = plural(self.layers.exchange.peers - 1, "rank")
            borrowed = f"; experts shared with {others} as busy as this one{borrowed}"
        return f"{self.kernels.text}{borrowed}; {count} sequences at {context:,} tokens: {', '.join(largest)}"

    def line(self, count: int, read: int) -> Line | None:
        if len(self.attention) != 1:
            return None
        return self._lines[count][bisect_left(CONTEXTS, read / count, 1, LAST) - 1]

    def _made(self, count: int) -> tuple[Line, ...]:
        added, least = self._scheduling[count]
        plain = self._plain[count]
        lines = self.attention[0].lines[count, 1.0]
        return tuple([Line(plain + line.base + added, line.slope, line.until, least) for line in lines])

    def seconds(self, work: StepWork) -> float:
        tokens = work.num_tokens
        if not tokens:
            return 0.0
        if work.prompt_tokens:
            return self._mixed(work)
        count = work.num_seqs
        line = self.line(count, work.read[0]) if count == tokens and work.read else None
        if line is not None:
            seconds = line.base + line.slope * work.read[0]
            return seconds if seconds >= line.least else line.least
        queries = tokens / count  # above one: drafts are verified
        if queries == 1.0 and work.num_samples == count:
            total = self._plain[tokens]
        else:
            total = self._tokens[tokens] + self._head[work.num_samples] + self._states("generation", tokens)
        for kind, read in zip(self.attention, work.read, strict=True):
            line = kind.line(count, read, queries)
            total += line.base + line.slope * read
        return self.host.seconds(total, count)

    def _mixed(self, work: StepWork) -> float:
        """A step with prompts: what they add to the step that decodes is longer than as measured alone."""
        prompt, decodes = work.prompt_tokens, work.num_seqs - work.num_prompts
        decoded = work.num_tokens - prompt
        queries = decoded / decodes if decodes else 1.0
        alone = self._tokens[decoded]
        added = self._tokens[work.num_tokens] - alone
        if self.layers.prompt_linear:
            added += self._prompts[prompt]
        if self.layers.states:
            added += self._states("context", prompt)
        total = alone + self._head[work.num_samples or 1]
        for kind, pairs, own in zip(self.attention, work.pairs, work.prompt_pairs, strict=True):
            added += kind.prefill(prompt, own)
            if decodes:
                read = int((pairs - own) / queries) if queries != 1 else pairs - own  # once for a sequence's drafts
                line = kind.line(decodes, read, queries)
                total += line.base + line.slope * read
        if decodes and self.layers.states:
            total += self._states("generation", decoded)
        on_top, least = self._scheduling[work.num_seqs]
        seconds = total + self.host.prompt * added + on_top
        return seconds if seconds >= least else least


def kernel_step(
    plan: Plan,
    reaches: tuple[Reach, ...],
    shares: Shares,
    factors: Mapping[str, float] | None = None,
    host: Host | None = None,
    narrow: bool | None = None,
) -> KernelStep:
    """The step time of a plan; factors: fitted to runs of one's own, on kernels, on links and on the host; narrow:
    whether experts in mxfp4 get inputs of 8 bits, where the server was told so.

    Raise UsageError for a GPU with unknown bandwidth or FLOP/s.
    """
    gpu = plan.request.gpu
    if gpu.memory_bandwidth is None or (gpu.bf16_flops or gpu.fp16_flops) is None:
        raise UsageError(
            f"--gpu {gpu.name}",
            "its bandwidth or FLOP/s are not known, so a step's time is not",
            "name a GPU of `kvplan gpus` or give --calibration",
        )
    if "stated" in plan.weight_groups:
        raise UsageError("simulate", "--weights-bytes does not say what a step reads", "name the checkpoint's config")
    own = host_of(plan) if host is None else host
    device, link, slow = ((factors or {}).get(name, 1.0) for name in ("device", "link", "host"))
    engine = plan.request.release.engine
    return _step(layers(plan, narrow), gpu, engine, shares, reaches, own.scaled(slow), device, link)


def draft_step(plan: Plan, reaches: tuple[Reach, ...], shares: Shares, modules: int) -> KernelStep:
    """The time of one pass of a plan's drafter, a module of several; before it the GPU waits as between two steps."""
    own = host_of(plan)
    pause = Host(gap=own.gap, gap_sequence=own.gap_sequence)
    request = plan.request
    return _step(draft_layers(plan, modules), request.gpu, request.release.engine, shares, reaches, pause, 1.0, 1.0)


@lru_cache(maxsize=64)  # tune asks for the same layers on the same GPU hundreds of times
def _step(
    own: Layers, gpu: GpuSpec, engine: str, shares: Shares, reaches: tuple[Reach, ...], host: Host, device: float,
    link: float,
) -> KernelStep:  # fmt: skip
    return KernelStep(own, Kernels(gpu, engine, shares), reaches, host, device, link)
