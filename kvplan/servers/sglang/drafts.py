"""Drafts under SGLang: how an algorithm and its numbers are resolved, and the bytes per token added to its pool.

SGLang sizes one pool for the target and its draft; for EAGLE it counts each draft layer as a target layer.
Source: sglang 0.5.23 srt/arg_groups/speculative_hook.py, srt/model_executor/pool_configurator.py and
model_runner_components/spec_aux_hidden_state.py. Equal to SGLang's own code in every compared case
(tests/facts/speculation_sglang.jsonl).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.records import dataclass
from kvplan.models.families import mtp
from kvplan.models.families.eagle import EAGLES, PARALLEL, architecture_of
from kvplan.models.spec import ModelSpec, SlidingWindow
from kvplan.servers.plans.plan import Request
from kvplan.servers.plans.pool import KVSpec
from kvplan.servers.plans.speculation import check_assistant, method_of
from kvplan.servers.plans.speculation import drafter as usual_drafter
from kvplan.servers.releases import Version
from kvplan.servers.sglang import models as sglang_models
from kvplan.servers.sglang.classes import CLASSES, NO_CLASS, class_of, outer_of, type_of
from kvplan.servers.words.arguments import HEADS, NO_DRAFT, EngineArgs

REQUESTS: Final = 48  # default of max_running_requests with speculative decoding
_, BRANCHES, BRANCHED_TOKENS = CLASSES["LlamaForCausalLM"].draft_numbers  # no other class branches by default
NGRAM_TOKENS, BLOCK_TOKENS = 12, 16  # verified tokens, for n-grams and for DFlash heads whose config names no block
SPARK_TOKENS: Final = 7  # tokens that a DSpark head drafts if its config names no block
ALGORITHMS: Final[Mapping[str, str]] = {
    "EAGLE": "eagle", "NEXTN": "eagle", "EAGLE3": "eagle3", "STANDALONE": "draft_model", "NGRAM": "ngram",
    "DFLASH": "dflash", "DSPARK": "dspark", "FROZEN_KV_MTP": "eagle",
}  # fmt: skip
NAMES: Final = {
    "mtp": "EAGLE", "eagle": "EAGLE", "eagle3": "EAGLE3", "draft_model": "STANDALONE", "ngram": "NGRAM",
    "dflash": "DFLASH", "dspark": "DSPARK",
}  # fmt: skip
# Architectures of heads that vLLM loads and that were not compared here, or that SGLang has no class for.
UNCOMPARED: Final = frozenset({*EAGLES, *PARALLEL}) - {"LlamaForCausalLM", "EagleLlamaForCausalLM"}
MODELED: Final = (*ALGORITHMS.values(), "mtp")


def speculates(args: EngineArgs) -> bool:
    return args.speculative_method is not None


def requests_at_most(args: EngineArgs, spec: ModelSpec | None = None) -> int | None:
    """max_running_requests before the pool is known; None: unbounded."""
    usual = None if spec is None else class_of(spec).requests or None
    most = args.max_num_seqs or (REQUESTS if speculates(args) else usual)
    if most is None or not args.enable_dp_attention:
        return most
    return max(1, most // args.data_parallel_size)  # of one rank


def check_dp_attention(args: EngineArgs) -> None:
    """Reject drafts under DP attention, except a model's own head."""
    if args.speculative_method != "mtp":
        name = NAMES.get(args.speculative_method or "", "these")
        raise UsageError("--enable-dp-attention", f"is not modeled with {name} drafts", "use only one")


def dp_attention_notes(spec: ModelSpec, args: EngineArgs) -> Iterator[str]:
    """Note that a head's weights under DP attention are derived, not compared."""
    method = spec.quantization.method if spec.quantization is not None else None
    if args.enable_dp_attention and method not in outer_of(spec).dp_heads:
        yield (
            "the draft's weights under DP attention are counted as the model's own layers are split; they were not "
            "compared with SGLang's class"
        )


