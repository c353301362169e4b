"""What vLLM makes of a draft's name, its config and its own context.

Source: vLLM 0.33 config/speculative.py (SpeculativeConfig.__post_init__, _maybe_override_draft_max_model_len),
config/vllm.py (_limit_max_model_len_to_draft).
"""

from typing import Final

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.models.catalog import model_id
from kvplan.models.families.eagle import method_of
from kvplan.models.families.speculators import FLAT
from kvplan.servers.plans.plan import Request
from kvplan.servers.words.arguments import Settings

# Words of a draft's name that choose its method if none is given; without one, such a head is taken for a whole model.
WORDS: Final = {"eagle": "eagle-", "eagle3": "eagle3", "dflash": "dflash"}
LENGTH: Final = "max_model_len"


def check_name(request: Request) -> None:
    """Reject a head without a method whose name does not say which."""
    draft = request.draft
    if draft is None or draft.head or request.args.speculative_method is not None or draft.config.get(FLAT):
        return
    method = method_of(draft)
    names = f"{draft.name} {model_id(draft)} {draft.source}".lower()
    if method in WORDS and not any(word in names for word in WORDS.values()):
        problem = f"is an {method} head that vLLM takes for a whole model: it goes by names, and this has no {method!r}"
        remedy = f"add --speculative-method {method} (in a speculative config, the key method)"
        raise UsageError(f"draft {printable(draft.name, 60)}", problem, remedy)


def stated_length(request: Request) -> int | None:
    """`max_model_len` of the speculative config; UsageError for what is no length."""
    stated = None if request.repeated is None else request.repeated.speculative.get(LENGTH)
    if stated is None:
        return None
    text = str(stated)
    if not text.isdecimal() or int(text) < 1:
        problem = f"is not a number of tokens ({printable(text, 40)!r})"
        raise UsageError(f"{LENGTH} of the speculative config", problem, "write a number, or remove it")
    return int(text)


def context_with_draft(request: Request, settings: Settings) -> int:
    """The context: runner V2 cannot continue without an independent draft, so that its own context bounds it.

    Raise UsageError for a length of the draft above that of its config or of its target.
    """
    draft, context = request.draft, settings.max_model_len
    if draft is None:
        return context
    stated = stated_length(request)
    for model, limit in ((draft.name, context if draft.head else draft.context_limit), (request.spec.name, context)):
        if stated is not None and stated > limit:
            problem = f"is more than {model} is served with ({limit:,}), which vLLM refuses"
            raise UsageError(f"{LENGTH} {stated:,} of the speculative config", problem, "lower it, or remove it")
    if draft.head or not settings.runner_v2 or not request.release.has("draft_bounds_context"):
        return context
    return min(context, stated or draft.max_model_len)
