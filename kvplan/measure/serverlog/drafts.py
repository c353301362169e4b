"""Speculative decoding found in a log, added to the sized model if possible."""

from dataclasses import replace
from typing import Any

from kvplan.core.errors import KvplanError
from kvplan.core.files import printable
from kvplan.servers.base import logs_of, server_of
from kvplan.servers.logs.log import ServerLog
from kvplan.servers.plans.plan import Request


def with_draft(log: ServerLog, request: Request) -> tuple[Request, list[str]]:
    """Return the request with its draft method, and notes; unchanged if the user set one, or if it cannot be sized.

    A draft model or head can only be named with --draft-model: a log's paths are not opened. Its numbers are the log's.
    """
    drafting = logs_of(log.engine).draft(log)
    if drafting is None or request.args.speculative_method is not None:
        return request, []
    counts: dict[str, Any] = dict(drafting.counts)
    if request.draft is not None:
        unset = {name: count for name, count in counts.items() if not getattr(request.args, name)}
        return replace(request, args=replace(request.args, **unset)), []
    called = printable(drafting.called, 40)
    args = replace(request.args, speculative_method=drafting.method, **counts)
    drafted = replace(request, args=args)
    try:
        server_of(request.release.engine).drafter(drafted)
    except KvplanError as error:
        return request, [f"the server drafts tokens ({called}), which is not sized: {error}"]
    return drafted, [f"the server drafts tokens ({called}), which is sized as the log says it"]
