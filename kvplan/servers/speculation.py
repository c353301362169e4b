"""Speculative decoding: which method drafts, with which model or head, and how many tokens at once.

What is asked for (a method, a draft, a number) becomes the draft that stands beside the model: an independent model, a
head of its own checkpoint (EAGLE, EAGLE-3, DFlash, DSpark), the model's own layers of multi-token prediction, or none.
Source: vLLM 0.33 config/speculative.py.
"""

from dataclasses import replace
from typing import Final

from kvplan.core.errors import UnsupportedModelError, UsageError
from kvplan.core.files import printable
from kvplan.models.spec import ModelSpec
from kvplan.servers.methods import HEADS, METHODS, NO_DRAFT
from kvplan.servers.plans import Request

DRAFT_TOKENS: Final = 5  # of a draft that comes without a number of tokens; a common choice
SUFFIX_TOKENS: Final = 24  # vLLM 0.33 suffix_decoding_max_tree_depth


def drafter(request: Request, server: str) -> tuple[Request, list[str]]:
    """The request with the draft that really stands beside the model, and what was decided for the user.

    server  its name, for messages
    Raises UsageError for what contradicts itself, UnsupportedModelError for a head that is not modeled.
    """
    args, draft = request.args, request.draft
    method = args.speculative_method
    if draft is not None and draft.head:  # it stands there already
        return request, []
    if method is None and draft is None:
        return request, []
    if method is None:
        assert draft is not None
        method = method_of(draft)
    if method not in METHODS:
        problem = f"is not one that is modeled ({', '.join(METHODS)})"
        raise UsageError(f"speculative method {printable(method, 40)!r}", problem, "leave it out")
    if method in NO_DRAFT and draft is not None:
        raise UsageError(f"speculative method {method}", f"drafts without a model ({draft.name})", "leave one out")
    if draft is None and method in (*HEADS, "draft_model"):
        raise UsageError(f"speculative method {method}", "needs a draft", "name one with --draft-model")
    notes: list[str] = []
    if method == "mtp":
        draft = mtp_of(request)
    elif draft is not None and method != "draft_model":
        draft = head_of(draft, method, request.spec)
    tokens = args.num_speculative_tokens or default_tokens(method, request)
    if not args.num_speculative_tokens and method not in ("mtp", "suffix"):
        notes.append(f"no --num-speculative-tokens: {tokens} are taken; {server} wants a number")
    check(request, draft, method, tokens)
    named = args.speculative_method is not None or method != "draft_model"
    args = replace(args, speculative_method=method if named else None, num_speculative_tokens=tokens)
    return replace(request, args=args, draft=draft), notes


def method_of(draft: ModelSpec) -> str:
    from kvplan.models.families import eagle

    return eagle.method_of(draft)


def mtp_of(request: Request) -> ModelSpec:
    """The model's own head, or that of the checkpoint that was named in its place."""
    from kvplan.models.families import mtp

    return mtp.mtp_head(request.draft or request.spec)


def head_of(draft: ModelSpec, method: str, target: ModelSpec) -> ModelSpec:
    from kvplan.models.families import eagle

    return eagle.head_of(draft, method, target)


def default_tokens(method: str, request: Request) -> int:
    """Tokens drafted where nobody says how many: a head's own number of layers or its block."""
    if method == "mtp":
        from kvplan.models.families import mtp

        return mtp.num_layers(request.draft or request.spec)
    if method == "suffix":
        return SUFFIX_TOKENS
    if method == "dspark" and request.draft is not None:
        block = request.draft.config.get("block_size") or request.draft.config.get("dspark_block_size")
        if isinstance(block, int) and block > 0:
            return block
    return DRAFT_TOKENS


def check(request: Request, draft: ModelSpec | None, method: str, tokens: int) -> None:
    """What a server refuses at start-up."""
    args, spec = request.args, request.spec
    if method == "mtp":
        from kvplan.models.families import mtp

        steps = mtp.num_layers(request.draft or spec)
        if tokens > steps and tokens % steps:
            problem = f"is not a multiple of the {steps} layers of multi-token prediction of {spec.name}"
            raise UsageError(f"num_speculative_tokens {tokens}", problem, "use one")
    if method == "draft_model" and draft is not None and draft.vocab_size != spec.vocab_size:
        raise UsageError(
            f"--draft-model {draft.name}",
            f"has a vocabulary of {draft.vocab_size:,} tokens, and {spec.name} one of {spec.vocab_size:,}",
            "name a draft of the same family",
        )
    if draft is not None and args.pipeline_parallel_size > 1:
        raise UsageError(
            "--draft-model", "drafts with pipeline parallelism are not modeled", "use --tp, or leave the drafts out"
        )
    if draft is not None and draft.has_states and draft is not spec:
        raise UnsupportedModelError(draft.name, "a draft with recurrent states is not modeled")