def drafter(request: Request) -> tuple[Request, list[str]]:
    """Return the request with the draft that is loaded; numbers not given take SGLang's defaults."""
    args, draft, method = request.args, request.draft, request.args.speculative_method
    if (draft is not None and draft.head) or (method is None and draft is None):
        return request, []
    if method is None and draft is not None:
        method = method_of(draft)
    if method not in MODELED:
        raise UsageError(f"--speculative-method {method}", "is not modeled for SGLang", f"use {', '.join(MODELED)}")
    if method in ("mtp", "eagle") and draft is None and not type_of(request.spec).own_head:
        raise UnsupportedModelError(request.spec.name, "its head is not compared with SGLang's own code", "use vllm")
    if draft is not None and method in HEADS and architecture_of(draft.config) in UNCOMPARED:
        raise UnsupportedModelError(draft.name, "its head is not compared with SGLang's own code", "use vllm")
    check_stages(args, method)
    if not request.release.has("drafts"):
        raise UnsupportedModelError(f"drafts in {request.release.label}", "are not modeled", "use sglang@0.5")
    if draft is not None and mtp.is_assistant(draft) and method in ("mtp", "eagle"):
        method = "eagle"  # SGLang's FROZEN_KV_MTP
        check_assistant(request)
    args = numbers(replace(args, speculative_method=method), request)
    request = replace(request, args=args)
    if method == "eagle" and draft is not None and mtp.num_layers(draft) and method_of(draft) != "eagle":
        return replace(request, draft=mtp.mtp_head(draft)), []
    return usual_drafter(request, "SGLang")


def check_stages(args: EngineArgs, method: str | None) -> None:
    """Reject drafts with pipeline stages that SGLang does not start.

    Source: sglang 0.5.23 srt/arg_groups/validation_hook.py (check_pipeline_parallel_compat).
    """
    stages, on_prefill = args.pipeline_parallel_size, args.disaggregation_mode == "prefill"
    if stages > 1 and not (on_prefill and method in ("mtp", "eagle", "dspark")):
        problem = "SGLang drafts over pipeline stages with EAGLE or DSpark on a prefill server alone"
        raise UsageError(f"pipeline_parallel_size {stages}", problem, "use --tp, or remove the drafts")


def numbers(args: EngineArgs, request: Request) -> EngineArgs:
    """Set steps and verified tokens: as requested, else SGLang's own choice for the architecture."""
    method, steps = args.speculative_method, args.num_speculative_tokens
    width, verified = args.speculative_eagle_topk, args.speculative_num_draft_tokens
    if method in NO_DRAFT:
        verified = verified or NGRAM_TOKENS
        return replace(args, num_speculative_tokens=steps or verified - 1, speculative_num_draft_tokens=verified)
    if method in BLOCKS:
        return replace(
            args, num_speculative_tokens=1, speculative_eagle_topk=1,
            speculative_num_draft_tokens=block_tokens(args, request, method),
        )  # fmt: skip
    if not steps and (width or verified):
        flag = "--speculative-num-draft-tokens" if verified else "--speculative-eagle-topk"
        raise UsageError(flag, "SGLang requires --speculative-num-steps with it", "add it, or remove the numbers")
    if not steps:  # the width stays unset: SGLang's later choice does not affect which backend it picks
        row = NO_CLASS if method == "draft_model" else class_of(request.spec)
        steps, _, verified = row.draft_numbers
        return replace(args, num_speculative_tokens=steps, speculative_num_draft_tokens=verified)
    width = width or 1
    if width == 1 or not verified:
        verified = steps + 1
    return replace(
        args, num_speculative_tokens=steps, speculative_eagle_topk=width, speculative_num_draft_tokens=verified
    )


BLOCKS: Final = ("dflash", "dspark")  # draft a block in one step


def block_tokens(args: EngineArgs, request: Request, method: str) -> int:
    """Verified tokens of a head that drafts a block: the block, and with DSpark one more."""
    if args.speculative_num_draft_tokens:
        return args.speculative_num_draft_tokens
    config = request.draft.config.get("block_size") if request.draft is not None else None
    block = config if isinstance(config, int) and config > 0 else None
    if method == "dflash":
        return block or BLOCK_TOKENS
    return (args.num_speculative_tokens or block or SPARK_TOKENS) + 1


def branches(args: EngineArgs) -> int:
    """Branches of each drafting step; by default derived from the number of verified tokens."""
    if args.speculative_eagle_topk is not None or not speculates(args):
        return args.speculative_eagle_topk or 1
    return BRANCHES if args.speculative_num_draft_tokens == BRANCHED_TOKENS else 1


TREES: Final = ("flashinfer", "fa3", "triton")  # backends whose pages of several tokens hold branches


