"""Speculative decoding that a log tells of, put beside the model that is sized, where that can be done."""

import re
from dataclasses import replace
from typing import Any, Final

from kvplan.core.errors import KvplanError
from kvplan.core.files import printable
from kvplan.measure.serverlog.log import ServerLog
from kvplan.measure.serverlog.request import draft_of
from kvplan.planning.plan import Request
from kvplan.servers.base import server_of
from kvplan.servers.methods import plain_method

# SGLang's numbers of drafts -> the arguments that they are.
NUMBERS: Final = {
    "speculative_num_steps": "num_speculative_tokens",
    "speculative_eagle_topk": "speculative_eagle_topk",
    "speculative_num_draft_tokens": "speculative_num_draft_tokens",
}


def with_draft(log: ServerLog, request: Request) -> tuple[Request, list[str]]:
    """The request with what drafts, and a note; as it was where the user said it, or where it cannot be sized.

    A draft is a model or head of its own, which only --draft-model names: a log's paths are not opened.
    """
    told = draft_of(log)
    if not told or request.draft is not None or request.args.speculative_method is not None:
        return request, []
    method = method_of(log)
    called = printable(told.get("method", told.get("model", "speculation")), 40)
    texts = {name: log.flags.get(key, "") for key, name in NUMBERS.items()}
    counts: dict[str, Any] = {name: int(text) for name, text in texts.items() if re.fullmatch("[1-9][0-9]{0,2}", text)}
    args = replace(request.args, speculative_method=method, **(counts if log.engine == "sglang" else {}))
    drafted = replace(request, args=args)
    try:
        server_of(request.release.engine).drafter(drafted)
    except KvplanError as error:
        return request, [f"the server drafts tokens ({called}), which is not sized: {error}"]
    return drafted, [f"the server drafts tokens ({called}), which is sized as the log says it"]


def method_of(log: ServerLog) -> str:
    """The method by kvplan's name; a server that names a model and no method runs that model."""
    told = draft_of(log)
    method = plain_method(told.get("method", "draft_model").lower())
    if log.engine == "sglang":
        from kvplan.servers.sglang.drafts import ALGORITHMS  # of no account for other servers

        method = ALGORITHMS.get(method.upper(), method)
        path = log.flags.get("speculative_draft_model_path", "None")
        return "mtp" if method == "eagle" and path in ("None", "", log.model) else method
    return method
