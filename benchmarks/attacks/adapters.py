"""Adapters of `kvplan serve --lora-modules`: valid ones, and names, paths, configs and weights that attack.

    python -m benchmarks.attacks.adapters [--count 120] [--seed 5]

Starts a simulated server for each up to its first request: half of the adapters are drawn and valid, the others are the
hostile ones below. A valid one breaks when it is refused; any, when it ends in a traceback, takes a GiB or has no end.
"""

import argparse
import json
import os
import random
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.attacks.outcomes import Outcome, Tally, command, replaced

MODEL = "smollm2-135m"
NUM_LAYERS, BYTES = 30, {"F32": 4, "F16": 2, "BF16": 2}
# (outputs, inputs) of the model's linear layers: hidden size 576, 3 KV heads of 64, MLP 1,536.
LAYERS = {
    "self_attn.q_proj": (576, 576), "self_attn.k_proj": (192, 576), "self_attn.v_proj": (192, 576),
    "self_attn.o_proj": (576, 576), "mlp.gate_proj": (1536, 576), "mlp.up_proj": (1536, 576),
    "mlp.down_proj": (576, 1536),
}  # fmt: skip
CONFIG: Mapping[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
Shapes = Mapping[str, tuple[int, ...]]
WEIGHTS = "adapter_model.safetensors"


def shapes(targets: Sequence[str] = ("self_attn.q_proj",), rank: int = 4, num_layers: int = NUM_LAYERS) -> Shapes:
    """The matrices A and B of every layer's targets."""
    return {
        f"base_model.model.model.layers.{layer}.{target}.lora_{matrix}.weight": shape
        for layer in range(num_layers)
        for target in targets
        for matrix, shape in (("A", (rank, LAYERS[target][1])), ("B", (LAYERS[target][0], rank)))
    }


def header_of(tensors: Shapes, dtype: str = "F32", **changes: Any) -> bytes:
    """A safetensors header; `changes` go into every tensor."""
    header, end = {}, 0
    for name, shape in tensors.items():
        start, end = end, end + shape[0] * shape[1] * BYTES.get(dtype, 4)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end], **changes}
    return json.dumps(header).encode()


def written(folder: Path, config: Any = None, header: bytes | None = None, length: int | None = None) -> Path:
    """An adapter's directory: its config (bytes as they are), and sparse weights behind a header."""
    folder.mkdir()
    content = config if isinstance(config, bytes) else json.dumps({**CONFIG, **(config or {})}).encode()
    (folder / "adapter_config.json").write_bytes(content)
    header = header_of(shapes()) if header is None else header
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(header) if length is None else length) + header)
    try:
        ends = [max(tensor["data_offsets"]) for tensor in json.loads(header).values()]
    except (ValueError, RecursionError):
        ends = []
    os.truncate(folder / WEIGHTS, 8 + len(header) + max(ends, default=0))
    return folder


def valid(rng: random.Random, folder: Path) -> list[str]:
    """One to three adapters as peft writes them, as NAME=DIR or as vLLM's JSON."""
    words = []
    for number in range(rng.randint(1, 3)):
        targets, rank = rng.sample(list(LAYERS), rng.randint(1, 7)), rng.choice((1, 2, 4, 8, 16))
        config = {
            "r": rank, "lora_alpha": rng.choice((1, 16, 64)), "use_rslora": rng.random() < 0.3,
            "target_modules": [target.rpartition(".")[2] for target in targets],
        }  # fmt: skip
        header = header_of(shapes(targets, rank, rng.choice((1, 12, 30))), rng.choice(list(BYTES)))
        path = written(folder / f"valid{number}", config, header)
        name = rng.choice(("sql", "a.b-c_d", "org/name", "日本", f"v{number}")) + str(number)
        words.append(json.dumps({"name": name, "path": str(path)}) if rng.random() < 0.3 else f"{name}={path}")
    return words


def texts(good: str) -> Iterator[tuple[str, list[str]]]:
    """Values of the option alone."""
    for path in (
        "/etc",
        "/etc/passwd",
        "../../../../etc",
        "/proc/self",
        "/dev/zero",
        "/nowhere",
        "",
        "\x1b[31m",
        "~root",
    ):
        yield f"path {path!r}", [f"x={path}"]
    for name in ("", "../../x", "a\nb", "\x1b[31m", MODEL, '"\\', "a" * 10_000, "\ud800", "__proto__"):
        yield f"name {name[:20]!r}", [f"{name}={good}"]
    yield "no equals sign", ["x"]
    yield "a name twice", [f"x={good}", f"x={good}"]
    for text in ('{"name":"x"}', '{"name":1,"path":2}', "[" * 5000, "{" * 5000, '{"name":"x","path":"/x","more":1}'):
        yield f"JSON {text[:20]}", [text]
    yield "base_model_name that climbs", [json.dumps({"name": "x", "path": good, "base_model_name": "../../y"})]


