"""Ask vLLM's attention backends what they run, and write the table that the plan looks up.

    python -m benchmarks.start_attention ORACLE            print how the stored table differs from fresh answers
    python -m benchmarks.start_attention ORACLE --write    store them in kvplan/servers/vllm/attention.json

ORACLE is a folder with vLLM 0.33's own code and a stand-in for each GPU of `GPUS` (`venv`, `vllm-src`, `scripts`). No
engine is built: each backend's class is asked directly, by the call of platforms/cuda.py (validate_configuration), and
by its constructor, which gets the KV dtype that an MLA layer makes of the stated one.

Asked: per backend and capability every KV dtype, head width of 1 to 640, dtype, block of 16 to 1,024 tokens, and each
flag of `FLAGS`, one axis after another; then all combinations of the values that passed, over the head widths of
`WIDTHS` and the blocks of `BLOCKS`. Derived: that a value that fails alone fails in every combination (checked on
`DRAWN` random cells of each backend and capability), other widths in combinations (as the next wider one), and other
blocks (as the largest one that divides them).
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

GPUS = {
    70: "V100", 75: "T4", 80: "A100", 86: "A10G", 89: "L40S", 90: "H100", 100: "B200", 103: "B300", 120: "RTX5090",
    121: "GB10",
}  # fmt: skip
TABLE = Path(__file__).parents[1] / "kvplan" / "servers" / "vllm" / "attention.json"
SOURCE = "vLLM 0.33.0, each backend's validate_configuration and constructor, platforms/cuda.py's order"
FOREIGN = ("ROCM", "XPU", "CPU", "AMX", "CUSTOM", "NO_ATTENTION")
FLAGS = {
    "sinks": "has_sink", "ahead": "use_mm_prefix", "window": "has_sliding_window", "dcp": "use_dcp", "pcp": "use_pcp",
    "connector": "use_kv_connector", "by_head": "use_per_head_quant_scales",
}  # fmt: skip
DTYPES = ("float16", "bfloat16", "float32")
WIDTHS = (64, 72, 80, 96, 112, 128, 160, 192, 256, 320, 512, 576)
HEADS = 16
BLOCKS = (16, 32, 64, 128)  # asked in combinations; another is as the largest of these that divides it
MOST_WIDTH, MOST_BLOCK, DRAWN = 640, 1024, 2000
ROUND_BLOCKS = range(16, MOST_BLOCK + 1, 16)
Cell = dict[str, Any]
Reasons = Callable[[Cell], list[str]]


# --- in the oracle's Python -------------------------------------------------------------------------------------------


def child(home: Path, gpu: str, cells: list[Cell] | None) -> Any:
    """Answer as vLLM does on one GPU: the table's rows, or the reasons of each backend in each given cell."""
    sys.path[:1] = [str(home / folder) for folder in ("vllm-src", "scripts/vllm", "scripts/common")]  # not this folder
    import oracle_cases  # type: ignore[import-not-found]

    os.environ.update(oracle_cases.ENVIRONMENT)
    import pretend  # type: ignore[import-not-found]

    pretend.load(gpu, home)
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config  # type: ignore[import-not-found]
    from vllm.v1.attention.backends import registry  # type: ignore[import-not-found]
    from vllm.v1.worker.workspace import init_workspace_manager  # type: ignore[import-not-found]

    init_workspace_manager(torch.device("cpu"), 1)
    with set_current_vllm_config(VllmConfig()):
        known = [item for item in registry.AttentionBackendEnum if item.value and not item.name.startswith(FOREIGN)]
        classes = {}
        with pretend._cuda_to_meta():  # a backend's module makes a workspace
            for item in known:
                classes[item.name] = item.get_class()
        if cells is not None:
            return [reasons_of(classes[cell["backend"]])(cell["cell"]) for cell in cells]
        return {"backends": {name: facts(item) for name, item in classes.items()}, "orders": list(orders())}


