"""Drafts under SGLang: what an algorithm and its numbers ask for, and the bytes a token they add to its pool.

SGLang sizes one pool for the target and its draft; for EAGLE's it counts each draft layer as one of the target's.
Source: sglang 0.5.23 srt/arg_groups/speculative_hook.py, srt/model_executor/pool_configurator.py and
model_runner_components/spec_aux_hidden_state.py. Equal to SGLang's own code on every case compared
(tests/facts/speculation_sglang.jsonl).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.records import dataclass
from kvplan.models.families import mtp
from kvplan.models.spec import ModelSpec, SlidingWindow
from kvplan.servers.arguments import EngineArgs
from kvplan.servers.methods import NO_DRAFT
from kvplan.servers.plans import Request
from kvplan.servers.speculation import drafter as usual_drafter
from kvplan.servers.speculation import method_of
from kvplan.servers.vllm.pages import KVSpec

REQUESTS: Final = 48  # max_running_requests where drafts are made and none is asked for
STEPS, LLAMA_STEPS = (3, 1, 4), (5, 4, 8)  # steps, branches and tokens verified where none are asked for
NGRAM_TOKENS, BLOCK_TOKENS = 12, 16  # verified, of n-grams and of DFlash heads whose config names no block
# Architectures whose own head is loaded, and counted, where no draft is named.
BUNDLED: Final = (
    "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV4ForCausalLM", "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM",
)  # fmt: skip
ALGORITHMS: Final[Mapping[str, str]] = {
    "EAGLE": "eagle", "NEXTN": "eagle", "EAGLE3": "eagle3", "STANDALONE": "draft_model", "NGRAM": "ngram",
    "DFLASH": "dflash",
}  # fmt: skip
NAMES: Final = {
    "mtp": "EAGLE", "eagle": "EAGLE", "eagle3": "EAGLE3", "draft_model": "STANDALONE", "ngram": "NGRAM",
    "dflash": "DFLASH",
}  # fmt: skip
MODELED: Final = (*ALGORITHMS.values(), "mtp")


def speculates(args: EngineArgs) -> bool:
    return args.speculative_method is not None


def requests_at_most(args: EngineArgs) -> int | None:
    """max_running_requests before the pool is known; None: nothing bounds it."""
    if args.max_num_seqs is not None:  # of DP attention each rank has its share
        return args.max_num_seqs // (args.data_parallel_size if args.enable_dp_attention else 1)
    return REQUESTS if speculates(args) else None


def drafter(request: Request) -> tuple[Request, list[str]]:
    """The request with the draft that stands beside the model; the numbers that SGLang takes where none are given."""
    args, draft, method = request.args, request.draft, request.args.speculative_method
    if (draft is not None and draft.head) or (method is None and draft is None):
        return request, []
    if method is None and draft is not None:
        method = method_of(draft)
    if method not in MODELED:
        raise UsageError(f"--speculative-method {method}", "is not modeled for SGLang", f"use {', '.join(MODELED)}")
    if not request.release.has("drafts"):
        raise UnsupportedModelError(f"drafts in {request.release.label}", "are not modeled", "use sglang@0.5")
    if args.pipeline_parallel_size > 1:
        raise UsageError("drafts with pipeline parallelism", "SGLang refuses them", "use --tp")
    args = numbers(replace(args, speculative_method=method), request)
    request = replace(request, args=args)
    if method == "eagle" and draft is not None and mtp.num_layers(draft) and method_of(draft) != "eagle":
        return replace(request, draft=mtp.mtp_head(draft)), []
    return usual_drafter(request, "SGLang")


def numbers(args: EngineArgs, request: Request) -> EngineArgs:
    """Steps, and tokens that are verified at once: as asked, else SGLang's own choice for the architecture."""
    method, steps = args.speculative_method, args.num_speculative_tokens
    width, verified = args.speculative_eagle_topk, args.speculative_num_draft_tokens
    if method in NO_DRAFT:
        verified = verified or NGRAM_TOKENS
        return replace(args, num_speculative_tokens=steps or verified - 1, speculative_num_draft_tokens=verified)
    if method == "dflash":
        block = request.draft.config.get("block_size") if request.draft is not None else None
        verified = verified or (block if isinstance(block, int) and block > 0 else BLOCK_TOKENS)
        return replace(args, num_speculative_tokens=1, speculative_eagle_topk=1, speculative_num_draft_tokens=verified)
    if not steps:  # the width stays unsaid: what SGLang chooses later does not count when it picks a backend
        llama = method != "draft_model" and request.spec.architecture == "LlamaForCausalLM"
        steps, _, verified = LLAMA_STEPS if llama else STEPS
        return replace(args, num_speculative_tokens=steps, speculative_num_draft_tokens=verified)
    width = width or 1
    if width == 1 or not verified:
        verified = steps + 1
    return replace(
        args, num_speculative_tokens=steps, speculative_eagle_topk=width, speculative_num_draft_tokens=verified
    )


