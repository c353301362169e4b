"""The peak of a multimodal model's encoder in vLLM's profile run, and what of it lives beside the language model."""

from dataclasses import replace
from functools import lru_cache

from kvplan.core.units import GIB
from kvplan.models.spec import ModelSpec, Weight
from kvplan.servers.plans.plan import Estimate
from kvplan.servers.releases import Version
from kvplan.servers.vllm import encoder
from kvplan.servers.vllm.overheads import EVIDENCE, element_bytes
from kvplan.servers.words.arguments import EngineArgs, Settings
from kvplan.sizing.weights import cdiv, local_shape

# Encoder outputs of a full batch of items, and a copy: +0.05 to 0.28 GiB over text models in vLLM 0.19 logs (Gemma 3,
# MiMo-VL, Kimi-VL, Mistral 3, granite-vision: 1 thread, 6 models; 2 x tokens x hidden x 2 B gives 0.06-0.16).
ENCODER_COPIES = 2
# A tower's own peak was up to 2.4 GiB above that in logs of 0.8-0.10 (Gemma 3, llava, Qwen2-VL); video or very large
# images took up to 13 GiB more, which no range here covers.
ENCODER_HIGH = 5 * GIB // 2


def with_encoder(
    own: Estimate,
    spec: ModelSpec,
    settings: Settings,
    args: EngineArgs,
    release: Version,
    experts: tuple[int, int, int],
) -> Estimate:
    """Add the encoder's peak: its largest batch runs first, and its outputs stay live while the language model runs.
    So do its inputs in runner V1, whose profile run has them in a variable, and with padded outputs those before.

    experts  bytes of the experts' workspace, counted as buffers: they are allocated after the encoder has run, so its
    peak can reuse their space

    Source: vLLM 0.33 v1/worker/gpu_model_runner.py and v1/worker/gpu/model_runner.py (profile_run).
    """
    element = element_bytes(settings)
    batch = encoder.budget_of(spec, settings, args, release)
    if batch is None:
        outputs = ENCODER_COPIES * element * max(settings.max_num_batched_tokens, spec.item_tokens) * spec.hidden_size
        return Estimate(
            own.low, own.likely + outputs, own.high + outputs + ENCODER_HIGH,
            f"{own.formula} + encoder outputs {outputs:,} B", own.source, own.kind,
        )  # fmt: skip
    own_tokens = tokens = batch.item.made or batch.item.tokens
    if release.has("padded_items") and not release.has("items_as_they_are"):
        tokens = batch.item.tokens if release.has("padded_to_item") else batch.tokens
    width = batch.item.width or spec.hidden_size
    outputs = element * batch.batch * tokens * width
    patches = batch.batch * batch.item.patches
    beside = outputs
    if not settings.first_engine and not settings.runner_v2:
        beside += element * patches * pixels_of(spec, batch.profiled)
        if own_tokens < tokens:
            beside += element * batch.batch * own_tokens * width
    whole = args.mm_encoder_tp_mode == "data" and by_data(spec, batch.profiled)
    if whole and args.tensor_parallel_size > 1:
        patches = batch.item.patches * cdiv(batch.batch, args.tensor_parallel_size)
    per_patch = tower_elements(spec, batch.profiled, 1 if whole else args.tensor_parallel_size)
    tower = element * patches * per_patch
    low, likely, high = (
        outputs + int(tower * factor) - room for factor, room in zip(TOWER_RANGE, experts, strict=True)
    )
    items_text = f"{batch.batch:,} {batch.profiled} items of {batch.item.tokens:,} tokens"
    if likely >= own.likely + beside:
        formula = (
            f"encoder of {items_text}: {patches:,} patches x {per_patch:,} elements x {element} B x {TOWER_RANGE[1]} + "
            f"outputs {outputs:,} B{f' - {experts[1]:,} B of the experts, not there yet' if experts[1] else ''}"
        )
        own = replace(own, formula=formula, source=TOWER_SOURCE, kind="formula")
    else:
        inputs = f" and {beside - outputs:,} B that are kept" if beside > outputs else ""
        own = replace(own, formula=f"{own.formula} + encoder outputs {outputs:,} B{inputs} of {items_text}")
    return replace(
        own, low=max(own.low + beside, low), likely=max(own.likely + beside, likely), high=max(own.high + beside, high)
    )


def by_data(spec: ModelSpec, name: str) -> bool:
    return any(weight.whole_by_data for weight in spec.other_weights if name in weight.serves)


# Live per patch in a tower's layer: its pixels, the residual, its normalized copy, the widest projection and the
# activation's output.
TOWER_RANGE = (0.8, 1.0, 1.5)
TOWER_SOURCE = f"vLLM 0.33 profile run; {EVIDENCE}encoder"


@lru_cache(maxsize=1024)
def tower_elements(spec: ModelSpec, name: str, tp: int) -> int:
    """Peak elements per patch on a rank in a layer of a modality's tower."""
    hidden = widest = inner = 0
    for weight in spec.other_weights:
        if name not in weight.serves or is_patching(weight):
            continue
        columns, rows = local_shape(weight, tp)
        if ".layers." in weight.name and weight.inputs > 1:
            if weight.name.endswith(NARROWING):
                inner = max(inner, columns)
            else:
                hidden, widest = max(hidden, weight.inputs), max(widest, sum(rows))
    return pixels_of(spec, name) + 2 * hidden + widest + inner


def is_patching(weight: Weight) -> bool:
    return "patch" in weight.name and weight.inputs > 1


def pixels_of(spec: ModelSpec, name: str) -> int:
    """Elements of a patch before its tower."""
    return next((weight.inputs for weight in spec.other_weights if name in weight.serves and is_patching(weight)), 0)


NARROWING = ("down", "down_proj", "fc2", "ffw_layer_2")  # a layer's last matrix, whose inputs have the inner width
