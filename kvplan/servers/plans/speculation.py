"""Speculative decoding: which method drafts, with which model or head, and how many tokens at once.

The request (a method, a draft, a number) is resolved to the draft that runs with the model: an independent model, a
head of its own checkpoint (EAGLE, EAGLE-3, DFlash, DSpark), the model's own multi-token prediction layers, or none.
Source: vLLM 0.33 config/speculative.py.
"""

from dataclasses import replace
from typing import Final

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.files import printable
from kvplan.models.spec import ModelSpec
from kvplan.servers.plans.plan import Request
from kvplan.servers.words.arguments import HEADS, METHODS, NO_DRAFT

DRAFT_TOKENS: Final = 5  # default number of draft tokens; a common choice
SUFFIX_TOKENS: Final = 24  # vLLM 0.33 suffix_decoding_max_tree_depth


def drafter(request: Request, server: str) -> tuple[Request, list[str]]:
    """Return the request with the draft that is actually loaded, and notes on what was decided for the user.

    server  its name, for messages
    Raise UsageError for contradictory settings, UnsupportedModelError for a head that is not modeled.
    """
    args, draft = request.args, request.draft
    method = args.speculative_method
    if draft is not None and draft.head:  # already resolved
        return request, []
    if method is None and draft is None:
        return request, []
    if method is None:
        assert draft is not None
        method = method_of(draft)
    if method not in METHODS:
        problem = f"is not one that is modeled ({', '.join(METHODS)})"
        raise UsageError(f"speculative method {printable(method, 40)!r}", problem, "remove it")
    if method in NO_DRAFT and draft is not None:
        raise UsageError(f"speculative method {method}", f"drafts without a model ({draft.name})", "use only one")
    if draft is None and method == "dspark" and brings_spark(request.spec):
        draft = spark_of(request.spec)
    elif draft is None and method in (*HEADS, "draft_model"):
        raise UsageError(f"speculative method {method}", "needs a draft", "name one with --draft-model")
    notes: list[str] = []
    if method == "mtp":
        draft = mtp_of(request)
    elif draft is not None and method != "draft_model" and not draft.head:
        draft = head_of(draft, method, request.spec)
    tokens = args.num_speculative_tokens or default_tokens(method, replace(request, draft=draft))
    if not args.num_speculative_tokens and method not in ("mtp", "suffix"):
        notes.append(f"no --num-speculative-tokens: {tokens} are assumed; {server} requires a number")
    check(request, draft, method, tokens)
    named = args.speculative_method is not None or method != "draft_model"
    args = replace(args, speculative_method=method if named else None, num_speculative_tokens=tokens)
    return replace(request, args=args, draft=draft), notes


def method_of(draft: ModelSpec) -> str:
    from kvplan.models.families import eagle

    return eagle.method_of(draft)


def mtp_of(request: Request) -> ModelSpec:
    """The model's own MTP head, or that of the checkpoint named instead."""
    from kvplan.models.families import mtp

    return mtp.mtp_head(request.draft or request.spec)


def brings_spark(spec: ModelSpec) -> bool:
    """True if the model's own checkpoint has a DSpark head."""
    if not spec.is_compressed_mla:  # other models do not need the import
        return False
    from kvplan.models.families import spark

    return spark.has_spark(spec)


def spark_of(spec: ModelSpec) -> ModelSpec:
    from kvplan.models.families import spark

    return spark.spark_head(spec)


def head_of(draft: ModelSpec, method: str, target: ModelSpec) -> ModelSpec:
    from kvplan.models.families import eagle

    return eagle.head_of(draft, method, target)


def default_tokens(method: str, request: Request) -> int:
    """Default number of draft tokens: a head's number of layers or its block."""
    if method == "mtp":
        from kvplan.models.families import mtp

        return mtp.num_layers(request.draft or request.spec)
    if method == "suffix":
        return SUFFIX_TOKENS
    if method == "dspark" and request.draft is not None:
        config = request.draft.config
        block = config.get("block_size") or config.get("text_config", config).get("dspark_block_size")
        if isinstance(block, int) and block > 0:
            return block
    return DRAFT_TOKENS


