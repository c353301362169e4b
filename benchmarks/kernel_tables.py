"""Reduce the measured kernels of aiconfigurator-core to kvplan's tables: `python -m benchmarks.kernel_tables WHEEL`.

WHEEL is the folder aiconfigurator_core of an installed wheel (0.12.0: Apache-2.0, NVIDIA). Writes a file for each
measured GPU into kvplan/simulate/kernels/measured/. Needs pandas and pyarrow.

Left out: kernels of vision towers, TensorRT-LLM's where vLLM or SGLang has the same format, power, shapes that no rank
of at most 8 has. Changed: latencies became factors on the least time of the kernel on its GPU; a time is the least of
all measured for as many tokens or more; grids are thinned.
"""

import argparse
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import log
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pandas as pd

from kvplan.hardware.gpu import GpuSpec, gpu
from kvplan.simulate.kernels import roof
from kvplan.simulate.kernels.tables import FOLDER, STEP

SYSTEMS = {
    "a100_sxm": "a100-80g", "h100_sxm": "h100-80g", "h200_sxm": "h200", "b200_sxm": "b200", "b300_sxm": "b300",
    "gb200": "gb200", "gb300": "gb300", "l40s": "l40s", "rtx_pro_6000_server": "rtx-pro-6000",
}  # fmt: skip
SERVERS = ("vllm", "sglang", "trtllm")
VERSIONS = {  # of query_versions.yaml: later folders hold single models
    "vllm": ("0.24.0", "0.14.0", "0.1.dev19262"),
    "sglang": ("0.5.14", "0.5.10", "0.5.16"),
    "trtllm": ("1.3.0rc20", "1.0.0"),
}
FORMS = {
    "bfloat16": "bfloat16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4", "w4a16_mxfp4": "mxfp4",
    "w4a8_mxfp4_mxfp8": "mxfp4_mxfp8", "int4_wo": "int4",
}  # fmt: skip
LANES = ("trtllm_mha", "vllm_flashinfer", "fa3", "vllm_flash_attn", "flashinfer", "flash_attention", "triton")
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
COUNTS = (1, 4, 16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = (1, 64, 256, 1024, 4096, 16384, 65536, 131072)
PROMPTS = (16, 64, 256, 1024, 2048, 4096, 8192, 16384)
LEAST_ROWS = 8  # of a part


class Surfaces(NamedTuple):
    """A part to be written: shapes, axes, and the factors of each shape on the grid."""

    name: str
    shapes: list[tuple[float, ...]]
    axes: tuple[Sequence[float], ...]
    values: np.ndarray


def read(data: Path, kind: str, server: str, table: str) -> pd.DataFrame | None:
    for version in VERSIONS[server]:
        path = data / kind / server / version / f"{table}_perf.parquet"
        if path.exists():
            rows = pd.read_parquet(path)
            rows = rows[rows["latency"] > 0]
            return rows.assign(s=rows["latency"] / 1e3) if len(rows) else None
    return None


Grid = Sequence[float]
Least = Callable[..., float]


def logs_on(rows: pd.DataFrame, axes: dict[str, Grid], least: Least) -> np.ndarray:
    """Logarithms of measured over least seconds on a grid; holes take their nearest neighbor's along an axis.

    The first axis counts tokens or sequences, the last ones may: more of them never take less time, so that a time is
    the least of all measured for as many or more. What is longer was held up by something else, once.
    """
    names = list(axes)
    table = rows.pivot_table(index=names[0], columns=names[1:] or None, values="s", aggfunc="median")
    if len(names) == 1:
        table = table[["s"]] if "s" in table else table
    table = table.sort_index()
    dense = table[::-1].cummin()[::-1].to_numpy()
    counts = np.log(np.maximum(table.index.to_numpy(float), 0.5))
    sizes = [len(grid) for grid in axes.values()]
    out = np.full(sizes, np.nan)
    columns = table.columns if len(names) > 1 else [()]
    for column, place in enumerate(columns):
        keys = place if isinstance(place, tuple) else (place,)
        cell = tuple(near(grid, key) for grid, key in zip(list(axes.values())[1:], keys, strict=True))
        if None in cell:
            continue
        for row, count in enumerate(axes[names[0]]):
            index = int(np.abs(counts - log(count)).argmin())
            if abs(counts[index] - log(count)) < SAME and not np.isnan(dense[index, column]):
                point = (count, *(list(axes.values())[1 + i][chosen] for i, chosen in enumerate(cell)))  # type: ignore[index]
                out[(row, *cell)] = log(dense[index, column] / least(*point))
    return filled(out)


SAME: Final = 0.06  # contexts of 1,023 and 1,024 tokens


def near(grid: Grid, value: float) -> int | None:
    logs = np.abs(np.log(np.array(grid, float)) - log(max(value, 0.5)))
    index = int(logs.argmin())
    return index if logs[index] < SAME else None


def filled(values: np.ndarray) -> np.ndarray:
    for axis in range(values.ndim):
        moved = np.moveaxis(values, axis, -1)
        flat = pd.DataFrame(moved.reshape(-1, moved.shape[-1])).ffill(axis=1).bfill(axis=1)
        values = np.moveaxis(flat.to_numpy().reshape(moved.shape), -1, axis)
    return values


def microsecond(*place: float) -> float:
    return 1e-6


def gemms(device: GpuSpec, rows: pd.DataFrame, server: str, known: Iterable[str]) -> Iterator[Surfaces]:
    for dtype, own in rows.groupby("gemm_dtype"):
        form = FORMS.get(dtype)
        if form is None or len(own["n"].unique()) < LEAST_ROWS or (server == "trtllm" and form in known):
            continue
        if (server, form) == ("vllm", "fp8_block"):  # launches: kvplan/simulate/kernels/choice.py
            continue
        axes = {"m": TOKENS, "n": sorted(own["n"].unique()), "k": sorted(own["k"].unique())}
        values = logs_on(own, axes, partial(roof.gemm, device, form))
        yield Surfaces(f"gemm/{form}/{server}", [()], tuple(axes.values()), values[None])


SHAPE = ["hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"]
LAWS = {"power_law_1.2": "1.2", "power_law_1.01": "1.01"}


def moes(device: GpuSpec, rows: pd.DataFrame, server: str) -> Iterator[Surfaces]:
    rows = rows[(rows["moe_tp_size"] * rows["moe_ep_size"] <= 8) | (rows["moe_ep_size"] == 16)]
    for (dtype, law), own in rows[rows["distribution"].isin(LAWS)].groupby(["moe_dtype", "distribution"]):
        form, shapes, values = FORMS.get(dtype), [], []
        if form is None or (server, form, device.sm) == ("vllm", "fp8", 90):  # kvplan/simulate/kernels/choice.py
            continue
        for shape, group in own.groupby(SHAPE):
            if len(group) >= LEAST_ROWS:
                shapes.append(tuple(int(number) for number in shape))

                least = partial(expert_seconds, device, form, roof.Experts(*shapes[-1]))
                values.append(logs_on(group, {"num_tokens": TOKENS[:-1]}, least))
        if shapes:
            yield Surfaces(f"moe/{form}/{LAWS[law]}/{server}", shapes, (TOKENS[:-1],), np.stack(values))


def expert_seconds(device: GpuSpec, form: str, shape: roof.Experts, tokens: float) -> float:
    return roof.experts(device, form, tokens, shape)


def best_lane(rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    rank = rows["kernel_source"].map(
        lambda name: next((i for i, lane in enumerate(LANES) if name.startswith(lane)), 99)
    )
    return rows.assign(rank=rank).sort_values("rank", kind="stable").drop_duplicates(keys)


def attentions(device: GpuSpec, phase: str, rows: pd.DataFrame, server: str) -> Iterator[Surfaces]:
    rows = rows if "window_size" in rows else rows.assign(window_size=0)
    rows = rows.assign(kv=np.where(rows["num_key_value_heads"] == 0, rows["num_heads"], rows["num_key_value_heads"]))
    rows = rows.assign(context=(rows["isl"] + rows["step"]).astype(float))
    keys = ["num_heads", "kv", "head_dim", "window_size"]
    rows = best_lane(rows, ["kv_cache_dtype", *keys, "batch_size", "context"])
    rows = rows if phase == "decode" else rows[rows["batch_size"] == 1]
    axes: dict[str, Grid] = {"batch_size": COUNTS, "context": CONTEXTS} if phase == "decode" else {"context": PROMPTS}
    for dtype, own in rows.groupby("kv_cache_dtype"):
        size, shapes, values = (1 if dtype == "fp8" else 2), [], []
        for shape, group in own.groupby(keys):
            if len(group) >= LEAST_ROWS:
                heads = roof.Heads(*(int(number) for number in shape), size)

                def least(*place: float, heads: roof.Heads = heads) -> float:
                    if phase == "decode":
                        return roof.decode(device, *place, heads)
                    return roof.prefill(device, place[0], roof.own_pairs(place[0], heads.window), heads)

                shapes.append(tuple(heads)[:4])
                values.append(logs_on(group, axes, least))
        if shapes:
            yield Surfaces(
                f"{phase}/{'fp8' if size == 1 else 'bf16'}/{server}", shapes, tuple(axes.values()), np.stack(values)
            )


def latents(device: GpuSpec, rows: pd.DataFrame, server: str) -> Iterator[Surfaces]:
    """Decoding over latents."""
    rows = rows.assign(context=(rows["isl"] + rows["step"]).astype(float))
    for dtype, own in rows.groupby("kv_cache_dtype"):
        size, shapes, values = (1 if dtype == "fp8" else 2), [], []
        for heads, group in own.groupby("num_heads"):

            def least(count: float, context: float, heads: int = heads, size: int = size) -> float:
                return roof.latent_decode(device, count, context, heads, size)

            shapes.append((int(heads),))
            values.append(logs_on(group, {"batch_size": COUNTS, "context": CONTEXTS}, least))
        yield Surfaces(
            f"latent_decode/{'fp8' if size == 1 else 'bf16'}/{server}", shapes, (COUNTS, CONTEXTS), np.stack(values)
        )


def without_projections(layer: pd.DataFrame, kernel: pd.DataFrame) -> pd.DataFrame:
    """vLLM's kernels of latents: its layers were measured whole, so less what they take for the shortest context, but
    SGLang's kernel of as many sequences.
    """
    layer = layer[layer["gemm_type"] == "bfloat16"].assign(context=layer["isl"] + layer["step"])
    kernel = kernel[kernel["kv_cache_dtype"] == "bfloat16"].assign(context=kernel["isl"] + kernel["step"])
    keys = ["num_heads", "batch_size"]
    shortest = kernel.sort_values("context").groupby(keys)["s"].first()
    out = []
    for (_, heads, count), own in layer.groupby(["kv_cache_dtype", *keys]):
        if (heads, count) in shortest.index:
            base, floor = own.sort_values("context")["s"].iloc[0], shortest[heads, count]
            out.append(own.assign(s=np.maximum(floor, own["s"] - base + floor)))
    return pd.concat(out)


def seconds(rows: pd.DataFrame, name: str, shape: list[str], axes: dict[str, Grid]) -> Surfaces:
    """Surfaces of plain microseconds, for kernels that are not carried to other shapes by their work."""
    shapes, values = [], []
    for key, group in rows.groupby(shape):
        if len(group) >= LEAST_ROWS:
            shapes.append(tuple(float(number) for number in key))
            values.append(logs_on(group, axes, microsecond))
    return Surfaces(name, shapes, tuple(axes.values()), np.stack(values) if values else np.empty(0))


def all_reduces(rows: pd.DataFrame, server: str) -> Iterator[Surfaces]:
    sources = rows["backend"] if "backend" in rows else rows["kernel_source"]
    for way in ("graph", "eager"):
        own = rows[sources.str.contains(way)]
        if len(own):
            sizes = sorted(own["message_size"].unique())[::2]
            yield seconds(own, f"allreduce/{way}/{server}", ["num_gpus"], {"message_size": sizes})


def states(rows: pd.DataFrame, server: str) -> Iterator[Surfaces]:
    """Gated delta nets: convolution and recurrence together."""
    keys = ["num_k_heads", "num_v_heads"]
    for phase, count, grid in (("generation", "batch_size", COUNTS), ("context", "seq_len", TOKENS)):
        own = rows[rows["phase"] == phase]
        own = own if phase == "generation" else own[own["batch_size"] == 1]
        summed = own.groupby([*keys, count, "kernel_source"])["s"].median().groupby([*keys, count]).sum().reset_index()
        yield seconds(summed, f"delta_{phase}/{server}", keys, {count: grid})


def modules(rows: pd.DataFrame, name: str, phase: str, server: str) -> Iterator[Surfaces]:
    """Whole attention layers of named models: sparse (DSA, MSA) and compressed (DeepSeek-V4)."""
    rows = rows[~rows["op_name"].str.contains("skip")]
    rows = rows.assign(context=(rows["isl"] + rows["step"]).astype(float))
    rows = rows if phase == "generation" else rows[(rows["batch_size"] == 1) & (rows["step"] == 0)]
    axes: dict[str, Grid] = (
        {"batch_size": COUNTS, "context": CONTEXTS} if phase == "generation" else {"context": PROMPTS}
    )
    for (model, kv, form), own in rows.groupby(["model", "kv_cache_dtype", "gemm_type"]):
        label = f"{name}_{phase}/{model.rpartition('/')[2]}/{'fp8' if 'fp8' in kv else 'bf16'}/{FORMS[form]}/{server}"
        yield seconds(own, label, ["num_heads"], axes)


MODULES = (
    ("dsa", "sparse_attention"), ("dsv4_csa", "sparse_attention"), ("dsv4_hca", "sparse_attention"), ("msa", "msa"),
)  # fmt: skip


def parts(data: Path, device: GpuSpec) -> Iterator[Surfaces]:
    known: set[str] = set()
    for server in SERVERS:
        if (rows := read(data, "gemm", server, "gemm")) is not None:
            for part in gemms(device, rows, server, known):
                known.add(part.name.split("/")[1])
                yield part
    for server in SERVERS[:2]:
        if (rows := read(data, "moe", server, "moe")) is not None:
            yield from moes(device, rows, server)
        for phase, table in (("decode", "generation_attention"), ("prefill", "context_attention")):
            if (rows := read(data, "attention", server, table)) is not None:
                yield from attentions(device, phase, rows, server)
        if (rows := read(data, "comm", server, "custom_allreduce")) is not None:
            yield from all_reduces(rows, server)
        if (rows := read(data, "linear_attention", server, "gdn")) is not None:
            yield from states(rows, server)
        for name, folder in MODULES:
            for phase in ("generation", "context"):
                if (rows := read(data, folder, server, f"{name}_{phase}_module")) is not None:
                    yield from modules(rows, name, phase, server)
        yield from by_tokens(data, server)
    kernel, layer = read(data, "mla", "sglang", "generation_mla"), read(data, "mla", "vllm", "mla_generation_module")
    if kernel is not None:
        yield from latents(device, kernel, "sglang")
        if layer is not None:
            yield from latents(device, without_projections(layer, kernel), "vllm")


def by_tokens(data: Path, server: str) -> Iterator[Surfaces]:
    """Kernels whose two halves are measured apart: absorption of latents, and hyper-connections."""
    if (rows := read(data, "mla_bmm", server, "mla_bmm")) is not None:
        rows = rows[rows["bmm_dtype"] == "bfloat16"].groupby(["num_heads", "num_tokens", "op_name"])["s"].median()
        rows = rows.groupby(["num_heads", "num_tokens"]).sum().reset_index()
        yield seconds(rows, f"latent_bmm/{server}", ["num_heads"], {"num_tokens": TOKENS[:-1]})
    if (rows := read(data, "mhc", server, "mhc_module")) is not None:
        rows = rows.groupby(["hidden_size", "num_tokens", "op_name"])["s"].median()
        rows = rows.groupby(["hidden_size", "num_tokens"]).sum().reset_index()
        yield seconds(rows, f"mhc/{server}", ["hidden_size"], {"num_tokens": TOKENS})


def written(surfaces: Sequence[Surfaces], source: str) -> bytes:
    index: dict[str, Any] = {}
    blobs: list[bytes] = []
    first = 0
    for part in surfaces:
        if not part.shapes or np.isnan(part.values).all():
            continue
        numbers = np.clip(np.round(np.nan_to_num(part.values) / STEP), -32767, 32767).astype("<i2")
        blob = zlib.compress(numbers.tobytes(), 9)
        axes = [[int(value) for value in axis] for axis in part.axes]
        shapes = [[int(number) for number in shape] for shape in part.shapes]
        index[part.name] = {"shapes": shapes, "axes": axes, "first": first, "size": len(blob)}
        blobs.append(blob)
        first += len(blob)
    head = json.dumps({"source": source, "parts": index}, separators=(",", ":")).encode()
    return head + b"\n" + b"".join(blobs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--only", action="append", choices=SYSTEMS)
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    total = 0
    for name in options.only or SYSTEMS:
        surfaces = list(parts(options.wheel / "systems" / "data" / name, gpu(SYSTEMS[name])))
        content = written(surfaces, "aiconfigurator-core 0.12.0, reduced")
        (FOLDER / f"{name}.tables").write_bytes(content)
        total += len(content)
        kinds: dict[str, int] = {}
        for part in surfaces:
            kinds[part.name.split("/")[0]] = kinds.get(part.name.split("/")[0], 0) + part.values.size
        print(f"{name}: {len(surfaces)} parts, {len(content):,} bytes; values by kind: {kinds}", flush=True)
    print(f"{total:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
