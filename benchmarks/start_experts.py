"""Ask vLLM which kernels of experts (--moe-backend) it creates, and how wide it pads their weights.

    python -m benchmarks.start_experts ask HOME --gpu H100 [--only WORD] -o H100.jsonl
    python -m benchmarks.start_experts ask HOME --gpu A100 --like H100.jsonl B200.jsonl -o A100.jsonl

HOME is the folder of the oracle as for start_quantization.py, whose checkpoints are asked, and with them experts that
are not quantized and each method applied while loading. vLLM's own FusedMoEFactory creates the experts of one layer on
the meta device with each name of its --moe-backend: its quantization method chooses the kernel's class, or refuses.
FlashInfer, its precompiled and CuteDSL kernels, `b12x` and `hpc` count as installed; humming-kernels, which vLLM's
wheel requires, must be.

Asked: 8.0, 8.9, 9.0, 10.0 and 12.0, in bfloat16; all combinations of ACTIVATIONS and FLAGS at one aligned shape; ENDS
with each combination of `spread` and `lora`, and if they differ a grid of WIDTHS, HIDDEN and ranks.
Derived: that shapes are refused alike for every activation, that padding is in multiples of UNITS, and that a backend
which starts with the same activations and kernels as on another GPU (--like) takes there what it takes on that one
(start_experts_table.py, which writes the table that plans look up). Of the other capabilities, 8.6, 10.3 and 12.1 are
taken for the lower one of their generation, and those before 8.0 are not refused.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__" and sys.argv[1:2] == ["play"]:  # in the oracle's Python, as a file
    sys.path[0] = str(Path(__file__).parents[1])  # in place of this folder, whose names would shadow modules

from benchmarks import start_quantization as quantization
from benchmarks.start_quantization import GPUS, Json

ACTIVATIONS = ("silu", "gelu_tanh", "swigluoai", "swigluoai_uninterleave", "swiglustep", "situ", "relu2_no_mul")
# plain: a softmax router that does not renormalize; spread: expert parallelism; lora: adapters.
FLAGS = ("plain", "spread", "lora")
WIDTHS = (16, 32, 64, 96, 128, 192, 288, 384, 512, 704)  # of an expert on a rank
HIDDEN = (192, 256, 288, 1024, 2880)
USUAL = (512, 1024, 2)  # width, hidden, ranks
ENDS = (USUAL, *((width, 1024, 2) for width in (16, 48, 96, 192, 288, 704)), (96, 1024, 4),
        *((512, hidden, 2) for hidden in (128, 192, 288, 384, 2880)))  # fmt: skip
UNITS = (1, 32, 64, 128, 256)
KERNELS = (  # of packages that a CPU's oracle lacks
    "has_hpc", "has_flashinfer_b12x_moe", "has_flashinfer_cutedsl_moe_nvfp4",
    "has_flashinfer_cutedsl_grouped_gemm_nt_masked",
)  # fmt: skip
PADS = ("mxfp4", "fp8_block", "unquantized")  # schemes that some kernel pads
Kind = tuple[str, ...]  # activation, then flags
Shape = tuple[int, int, int]
Started = list[tuple[Shape, bool]]


def kinds() -> Iterator[Kind]:
    """Activations with no flag, with each, and with several."""
    several = [flags for n in range(len(FLAGS) + 1) for flags in itertools.combinations(FLAGS, n)]
    yield from ((activation, *flags) for flags in several for activation in ACTIVATIONS)


# --- in the oracle's Python ------------------------------------------------------------------------------------------

Create = Callable[[str, Kind, Shape], tuple[str, int, int]]  # -> kernel's name, padded width and hidden


def creator(server: Any, config: Any, dtype: str) -> Create:
    """A function that creates the experts of a layer."""
    import torch
    from vllm.config import LoRAConfig, set_current_vllm_config  # type: ignore[import-not-found]
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory  # type: ignore[import-not-found]
    from vllm.utils.torch_utils import set_default_torch_dtype  # type: ignore[import-not-found]

    torch_dtype, parallel, adapters = getattr(torch, dtype), config.parallel_config, LoRAConfig(max_loras=1)

    def create(backend: str, kind: Kind, shape: Shape) -> tuple[str, int, int]:
        activation, *flags = kind
        width, hidden, ranks = shape
        spread = "spread" in flags
        config.kernel_config.moe_backend = backend
        config.lora_config = adapters if "lora" in flags else None
        config.compilation_config.static_forward_context.clear()
        parallel.enable_expert_parallel, parallel.tensor_parallel_size = spread, ranks
        server.pretend.install_groups(tp=ranks, pp=1, ep=ranks if spread else 1, pp_rank=0, dcp=1, pcp=1)
        names = ("gate_proj", "down_proj", None if activation.endswith("no_mul") else "up_proj")
        played = (set_current_vllm_config(config), set_default_torch_dtype(torch_dtype), torch.device("meta"),
                  server.pretend._cuda_to_meta())  # fmt: skip
        with played[0], played[1], played[2], played[3]:
            layer = FusedMoEFactory(
                num_experts=8, top_k=2, hidden_size=hidden, intermediate_size=width * (1 if spread else ranks),
                params_dtype=torch_dtype, prefix=quantization.EXPERTS, activation=activation, ckpt_names=names,
                has_bias=activation == "swigluoai", quant_config=config.quant_config, renormalize="plain" not in flags,
            )  # fmt: skip
        chosen = [value.name for name, value in vars(layer.routed_experts.quant_method).items()
                  if isinstance(value, Enum) and name.endswith("backend")]  # fmt: skip
        sizes = layer.routed_experts.moe_config
        return chosen[0] if chosen else "", sizes.intermediate_size_per_partition, sizes.hidden_dim

    return create


def unit(sizes: Iterable[tuple[int, int]]) -> int:
    """The multiple to which (size, padded size) pairs were padded."""
    pairs = list(sizes)
    return next(n for n in UNITS if all(-(-size // n) * n == padded for size, padded in pairs))


def cells(create: Create, backend: str, *, pads: bool) -> Iterator[Json]:
    """What a backend starts with: rows of {kernel, units of width and hidden, kinds}, then rows of {flags, shapes}."""
    answers_of: dict[tuple[str, int, int], list[Kind]] = defaultdict(list)
    for kind in kinds():
        if len(kind) == 3 and not answers_of:  # after all activations with each flag alone
            break
        answers = answered(create, backend, kind, ENDS if pads else (USUAL,))
        padded = {shape: answer for shape, answer in answers.items() if isinstance(answer, tuple)}
        if USUAL in padded:
            width = unit((shape[0], answer[1]) for shape, answer in padded.items())
            hidden = unit((shape[1], answer[2]) for shape, answer in padded.items())
            answers_of[padded[USUAL][0], width, hidden].append(kind)
    for (kernel, *units), alike_kinds in answers_of.items():
        yield {"backend": backend, "kernel": kernel, "units": units, "kinds": alike_kinds}
    every = list(itertools.chain.from_iterable(answers_of.values())) or [(ACTIVATIONS[0],)]
    known: list[Started] = []
    for flags in ((), ("spread",), ("lora",), ("spread", "lora")):
        alike = next((kind for kind in every if set(kind[1:]) - {"plain"} == set(flags)), None)
        if alike is not None and (pairs := shapes(create, backend, alike, known)):
            known.append(pairs)
            yield {"backend": backend, "flags": flags, "shapes": pairs}


def answered(create: Create, backend: str, kind: Kind, cases: Iterable[Shape]) -> dict[Shape, Any]:
    """The server's answers or refusals; no others once it does not know the backend for this scheme."""
    answers: dict[Shape, Any] = {}
    for shape in cases:
        try:
            answers[shape] = create(backend, kind, shape)
        except Exception as error:
            answers[shape] = quantization.reason(error)
            if "is not supported for" in answers[shape]:
                break
    return answers


