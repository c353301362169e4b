"""Speculative decoding that a log tells of, put beside the model that is sized, where that can be done."""

from dataclasses import replace
from typing import Any

from kvplan.core.errors import KvplanError
from kvplan.core.files import printable
from kvplan.planning.plan import Request
from kvplan.servers.base import logs_of, server_of
from kvplan.servers.logs import ServerLog


def with_draft(log: ServerLog, request: Request) -> tuple[Request, list[str]]:
    """The request with what drafts, and a note; as it was where the user said it, or where it cannot be sized.

    A draft is a model or head of its own, which only --draft-model names: a log's paths are not opened.
    """
    drafting = logs_of(log.engine).draft(log)
    if drafting is None or request.draft is not None or request.args.speculative_method is not None:
        return request, []
    called = printable(drafting.called, 40)
    counts: dict[str, Any] = dict(drafting.counts)
    args = replace(request.args, speculative_method=drafting.method, **counts)
    drafted = replace(request, args=args)
    try:
        server_of(request.release.engine).drafter(drafted)
    except KvplanError as error:
        return request, [f"the server drafts tokens ({called}), which is not sized: {error}"]
    return drafted, [f"the server drafts tokens ({called}), which is sized as the log says it"]
