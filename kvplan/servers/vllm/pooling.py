"""Pooling: a decoder that embeds, ranks or classifies its prompts instead of generating text.

vLLM loads it without its output head, and with a scoring layer if it classifies; the KV cache does not change. Source:
vLLM 0.33 model_executor/models/adapters.py; the head is dropped in 0.8.5 to 0.33, as read in their wheels.
"""

from dataclasses import replace
from typing import Final

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.records import dataclass
from kvplan.models.families.blocks import column, row
from kvplan.models.families.config import Config
from kvplan.models.hf_config import text_of
from kvplan.models.spec import (
    FullAttention,
    LatentAttention,
    ModelSpec,
    Part,
    Place,
    RecurrentState,
    SlidingWindow,
    Weight,
)
from kvplan.servers.plans.plan import Request
from kvplan.servers.vllm.classes import class_of, type_of
from kvplan.servers.words.arguments import EngineArgs

CONVERTS: Final = ("embed", "classify")
CLASSIFYING: Final = ("ForSequenceClassification", "ForTokenClassification")
SCORE: Final = "score"


@dataclass(frozen=True, slots=True)
class Reward:
    """Layers of a class that scores every token, on every pipeline stage.

    labels  outputs of the last one
    hidden  another one before it, as wide as the model; both then have a bias
    whole   steps hold whole prompts, and no prefixes are cached (tok_pooling_type STEP)
    """

    labels: int
    hidden: bool
    whole: bool = False

    def weights(self, width: int) -> list[Weight]:
        last = row(SCORE, width, self.labels, "lm_head", bias=self.hidden)
        first = column(f"{SCORE}.0", width, width, "lm_head", bias=True)
        layers = [first, last] if self.hidden else [last]
        return [replace(layer, dtype="float32", quantizable=False, place=Place.EVERY) for layer in layers]


# Source: vLLM 0.33 model_executor/models/qwen2_rm.py and internlm2.py.
REWARDS: Final = {
    "InternLM2ForRewardModel": Reward(1, hidden=False),
    "Qwen2ForRewardModel": Reward(1, hidden=True),
    "Qwen2ForProcessRewardModel": Reward(2, hidden=True, whole=True),
}
# `--task` of releases before `--runner` -> its conversion; for other tasks the server decides.
TASKS: Final = {"embed": "embed", "embedding": "embed", "classify": "classify", "score": "classify"}
NOTE: Final = (
    "pooling: no output head is loaded; activations and CUDA graphs are those of generation, which needs more of both "
    "(compared with no pooling server)"
)


def converts(spec: ModelSpec, args: EngineArgs) -> str | None:
    """Conversion of the model, "embed" or "classify"; None: it generates."""
    if args.runner == "generate" or (args.runner == "auto" and args.convert == "none"):
        return None
    if args.convert in CONVERTS:
        return args.convert
    if spec.architecture.endswith(CLASSIFYING) or spec.architecture in REWARDS:
        return "classify"
    return "embed" if args.runner == "pooling" or is_bare(spec) else None


def is_bare(spec: ModelSpec) -> bool:
    """True if a config names the model without a head, so that vLLM treats it as an embedding model (Qwen3Model)."""
    name = spec.architecture
    return name.endswith("Model") and not name.endswith(("HeadModel", "ChatModel")) and not class_of(spec).generates


def num_labels(spec: ModelSpec) -> int:
    """Rows of a classifier: its config's labels, or those made of a generator's tokens ("no" and "yes" become one).

    Source: adapters.py (SequenceClassificationConfig), models/config.py (Qwen3ForSequenceClassificationConfig).
    """
    from kvplan.models.families.encoders import labels  # only classifiers need it

    config = Config(spec.config, spec.source)
    if config.flag("is_original_qwen3_reranker") or spec.config.get("method") == "from_2_way_softmax":
        return 1
    tokens = spec.config.get("classifier_from_token")
    return len(tokens) if isinstance(tokens, list) and "method" in spec.config else labels(config)


def dtype_of(spec: ModelSpec) -> str:
    """Dtype of a pooling server: float16 for a float32 checkpoint, unless its class rejects that.

    Source: vLLM 0.33 config/model.py (_resolve_auto_dtype).
    """
    levels = (spec.config, text_of(spec.config))
    stated = next((level[key] for level in levels for key in ("dtype", "torch_dtype") if level.get(key)), "")
    is_wide = str(stated).removeprefix("torch.") in ("float32", "float")
    return "float16" if is_wide and not type_of(spec).no_float16 else spec.dtype


def pooled(request: Request) -> tuple[Request, list[str]]:
    """The request with the model as a pooling server loads it, and a note; unchanged if it generates."""
    spec = request.spec
    if spec.is_encoder:
        return request, []
    convert = converts(spec, request.args)
    if convert is None or any(weight.name == SCORE for weight in spec.other_weights):
        return request, []
    if request.draft is not None or request.args.speculative_method is not None:
        raise UsageError("--runner pooling", "generates no tokens, so there is nothing to draft", "remove the draft")
    kinds = {type(cache) for layer in spec.layers for cache in layer}
    if not kinds <= {FullAttention, SlidingWindow, LatentAttention, RecurrentState} or kinds == {RecurrentState}:
        raise UnsupportedModelError(
            "--runner pooling", f"is modeled for attention over keys and values, not for {spec.name}", "remove it"
        )
    if spec.quantization is not None and spec.quantization.method == "mxfp4":
        raise UnsupportedModelError(
            "--runner pooling",
            f"is refused by vLLM for {spec.name}: it pools in float16, which mxfp4 lacks",
            "remove it",
        )
    spec = replace(spec, dtype=dtype_of(spec))
    keeps = class_of(spec).keeps_head
    weights = [weight for weight in spec.other_weights if weight.group != "lm_head" or keeps]
    reward, args = REWARDS.get(spec.architecture), request.args
    if reward is not None and reward.hidden and spec.quantization is not None:
        raise UnsupportedModelError(spec.name, "how its score is quantized is not modeled", "name the unquantized one")
    if reward is not None:
        weights += reward.weights(spec.hidden_size)
    elif convert == "classify":
        made = "classifier_from_token" in spec.config or "method" in spec.config  # of the head's rows, while loading
        labels = (Part(num_labels(spec)),)
        score = Weight(SCORE, "lm_head", spec.hidden_size, labels, dtype="float32", place=Place.EVERY)
        weights.append(replace(score, quantizable=not (made or keeps)))
    if reward is not None and reward.whole:
        args = replace(args, enable_chunked_prefill=False, enable_prefix_caching=bool(args.enable_prefix_caching))
    args = replace(args, async_scheduling=bool(args.async_scheduling))  # off unless asked for (config/vllm.py)
    return replace(request, args=args, spec=replace(spec, other_weights=tuple(weights))), [NOTE]