def shapes(create: Create, backend: str, kind: Kind, known: list[Started]) -> Started:
    """Which shapes start: those of ENDS, and if they differ, of the grid; none if nothing does.

    known  answers with other flags, which hold here, too, if those for the ends are the same
    """
    ends = started(answered(create, backend, kind, ENDS))
    if same := next((other for other in known if other[: len(ends)] == ends), None):
        return same
    if len({starts for _, starts in ends}) > 1:
        grid = itertools.product(WIDTHS, HIDDEN, (2, 4))
        return ends + started(answered(create, backend, kind, grid))
    return ends if any(starts for _, starts in ends) else []


def started(answers: dict[Shape, Any]) -> Started:
    return [(shape, isinstance(answer, tuple)) for shape, answer in answers.items()]


def starts_alike(create: Create, backend: str, rows: list[Json]) -> bool:
    """True if a backend starts with the same activations, without flags, and the same kernels as in another's rows."""
    kernels = {kind[0]: row["kernel"] for row in rows for kind in row.get("kinds", ()) if len(kind) == 1}
    for activation in ACTIVATIONS:
        answer = answered(create, backend, (activation,), (USUAL,)).get(USUAL)
        if (answer[0] if isinstance(answer, tuple) else None) != kernels.get(activation):
            return False
    return bool(kernels)