def reasons_of(backend: Any) -> Reasons:
    """The backend's own reasons not to run a cell, and its constructor's."""
    import pretend
    import torch
    from vllm.config import get_current_vllm_config
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    capability = current_platform.get_device_capability()
    parallel = get_current_vllm_config().parallel_config
    pretend.install_groups(tp=8, pp=1, ep=1, pp_rank=0, dcp=parallel.decode_context_parallel_size, pcp=1)

    def ask(cell: Cell) -> list[str]:
        flags = {word: cell.get(name, False) for name, word in FLAGS.items()}
        ranks = 2 if cell.get("dcp") else 1
        if parallel.decode_context_parallel_size != ranks:
            parallel.decode_context_parallel_size = ranks
            pretend.install_groups(tp=8, pp=1, ep=1, pp_rank=0, dcp=ranks, pcp=1)
        try:
            match = backend.validate_configuration(
                head_size=cell["width"], dtype=getattr(torch, cell["dtype"]), kv_cache_dtype=cell["kv"],
                block_size=cell["block"], use_mla=backend.is_mla(), use_sparse=backend.is_sparse(),
                device_capability=capability,
                attn_type=cell.get("kind", "decoder"), **flags,
            )  # fmt: skip
        except Exception as error:
            return [f"raises {error}"]
        return [text.partition(", got ")[0] for text in match] or list(constructed(backend, cell))

    return ask


def constructed(backend: Any, cell: Cell) -> Iterator[str]:
    """What the constructor of the backend's implementation refuses."""
    import pretend
    import torch
    from vllm.model_executor.layers.attention.mla_attention import (  # type: ignore[import-not-found]
        _canonicalize_sparse_mla_kv_cache_dtype,
    )

    dtype = getattr(torch, cell["dtype"])
    kv = _canonicalize_sparse_mla_kv_cache_dtype(backend, cell["kv"])
    window = 128 if cell.get("window") else None
    more = {"sinks": torch.zeros(HEADS)} if cell.get("sinks") else {}
    if backend.is_mla():
        rope = 64 if cell["width"] > 512 else 0
        sizes = {"kv_lora_rank": cell["width"] - rope, "qk_rope_head_dim": rope, "qk_nope_head_dim": 128,
                 "qk_head_dim": 128 + rope, "v_head_dim": 128, "q_lora_rank": 1536}  # fmt: skip
        more |= sizes | {"kv_b_proj": None, "indexer": None}
        more |= {"topk_indices_buffer": torch.zeros(1, 2048, dtype=torch.int32)} if backend.is_sparse() else {}
    torch.set_default_dtype(dtype)
    try:
        heads = (HEADS, cell["width"], 1.0, 1 if backend.is_mla() else HEADS)
        with pretend._cuda_to_meta():
            backend.get_impl_cls()(*heads, None, window, kv, None, "decoder", None, **more)
    except (NotImplementedError, ValueError) as error:
        yield str(error).partition(" on ")[0].partition(";")[0]
    except Exception as error:
        UNBUILT.add(f"{backend.__name__}: {type(error).__name__} {error}"[:200])
    finally:
        torch.set_default_dtype(torch.float32)


UNBUILT: set[str] = set()  # what no constructor could be asked for, printed at the end


def facts(backend: Any) -> dict[str, Any]:
    """What a backend runs, axis by axis, and the combinations of these that it does not."""
    from vllm.config.cache import KV_CACHE_DTYPES

    ask = reasons_of(backend)
    axes: dict[str, list[Any]] = {
        "kv": list(KV_CACHE_DTYPES), "dtype": list(DTYPES), "width": list(range(1, MOST_WIDTH + 1)),
        "block": [None, *ROUND_BLOCKS], "kind": ["decoder", "encoder_only"], **{name: [False, True] for name in FLAGS},
    }  # fmt: skip
    cells = list(base_cells())
    fewest = min(len(ask(cell)) for cell in cells)
    bases = [cell for cell in cells if len(ask(cell)) == fewest]
    bases = [cell for axis in ("width", "kv") for cell in {cell[axis]: cell for cell in bases}.values()]  # one of each
    least = set(ask(bases[0]))

    def passes(axis: str, value: Any) -> bool:
        return any(set(ask({**base, axis: value})) <= least for base in bases)

    taken = {axis: [value for value in values if passes(axis, value)] for axis, values in axes.items()}
    layouts = backend.supported_kv_cache_layouts()
    row = {
        "latent": backend.is_mla(), "sparse": backend.is_sparse(), "runs": not least, "kv": taken["kv"],
        "dtypes": taken["dtype"], "widths": ranges(taken["width"]), "blocks": ranges(taken["block"][1:]),
        "encodes": "encoder_only" in taken["kind"], "flags": [name for name in FLAGS if True in taken[name]],
        "layouts": None if layouts is None else [item.name for item in layouts],
    }  # fmt: skip
    if hasattr(backend, "is_supported_on_current_device"):  # a model that needs uneven heads asks this alone
        row["uneven"] = [bool(backend.is_supported_on_current_device(192, 128, sinks)) for sinks in (False, True)]
        row["built"] = [kv for kv in KV_CACHE_DTYPES if not list(constructed(backend, bases[0] | {"kv": kv}))]
    if least:
        row["why"] = sorted(least)
        return row
    few = {"width": [width for width in taken["width"] if width in WIDTHS],
           "block": [block for block in taken["block"] if block in (None, *BLOCKS)],
           "kind": ["decoder"], "pcp": [False], "connector": [False]}  # fmt: skip
    row["unless"] = exceptions(taken | few, ask)
    for cell in drawn(axes):
        assert bool(ask(cell)) == bool(list(predicted(row, cell))), (backend, cell, ask(cell))
    return row


