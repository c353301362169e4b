"""vLLM's encoder for images, videos and audio: its compute and cache budgets, and the batch it is profiled with."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.files import printable
from kvplan.core.records import dataclass
from kvplan.models.spec import ModelSpec
from kvplan.servers.plans import plan as plans
from kvplan.servers.plans.plan import Refusal, Request
from kvplan.servers.releases import Version
from kvplan.servers.vllm import activations, features, rules
from kvplan.servers.words.argument_values import processor_kwargs
from kvplan.servers.words.arguments import EngineArgs, Settings
from kvplan.servers.words.item_limits import limits_of
from kvplan.sizing.weights import cdiv

if TYPE_CHECKING:
    from kvplan.servers.vllm.items import Item


@dataclass(frozen=True, slots=True)
class EncoderBudget:
    """Results of vLLM's MultiModalBudget.

    compute, cache   tokens that the encoder may compute per step, and that the encoder cache keeps
    items            the largest item of each enabled modality
    per_prompt, per_batch  number of such items
    profiled         the modality whose items the profile run encodes
    """

    compute: int
    cache: int
    items: Mapping[str, "Item"]
    per_prompt: Mapping[str, int]
    per_batch: Mapping[str, int]
    profiled: str

    @property
    def tokens(self) -> int:
        return min(self.compute, self.cache)

    @property
    def item(self) -> "Item":
        return self.items[self.profiled]

    @property
    def batch(self) -> int:
        """Items that the profile run encodes at once."""
        return self.per_batch[self.profiled]


def kind_of(spec: ModelSpec) -> str:
    """The model_type that names the encoder."""
    return str(spec.config.get("model_type"))


@lru_cache(maxsize=4096)
def items_of(
    spec: ModelSpec, context: int, release: Version, limits: str | None, kwargs: str | None
) -> "Mapping[str, Item] | None":
    """Largest item of every modality that the model takes, or None if kvplan does not know its processor."""
    if spec.text_only or not spec.multimodal:
        return None
    from kvplan.servers.vllm.items import READERS, Processor  # not needed for a text-only model

    reader = READERS.get(kind_of(spec))
    if reader is None:
        return None
    items = reader(
        Processor(spec.config, context, release, limits_of(limits), processor_kwargs(kwargs), spec.processor)
    )
    empty = [name for name, item in items.items() if item.tokens < 1]
    if empty:
        raise UnsupportedModelError(
            spec.name, f"its config gives {' and '.join(empty)} no token", "use --language-model-only, or correct it"
        )
    return items


def budget_of(spec: ModelSpec, settings: Settings, args: EngineArgs, release: Version) -> EncoderBudget | None:
    """The encoder's budget, or None if no encoder runs or its items are not known.

    Source: vLLM 0.33 multimodal/encoder_budget.py (MultiModalBudget), v1/core/encoder_cache_manager.py
    (compute_mm_encoder_budget).
    """
    if not rules.takes_items(spec, args, release) or settings.first_engine or not release.has("v1"):
        return None
    context, tokens = settings.max_model_len, settings.max_num_batched_tokens
    every = items_of(spec, context, release, args.limit_mm_per_prompt, args.mm_processor_kwargs)
    if every is None:
        return None
    from kvplan.servers.vllm.items import MOST

    limits, most = limits_of(args.limit_mm_per_prompt), MOST.get(kind_of(spec), {})
    counts = {name: min(limits[name].count if name in limits else 999, most.get(name, 999)) for name in every}
    items = {name: item for name, item in every.items() if counts[name] > 0}
    if not items:
        return None
    largest = max(item.tokens for item in items.values())
    compute = cache = max(tokens, largest)
    seqs = settings.max_num_seqs
    per_prompt = {name: max(1, min(counts[name], context // item.tokens)) for name, item in items.items()}
    per_batch: dict[str, int] = {}
    for name, item in items.items():
        if not release.has("items_by_batch"):
            per_prompt[name] = counts[name]
            per_batch[name] = min(cdiv(compute, item.tokens), seqs * counts[name])
            continue
        requests = seqs if args.enable_chunked_prefill else min(seqs, tokens // item.tokens)
        per_batch[name] = max(1, min(compute // item.tokens, requests * per_prompt[name]))
    profiled = max(items, key=lambda name: (items[name].tokens, name))
    return EncoderBudget(compute, cache, items, per_prompt, per_batch, profiled)


def first_engine_seqs(spec: ModelSpec, settings: Settings, args: EngineArgs, release: Version) -> int:
    """Sequences of the first engine's profile run: as many as each have room for a prompt's items of all modalities.

    Source: vLLM 0.8.5 and 0.9.2 worker/model_runner.py (profile_run), multimodal/registry.py: one item each by default.
    """
    seqs, tokens = settings.max_num_seqs, settings.max_num_batched_tokens
    every = items_of(spec, settings.max_model_len, release, args.limit_mm_per_prompt, args.mm_processor_kwargs) or {}
    limits = limits_of(args.limit_mm_per_prompt)
    each_prompt = sum(item.tokens * (limits[name].count if name in limits else 1) for name, item in every.items())
    return max(1, min(seqs, tokens // each_prompt)) if each_prompt else seqs


def whole_items(spec: ModelSpec, args: EngineArgs, release: Version) -> bool:
    """True if an item must be computed in one step."""
    return args.disable_chunked_mm_input or rules.sees_ahead(spec, args, release)


def check_processor(spec: ModelSpec, settings: Settings, args: EngineArgs, release: Version) -> None:
    """Reject processor settings whose effect on the largest item is not known."""
    if not processor_kwargs(args.mm_processor_kwargs) or not rules.takes_items(spec, args, release):
        return
    known = budget_of(spec, settings, args, release) is not None
    unsized = unsized_kwargs(spec, args.mm_processor_kwargs, known=known)
    if unsized:
        raise UsageError(
            f"--mm-processor-kwargs: {printable(', '.join(unsized), 80)}",
            f"what it changes for {kind_of(spec)} on {release.label} is not modeled",
            "remove it, or take --language-model-only",
        )


def refusal(spec: ModelSpec, settings: Settings, args: EngineArgs, release: Version) -> Refusal | None:
    """Return a refusal if a step has no room for an item that may not be split: vLLM does not start then.

    Source: vLLM 0.33 v1/core/encoder_cache_manager.py (compute_mm_encoder_budget).
    """
    budget = budget_of(spec, settings, args, release)
    if budget is None or not whole_items(spec, args, release):
        return None
    tokens, most = budget.item.tokens, settings.max_num_batched_tokens
    if tokens <= most:
        return None
    text = f"the largest {budget.profiled} has {tokens:,} tokens, which must fit in one step of {most:,}"
    return Refusal("whole_item", text, "max_num_batched_tokens", (tokens,), 0)


def encoder_notes(spec: ModelSpec, settings: Settings, args: EngineArgs, release: Version) -> Iterator[str]:
    """Notes on items that can never be served, and on unknown properties of the encoder."""
    if not rules.takes_items(spec, args, release):
        if processor_kwargs(args.mm_processor_kwargs):
            yield "--mm-processor-kwargs: nothing is changed, as no image, video or sound is served"
        return
    budget = budget_of(spec, settings, args, release)
    if budget is None:
        yield f"the encoder's largest batch is not known for {kind_of(spec)} on {release.label}: its peak is a range"
        return
    context = settings.max_model_len
    for name, item in budget.items.items():
        if item.tokens > context:
            yield (
                f"the largest {name} takes {item.tokens:,} tokens, more than max_model_len {context:,}: it can never "
                "be served; smaller ones can"
            )


def items(request: Request, settings: Settings) -> features.Items:
    """The encoder's part in a plan. Reject what vLLM or this module does not take."""
    inputs = (request.spec, settings, request.args, request.release)
    check_processor(*inputs)
    own, budget = budget_of(*inputs), None
    if own is not None:
        sizes = {name: item.tokens for name, item in own.items.items()}
        batch = own.batch if activations.profiles_items(*inputs) else 0
        budget = plans.EncoderBudget(own.compute, own.cache, own.profiled, batch, sizes, dict(own.per_prompt))
    return features.Items(budget, refusal(*inputs), tuple(encoder_notes(*inputs)))


def unsized_kwargs(spec: ModelSpec, text: str | None, *, known: bool) -> list[str]:
    """Processor settings that may change the largest item in a way that is not known."""
    from kvplan.servers.vllm.items import SIZING

    sizing, kwargs = SIZING.get(kind_of(spec), ()), processor_kwargs(text)
    nested = [name for value in kwargs.values() if isinstance(value, Mapping) for name in value]
    names = {*(name for name in kwargs if not name.endswith("_kwargs")), *nested}
    return sorted(names - {*HARMLESS, *(sizing if known else ())})


# These select a video's frames or the pixel format: the largest item stays the same size.
HARMLESS: Final = (
    "fps", "num_frames", "max_frames", "min_frames", "do_sample_frames", "do_rescale", "do_normalize", "use_fast",
    "shortest_edge", "longest_edge", "truncation", "sampling_rate", "return_tensors", "padding",
)  # fmt: skip