def by_backend(files: list[Path]) -> dict[tuple[str, str], list[list[Json]]]:
    """Rows of other GPUs by scheme and backend."""
    answers: dict[tuple[str, str], list[list[Json]]] = defaultdict(list)
    for file in files:
        for line in file.read_text().splitlines():
            row = json.loads(line)
            names = dict.fromkeys(cell["backend"] for cell in row.get("cells", ()))
            for name in names:
                answers[row["key"], name].append([cell for cell in row["cells"] if cell["backend"] == name])
    return answers


def count_as_installed() -> None:
    """Let vLLM find the packages of KERNELS, in the modules that have asked for them and in those to come."""

    answers: dict[str, Callable[[], Any]] = dict.fromkeys(KERNELS, lambda: True)
    answers["get_b12x_fused_moe"] = lambda: SimpleNamespace(is_supported=lambda: True)
    for module in list(sys.modules.values()):
        for name in answers.keys() & vars(module).keys():
            setattr(module, name, answers[name])


def play(home: Path, gpu: str, out: Path, files: list[Path]) -> None:
    os.environ["VLLM_HAS_FLASHINFER_CUBIN"] = "1"
    server = quantization.Vllm(home, gpu)
    from vllm.config.kernel import MoEBackend  # type: ignore[import-not-found]
    from vllm.utils.import_utils import has_humming  # type: ignore[import-not-found]

    if not has_humming():
        raise SystemExit("humming-kernels, which vLLM requires, is not installed in vllm-extra")
    count_as_installed()
    like = by_backend(files)
    sm = GPUS[gpu]
    dtype = "float16" if sm < 80 else "bfloat16"
    with out.open("w") as file:
        for question in json.load(sys.stdin):
            start, head = time.time(), {"key": question["key"], "sm": sm}
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "config.json").write_text(json.dumps(question["config"] | {"dtype": dtype}))
                try:
                    config = server.config(folder, dtype, question["online"])
                except (Exception, SystemExit) as error:
                    print(json.dumps(head | {"refused": quantization.reason(error)}), file=file)
                    continue
            create = creator(server, config, dtype)
            pads = any(word in question["key"] for word in PADS)
            rows: list[Json] = []
            for name in MoEBackend.__args__:
                alike = next((rows for rows in like[question["key"], name] if starts_alike(create, name, rows)), None)
                rows += cells(create, name, pads=pads) if alike is None else alike
            print(json.dumps(head | {"cells": rows}), file=file, flush=True)
            print(f"{gpu} {question['key']}: {time.time() - start:.1f} s", file=sys.stderr, flush=True)


# --- questions -------------------------------------------------------------------------------------------------------


def questions(only: str) -> Iterator[Json]:
    """A small config of every scheme that kvplan reads, of none, and of every method applied while loading."""
    from kvplan.models import catalog  # only here: the oracle's Python lacks kvplan's packages
    from kvplan.servers.plans.weights import ONLINE_METHODS

    tiny, cases = quantization.TINY, list(quantization.questions(""))
    cases += [{"key": f"online {name}", "checkpoint": None, "online": name} for name in ONLINE_METHODS]
    cases.append({"key": "unquantized", "checkpoint": None, "online": None})
    seen = {quantization.key_of(checkpoint) for checkpoint in quantization.unread()}  # never sized
    for question in cases:
        key = question["key"]
        if key in seen or only not in key:
            continue
        seen.add(key)
        config = quantization.GPT_OSS if key.startswith("mxfp4") else tiny
        stored = {"quantization_config": question["checkpoint"]} if question["checkpoint"] else {}
        yield {"key": key, "online": question["online"], "config": config | stored}
    if only in "fp8 mxfp4 g32":
        yield {"key": "fp8 mxfp4 g32", "online": None, "config": dict(catalog.load("deepseek-v4-flash").config)}


def ask(home: Path, gpu: str, only: str, out: Path, like: list[Path]) -> None:
    """Run `play` in the oracle's Python."""
    words = [home / "venv" / "bin" / "python", __file__, "play", home, "--gpu", gpu, "-o", out]
    words += ["--like", *like] if like else []
    subprocess.run([str(word) for word in words], input=json.dumps(list(questions(only))), text=True, check=True,
                   env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"})  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("ask", "play"):
        asking = commands.add_parser(name)
        asking.add_argument("home", type=Path)
        asking.add_argument("--gpu", choices=GPUS, default="H100")
        asking.add_argument("--only", default="", help="part of a scheme's name")
        asking.add_argument("--like", type=Path, nargs="+", default=[], help="answers of other GPUs")
        asking.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    if args.command == "ask":
        ask(args.home.resolve(), args.gpu, args.only, args.out.resolve(), [file.resolve() for file in args.like])
    else:
        play(args.home, args.gpu, args.out, args.like)


if __name__ == "__main__":
    main()