def check(request: Request, draft: ModelSpec | None, method: str, tokens: int) -> None:
    """Reject what a server rejects at start-up."""
    args, spec = request.args, request.spec
    if method == "mtp":
        from kvplan.models.families import mtp

        check_assistant(request)
        steps = mtp.num_layers(request.draft or spec)
        if tokens > steps and tokens % steps:
            problem = f"is not a multiple of the {steps} layers of multi-token prediction of {spec.name}"
            raise UsageError(f"num_speculative_tokens {tokens}", problem, "use one of them")
    if method == "draft_model" and draft is not None and draft.vocab_size != spec.vocab_size:
        raise UsageError(
            f"--draft-model {draft.name}",
            f"has a vocabulary of {draft.vocab_size:,} tokens, and {spec.name} one of {spec.vocab_size:,}",
            "name a draft of the same family",
        )
    if draft is not None and args.pipeline_parallel_size > 1:
        check_stages(request, draft, method)
    if draft is not None and draft.has_states and draft is not spec:
        raise UnsupportedModelError(draft.name, "a draft with recurrent states is not modeled")


def check_assistant(request: Request) -> None:
    """Reject Gemma 4's heads with other models, and in releases that do not support them."""
    from kvplan.models.families import mtp

    draft, spec = request.draft, request.spec
    if draft is None or not mtp.is_assistant(draft):
        return
    width = draft.config.get("backbone_hidden_size")
    if spec.model_type != "gemma4_text" or width != spec.hidden_size:
        problem = f"was made for a Gemma 4 of width {width}, and {spec.name} has {spec.hidden_size}"
        raise UsageError(f"--draft-model {draft.name}", problem, "name that of the model")
    if not (request.release.has("gemma_assistants") or request.release.has("drafts_of_gemma")):
        label = request.release.label
        raise UnsupportedModelError(
            f"--draft-model {draft.name}", f"is not modeled in {label}", "use vllm@0.21 or sglang@0.5.23"
        )


# Model types whose own head was compared on the last of several stages, and those whose class also builds the embedding
# there for a head that shares it (vLLM 0.33 models/llama.py and qwen2.py: spec_decode_needs_target_embed).
STAGED_HEADS: Final = (
    "deepseek_v3", "deepseek_v4", "gemma4_text", "glm4_moe", "glm_moe_dsa", "glm5_next_text", "nemotron_h",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
)  # fmt: skip
EMBEDDED_TWICE: Final = ("gpt_oss", "llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_5_text")


def check_stages(request: Request, draft: ModelSpec, method: str) -> None:
    """Reject drafts with pipeline stages that vLLM does not start, and those that were not compared."""
    flag, kind = f"pipeline_parallel_size {request.args.pipeline_parallel_size}", request.spec.model_type
    if not request.release.has("staged_drafts"):
        problem = f"drafts with pipeline parallelism are not modeled in {request.release.label}"
        raise UsageError("--draft-model", problem, "use --tp, or remove the drafts")
    if method == "eagle":
        raise UsageError(flag, "vLLM does not start with an EAGLE head: two layers have one name", "use --tp")
    if method == "draft_model":
        problem = f"vLLM cuts an independent draft ({draft.name}) at the stages, too, which is not modeled"
        raise UnsupportedModelError(flag, problem, "use --tp, or a head of the model's own")
    if method == "mtp" and kind not in STAGED_HEADS:
        problem = f"{draft.name} is not modeled with pipeline parallelism"
        raise UnsupportedModelError(flag, problem, "use --tp, or remove the drafts")
    if method in HEADS and kind not in EMBEDDED_TWICE:
        problem = f"vLLM's class of {kind} keeps no embedding for {draft.name} on its last stage, or is not compared"
        raise UnsupportedModelError(flag, problem, "use --tp, or remove the drafts")
