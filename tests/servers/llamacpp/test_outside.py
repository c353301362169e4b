"""Memory outside llama.cpp's books against the logs that are at hand."""

import json

from kvplan.servers.llamacpp.outside import growth
from kvplan.servers.llamacpp.settings import MIB
from tests.support.oracle_data import DATA, needs_oracle_data


@needs_oracle_data
def test_the_range_holds_what_was_logged_where_the_memory_is_not_the_hosts() -> None:
    low, likely, high = growth()
    rows = [json.loads(line) for line in (DATA / "llamacpp_logs.jsonl").read_text().splitlines()]
    logged = [
        device["unaccounted"] * MIB
        for row in rows
        if "Spark" not in str(row["gpus"])
        for device in row["buffers_mib"].values()
        if "unaccounted" in device
    ]
    assert len(logged) == 3
    assert all(low <= size <= high for size in logged)
    assert low <= likely <= high