def check_branches(spec: ModelSpec, sm: int, args: EngineArgs, release: Version) -> None:
    """Reject drafts that branch with attention backends and pages that cannot hold branches.

    Source: sglang 0.5.23 srt/arg_groups/speculative_hook.py (_handle_eagle_family, _handle_ngram).
    """
    lookup = args.speculative_method in NO_DRAFT
    if not release.has("drafts") or not (lookup or branches(args) > 1):
        return
    prefill, decode = sglang_models.backends(spec, sm, args, release)
    if "trtllm_mha" in (prefill, decode) and not lookup:
        raise UsageError(
            f"--speculative-eagle-topk {branches(args)}", "SGLang's backend trtllm_mha does not branch", "use 1"
        )
    page = sglang_models.page_size(spec, sm, args, release)
    backend = decode if prefill == decode else sglang_models.default_backend(spec, sm, args, release)
    if lookup and backend is None and (spec.is_mla or sglang_models.is_hopper(sm)):
        backend = "the default backend"
    if page > 1 and backend is not None and backend not in (TREES[:1] if lookup else TREES):
        raise UsageError(
            f"--page-size {page}", f"drafts branch, which SGLang's pages do not hold with {backend}", "use 1"
        )


def check_context(request: Request) -> None:
    """Reject a --context-length beyond that of the draft's config, as SGLang does."""
    draft, context = request.draft, request.args.max_model_len
    if draft is None or not isinstance(context, int) or context <= draft.max_model_len:
        return
    raise UsageError(
        f"--ctx {context:,}",
        f"the draft {draft.name} was made for {draft.max_model_len:,} tokens, and SGLang refuses more",
        f"use --ctx {draft.max_model_len}",
    )


def outlasts_draft(request: Request, context: int) -> bool:
    """True if the default context is beyond that of the draft's config, to which SGLang passes it."""
    draft = request.draft
    return draft is not None and not isinstance(request.args.max_model_len, int) and context > draft.max_model_len


def context_notes(request: Request, context: int) -> Iterator[str]:
    """Source: sglang 0.5.23 speculative/eagle_worker_v2.py, configs/model_config.py (_derive_context_length)."""
    if request.draft is None or not outlasts_draft(request, context):
        return
    longest = request.draft.max_model_len
    yield (
        f"the draft {request.draft.name} was made for {longest:,} tokens: SGLang starts at {context:,} only with "
        f"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 in its environment; --ctx {longest} needs no variable"
    )


@dataclass(frozen=True, slots=True)
class Drafted:
    """Additions of drafts to a pool.

    full, windows  bytes per token counted with the full-attention layers, and with sliding-window layers
    verified       draft tokens verified per step; each keeps a copy of a request's states
    requests       most requests with such copies
    """

    full: int = 0
    windows: int = 0
    verified: int = 0
    requests: int = 0


NO_DRAFTS: Final = Drafted()


def is_counted(spec: ModelSpec, args: EngineArgs) -> bool:
    """True if the model's own head is in the budget when no draft is named: by its class, or by its config."""
    text = mtp.text_values(spec)
    return args.speculative_method != "mtp" or class_of(spec).own_head or "num_nextn_predict_layers" in text


def drafted(
    spec: ModelSpec, draft: ModelSpec | None, args: EngineArgs, full: Sequence[KVSpec], windows: Sequence[KVSpec],
    draft_bytes: int, page: int,
) -> Drafted:  # fmt: skip
    """Bytes per token that SGLang counts for a draft.

    full, windows  the target's layers in either pool
    draft_bytes    bytes per token of the draft's own layers
    """
    verified, requests = args.speculative_num_draft_tokens or 0, requests_at_most(args) or 0
    if draft is None or not is_counted(spec, args):
        return Drafted(verified=verified, requests=requests)
    if args.speculative_method in ("dflash", "dspark"):
        return Drafted(draft_bytes, 0, verified, requests)
    own = draft.head == "mtp" and not mtp.is_assistant(draft)
    layers = mtp.num_layers(spec) if own else draft.num_layers
    if windows:
        kinds = [isinstance(caches[0], SlidingWindow) for caches in draft.layers if caches]
        narrow = layers if own else sum(kinds) if not draft.head else 0
        return Drafted(
            (layers - narrow) * (full[0].page // page), narrow * (windows[0].page // page), verified, requests
        )
    index = [each.page // page for each in full if each.shape[:1] == ("indexer",)]
    ratios = [each.page // page for each in full if each.shape[:1] != ("indexer",)]
    more = int(sum(ratios) * layers / len(ratios)) + (layers * index[0] if index else 0)
    return Drafted(more, 0, verified, requests)


def draft_note(draft: ModelSpec, counted: int, real: int) -> str | None:
    """Note how much more the draft's own pool takes than SGLang counts for it."""
    if real == counted:
        return None
    return (
        f"SGLang reserves {counted:,} B of KV per token for the draft's layers, which need {real:,} B: the difference "
        f"{'comes out of the memory it reserves for activations' if real > counted else 'stays unused'}"
    )