def configs() -> Iterator[tuple[str, Any]]:
    yield "deep", b"[" * 10_000
    yield "NaN", b'{"r":NaN}'
    yield "infinite alpha", b'{"peft_type":"LORA","r":4,"lora_alpha":1e999,"target_modules":["q_proj"]}'
    for rank in (10**9, 0, -4, "4", None, 1.5):
        yield f"rank {rank}", {"r": rank}
    yield "a pattern that backtracks", {"target_modules": "(a+)+$"}
    yield "many targets", {"target_modules": [f"q_proj{n}" for n in range(100_000)]}
    yield "a rank pattern that backtracks", {"rank_pattern": {"(a|a)*$" * 50: 4}}
    yield "many rank patterns", {"rank_pattern": {f"p{n}": 4 for n in range(100_000)}}


def headers() -> Iterator[tuple[str, bytes, int | None]]:
    tensors = shapes()
    yield "of 2^60 bytes", b"{}", 1 << 60
    yield "of 1 GiB", b"{}", 1 << 30
    yield "deep", b"[" * 100_000, None
    yield "overlapping", header_of(tensors, data_offsets=[0, 9216]), None
    yield "negative offsets", header_of(tensors, data_offsets=[-9216, 0]), None
    yield "huge shapes", header_of(tensors, shape=[2**62, 2**62]), None
    yield "unknown dtype", header_of(tensors, dtype="F99"), None
    yield "integers", header_of(tensors, dtype="I32"), None
    yield (
        "a layer of 10^9",
        header_of({name.replace("layers.0.", "layers.999999999."): tensors[name] for name in tensors}),
        None,
    )
    yield "100,000 tensors", header_of(shapes(num_layers=50_000)), None
    yield "A alone", header_of({name: tensors[name] for name in tensors if "lora_A" in name}), None


def special(path: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Files that are none, or endless; each change is made to a copy of a good adapter at `path`."""
    config, weights = path / "adapter_config.json", path / WEIGHTS
    yield "FIFO for a config", lambda: replaced(config, os.mkfifo)
    yield "FIFO for weights", lambda: replaced(weights, os.mkfifo)
    yield "endless config", lambda: replaced(config, lambda path: path.symlink_to("/dev/zero"))
    yield "config of 3 GiB", lambda: os.truncate(config, 3 << 30)
    yield "weights of 3 bytes", lambda: weights.write_bytes(b"123")
    yield "folder for weights", lambda: replaced(weights, Path.mkdir)
    yield (
        "pickled weights",
        lambda: weights.rename(path / "adapter_model.bin").write_bytes(
            b"cos\nsystem\n(S'touch " + str(path / "ran").encode() + b"'\ntR."
        ),
    )


def start(modules: Sequence[str]) -> Outcome:
    """A simulated server's start, up to where it would wait for requests."""
    words = ("serve", MODEL, "--simulate", "l40s", "--ctx", "256", "--port", "0")
    with mock.patch("kvplan.serve.run.serve"):
        return command(*words, "--enable-lora", "--max-lora-rank", "16", "--lora-modules", *modules)


def hostile(root: Path) -> Iterator[tuple[str, list[str]]]:
    good = written(root / "good")
    yield from texts(str(good))
    for number, (name, config) in enumerate(configs()):
        yield f"config: {name}", [f"x={written(root / f'config{number}', config)}"]
    for number, (name, header, length) in enumerate(headers()):
        yield f"header: {name}", [f"x={written(root / f'header{number}', None, header, length)}"]
    for number in range(len(list(special(good)))):
        path = written(root / f"special{number}")
        name, change = list(special(path))[number]
        change()
        yield name, [f"x={path}"]


def attack(count: int, seed: int) -> Tally:
    """Every second adapter is valid; the hostile ones are in random order, again from the first when all are used."""
    rng, tally = random.Random(seed), Tally()
    with tempfile.TemporaryDirectory() as folder:
        attacks = list(hostile(Path(folder)))
        rng.shuffle(attacks)
        for number in range(count // 2):
            place = Path(folder) / f"draw{number}"
            place.mkdir()
            tally.judge("valid", f"adapter {number}", start(valid(rng, place)))
            name, words = attacks[number % len(attacks)]
            tally.judge("hostile", name, start(words))
        if list(Path(folder).rglob("ran")):
            tally.broken.append("a pickle ran")
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=5)
    options = parser.parse_args(argv)
    return attack(options.count, options.seed).closing()


if __name__ == "__main__":
    sys.exit(main())
