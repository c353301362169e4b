"""A row per simulated request, as CSV or Parquet, written in pieces, so that a million rows are never one string."""

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from typing import Any, Final

from kvplan.core.errors import EnvironmentProblem
from kvplan.core.table import csv_text
from kvplan.simulate.runs import ServedRequests

NAMES: Final = (
    "number", "arrival_s", "admitted_s", "first_token_s", "ended_s", "prompt_tokens", "output_tokens",
    "cached_tokens", "loaded_tokens", "preemptions",
)  # fmt: skip
PIECE: Final = 50_000  # rows
FORMATS: Final = {".csv": "csv", ".parquet": "parquet"}


def columns(served: ServedRequests) -> tuple[Any, ...]:
    """Arrays in the order of NAMES."""
    records = served.records
    return (
        records.number, records.arrival, records.admitted, records.first_token, records.ended, records.prompt,
        records.output, records.cached, records.loaded, records.preemptions,
    )  # fmt: skip


def require_parquet() -> None:
    """Raise EnvironmentProblem if pyarrow is missing."""
    if find_spec("pyarrow") is None:
        raise EnvironmentProblem(
            "--requests", "pyarrow is not installed", "pip install '.[parquet]' in kvplan's sources, or write .csv"
        )


def written(served: ServedRequests, form: str) -> Iterator[bytes]:
    """Yield the file's bytes, piece by piece."""
    return as_parquet(served) if form == "parquet" else as_csv(served)


def as_csv(served: ServedRequests) -> Iterator[bytes]:
    yield csv_text([NAMES]).encode()
    rows = zip(*columns(served), strict=True)
    while piece := list(islice(rows, PIECE)):
        yield csv_text(piece).encode()


def as_parquet(served: ServedRequests) -> Iterator[bytes]:
    """A row group per piece; times as float64, counts as int64."""
    import io

    import pyarrow
    import pyarrow.parquet

    arrays = columns(served)
    kinds = {"d": pyarrow.float64(), "q": pyarrow.int64()}
    schema = pyarrow.schema([(name, kinds[array.typecode]) for name, array in zip(NAMES, arrays, strict=True)])
    buffer = io.BytesIO()
    with pyarrow.parquet.ParquetWriter(buffer, schema) as writer:  # type: ignore[no-untyped-call]
        for start in range(0, len(arrays[0]), PIECE):
            piece = [
                pyarrow.array(array[start : start + PIECE], type=field.type)
                for array, field in zip(arrays, schema, strict=True)
            ]
            writer.write_table(pyarrow.Table.from_arrays(piece, schema=schema))
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue()