def branches(args: EngineArgs) -> int:
    """Branches of each drafting step; where none were asked for, by the tokens that are verified."""
    if args.speculative_eagle_topk is not None or not speculates(args):
        return args.speculative_eagle_topk or 1
    return LLAMA_STEPS[1] if args.speculative_num_draft_tokens == LLAMA_STEPS[2] else 1


def check_context(request: Request) -> None:
    """SGLang refuses a --context-length beyond what the draft's config says."""
    draft, context = request.draft, request.args.max_model_len
    if draft is None or not isinstance(context, int) or context <= draft.max_model_len:
        return
    raise UsageError(
        f"--ctx {context:,}",
        f"the draft {draft.name} was made for {draft.max_model_len:,} tokens, and SGLang refuses more",
        "use at most that, or set SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 and leave --ctx out",
    )


@dataclass(frozen=True, slots=True)
class Drafted:
    """What drafts add to a pool.

    full, windows  bytes a token that are counted with the layers that keep all tokens, and with window layers
    verified       tokens that are verified at once; each keeps a copy of a request's states
    requests       requests that have such copies, at most
    """

    full: int = 0
    windows: int = 0
    verified: int = 0
    requests: int = 0


NO_DRAFTS: Final = Drafted()


def is_counted(spec: ModelSpec, args: EngineArgs) -> bool:
    """Whether the model's own head is in the budget where no draft is named: by its class, or by its config."""
    text = mtp.text_values(spec)
    return args.speculative_method != "mtp" or spec.architecture in BUNDLED or "num_nextn_predict_layers" in text


def drafted(
    spec: ModelSpec, draft: ModelSpec | None, args: EngineArgs, full: Sequence[KVSpec], windows: Sequence[KVSpec],
    draft_bytes: int, page: int,
) -> Drafted:  # fmt: skip
    """The bytes a token that SGLang counts for a draft.

    full, windows  the target's layers in either pool
    draft_bytes    what a token takes in the draft's own layers
    """
    verified, requests = args.speculative_num_draft_tokens or 0, requests_at_most(args) or 0
    if draft is None or not is_counted(spec, args):
        return Drafted(verified=verified, requests=requests)
    if args.speculative_method in ("dflash", "dspark"):
        return Drafted(draft_bytes, 0, verified, requests)
    layers = mtp.num_layers(spec) if draft.head == "mtp" else draft.num_layers
    if windows:
        kinds = [isinstance(caches[0], SlidingWindow) for caches in draft.layers if caches]
        narrow = layers if draft.head == "mtp" else sum(kinds) if not draft.head else 0
        return Drafted(
            (layers - narrow) * (full[0].page // page), narrow * (windows[0].page // page), verified, requests
        )
    index = [each.page // page for each in full if each.shape[:1] == ("indexer",)]
    ratios = [each.page // page for each in full if each.shape[:1] != ("indexer",)]
    more = int(sum(ratios) * layers / len(ratios)) + (layers * index[0] if index else 0)
    return Drafted(more, 0, verified, requests)


def draft_note(draft: ModelSpec, counted: int, real: int) -> str | None:
    """What the draft's own pool takes beyond what SGLang counts for it."""
    if real == counted:
        return None
    return (
        f"SGLang counts {counted:,} B a token for the draft's layers, which take {real:,} B: the difference is "
        f"{'taken from' if real > counted else 'left in'} what it keeps back"
    )