def base_cells() -> Iterator[Cell]:
    from vllm.config.cache import KV_CACHE_DTYPES

    for kv, width in itertools.product(reversed(KV_CACHE_DTYPES), (128, 192, 256, 512, 576)):
        yield {"kv": kv, "dtype": "bfloat16", "width": width, "block": None}


def drawn(axes: dict[str, list[Any]]) -> Iterator[Cell]:
    draw = random.Random(29)
    some = axes | {"width": list(WIDTHS), "block": [None, *BLOCKS, 48, 256]}
    for _ in range(DRAWN):
        cell = {axis: draw.choice(values) for axis, values in some.items()}
        yield cell | {name: draw.random() < 0.15 for name in FLAGS} | {"kind": "decoder"}


def exceptions(taken: dict[str, list[Any]], ask: Reasons) -> list[dict[str, Any]]:
    """Combinations of values taken one by one that are refused: {axis: values} that suffice, with the reason."""
    names = list(taken)
    refused: dict[str, set[tuple[Any, ...]]] = defaultdict(set)
    domain = list(itertools.product(*taken.values()))
    for values in domain:
        for text in ask(dict(zip(names, values, strict=True)))[:1]:
            refused[text].add(values)
    rows = []
    for text, cells in refused.items():
        places = [place for place in range(len(names)) if depends(cells, domain, place)]
        for box in boxes({tuple(cell[place] for place in places) for cell in cells}):
            rows.append({"why": text} | {names[place]: values for place, values in zip(places, box, strict=True)})
    return rows


def depends(cells: set[tuple[Any, ...]], domain: Iterable[tuple[Any, ...]], place: int) -> bool:
    """True if whether a cell is refused depends on the axis of this place."""
    kinds: dict[tuple[Any, ...], set[bool]] = defaultdict(set)
    for cell in domain:
        kinds[cell[:place] + cell[place + 1 :]].add(cell in cells)
    return any(len(kind) > 1 for kind in kinds.values())


def boxes(cells: set[tuple[Any, ...]]) -> list[list[list[Any]]]:
    """Products of values that together are the cells: by first value, joined where the rest is equal."""
    if not cells or not next(iter(cells)):
        return [[]] if cells else []
    others_of: dict[Any, set[tuple[Any, ...]]] = defaultdict(set)
    for first, *others in sorted(cells, key=str):  # the same rows on every run
        others_of[first].add(tuple(others))
    firsts: dict[frozenset[tuple[Any, ...]], list[Any]] = defaultdict(list)
    for first, others in others_of.items():
        firsts[frozenset(others)].append(first)
    return [[sorted(same, key=str), *box] for others, same in firsts.items() for box in boxes(set(others))]


def ranges(values: list[int]) -> list[list[int]]:
    """[first, last, step] of runs of numbers with even steps."""
    runs: list[list[int]] = []
    for value in values:
        if runs and runs[-1][0] == runs[-1][1]:
            runs[-1][1:] = value, value - runs[-1][0]
        elif runs and value - runs[-1][1] == runs[-1][2]:
            runs[-1][1] = value
        else:
            runs.append([value, value, 1])
    return runs


def orders() -> Iterator[dict[str, Any]]:
    """The order in which the platform tries backends where none was requested, for plain heads and MLA."""
    from vllm.platforms import current_platform
    from vllm.platforms.cuda import _get_backend_priorities  # type: ignore[import-not-found]

    capability = current_platform.get_device_capability()
    for latent, ahead in ((False, False), (False, True), (True, False)):
        names = _get_backend_priorities(latent, capability, 128, "auto", False, 576, ahead)
        yield {"latent": latent, "ahead": ahead, "order": [item.name for item in names]}


# --- the rule that reads the table ------------------------------------------------------------------------------------


def predicted(row: dict[str, Any], cell: Cell) -> Iterator[str]:
    """What the table says of a cell: as the plan reads it."""
    width, block = cell["width"], cell["block"]
    if not within(width, row["widths"]):
        yield "head_size"
    if cell["dtype"] not in row["dtypes"] or cell["kv"] not in row["kv"]:
        yield "dtype"
    if block is not None and not within(block, row["blocks"]):
        yield "block_size"
    yield from (name for name in FLAGS if cell[name] and name not in row["flags"])
    for item in row.get("unless", ()):
        block = None if block is None else max(size for size in BLOCKS if block % size == 0)
        plain = cell | {"block": block}
        if all(plain[axis] in values for axis, values in item.items() if axis != "why"):
            yield item["why"]


def within(value: int, runs: list[list[int]]) -> bool:
    return any(first <= value <= last and (value - first) % step == 0 for first, last, step in runs)


# --- here -------------------------------------------------------------------------------------------------------------


def answers_of(home: Path, gpu: str, cells: list[Cell] | None = None) -> Any:
    """Answers of vLLM on one GPU: a process of the oracle's own Python, since one process plays one GPU."""
    words = [str(home / "venv" / "bin" / "python"), __file__, str(home), "--gpu", gpu]
    done = subprocess.run(words, input=json.dumps(cells), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{gpu}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def merged(answers: dict[int, Any]) -> dict[str, Any]:
    """One row per backend and set of capabilities with the same facts; likewise the orders."""
    tables: dict[str, Any] = {"source": SOURCE, "asked": sorted(answers), "widths": WIDTHS, "blocks": BLOCKS}
    rows: dict[str, list[int]] = defaultdict(list)
    orders: dict[str, list[int]] = defaultdict(list)
    for sm, answer in answers.items():
        for name, row in answer["backends"].items():
            rows[json.dumps({"backend": name} | row)].append(sm)
        for row in answer["orders"]:
            orders[json.dumps(row)].append(sm)
    tables["backends"] = [{"backend": row.pop("backend"), "sm": sms} | row for row, sms in loaded(rows)]
    tables["orders"] = [{"sm": sms} | row for row, sms in loaded(orders)]
    return tables


def loaded(rows: dict[str, list[int]]) -> Iterator[tuple[dict[str, Any], list[int]]]:
    return ((json.loads(text), sms) for text, sms in sorted(rows.items(), key=lambda row: row[0]))


def text_of(table: dict[str, Any]) -> str:
    """The table as JSON, a row a line."""
    parts = []
    for key, value in table.items():
        inner = json.dumps(value) if not isinstance(value, list) or not value or not isinstance(value[0], dict) else (
            "[\n" + ",\n".join(json.dumps(row) for row in value) + "\n]"
        )  # fmt: skip
        parts.append(f"{json.dumps(key)}: {inner}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("oracle", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--gpu", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.gpu:
        cells = json.loads(sys.stdin.read() or "null")
        print(json.dumps(child(options.oracle, options.gpu, cells)))
        print(*sorted(UNBUILT), sep="\n", file=sys.stderr)
        return 0
    if not (options.oracle / "vllm-src").is_dir():
        print(f"skipped: {options.oracle} has no vllm-src")
        return 0
    fresh = text_of(merged({sm: answers_of(options.oracle, gpu) for sm, gpu in GPUS.items()}))
    return settle(TABLE, fresh, write=options.write)


def settle(stored: Path, fresh: str, *, write: bool) -> int:
    """Store the fresh table, or say whether the stored one equals it; the exit code."""
    if write:
        stored.write_text(fresh)
        return 0
    is_same = stored.read_text() == fresh
    print("equal" if is_same else "different: see git diff after --write")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
