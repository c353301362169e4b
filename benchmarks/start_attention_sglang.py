"""Ask SGLang's own arguments and attention registry what they refuse, and write the table that the plan looks up.

    python -m benchmarks.start_attention_sglang ORACLE            print whether the stored table equals fresh answers
    python -m benchmarks.start_attention_sglang ORACLE --write    store them in kvplan/servers/sglang/attention.json

ORACLE is a folder with SGLang 0.5.23's own code and a stand-in for each GPU (`venv`, `sglang-src`, `scripts`).

Asked: each backend for prefill and for decode beside Triton for the other phase, with each KV dtype, of a plain model
and one with MLA, on each compute capability of start_attention.GPUS: ServerArgs resolved, then the function that
layers/attention/attention_registry.py registers for it. What a class refuses by its name is a rule of the plan
(kvplan/servers/sglang/models.py), and so are both phases together.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import types
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parents[1] / "kvplan" / "servers" / "sglang" / "attention.json"
SOURCE = "sglang 0.5.23, ServerArgs.resolve_once and layers/attention/attention_registry.py"
BACKENDS = (
    "triton", "torch_native", "flex_attention", "fa3", "fa4", "flashinfer", "flashmla", "trtllm_mla", "cutedsl_mla",
    "tokenspeed_mla", "trtllm_mha", "hpc_ops",
)  # fmt: skip
KV_DTYPES = ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2")
PHASES = ("prefill", "decode")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
         "vocab_size": 1024, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
         "torch_dtype": "bfloat16"}  # fmt: skip
MODELS: dict[bool, dict[str, Any]] = {
    False: SIZES | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 2},
    True: SIZES | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_key_value_heads": 4,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "moe_intermediate_size": 128,
    },
}  # fmt: skip


def child(home: Path, gpu: str) -> Iterator[list[Any]]:
    """Yield [latent, phase, backend, KV dtype, reason] of each refusal on one GPU."""
    sys.path[:1] = [str(home / folder) for folder in ("sglang-src", "scripts/sglang", "scripts/common")]
    import oracle_cases  # type: ignore[import-not-found]

    os.environ.update(oracle_cases.ENVIRONMENT)
    import pretend  # type: ignore[import-not-found]

    pretend.load(gpu)
    folder = Path(tempfile.mkdtemp())
    for latent, config in MODELS.items():
        (folder / str(latent)).mkdir()
        (folder / str(latent) / "config.json").write_text(json.dumps(config))
    for latent, phase, backend, kv in itertools.product(MODELS, PHASES, BACKENDS, KV_DTYPES):
        other = PHASES[1 - PHASES.index(phase)]
        words = ["--model-path", str(folder / str(latent)), "--skip-tokenizer-init", f"--{phase}-attention-backend",
                 backend, f"--{other}-attention-backend", "triton", "--kv-cache-dtype", kv]  # fmt: skip
        if reason := refused(words, backend, latent=latent):
            yield [latent, phase, backend, kv, reason]


def refused(words: list[str], backend: str, *, latent: bool) -> str:
    from sglang.srt import server_args  # type: ignore[import-not-found]
    from sglang.srt.layers.attention.attention_registry import (  # type: ignore[import-not-found]
        ATTENTION_BACKENDS,
    )

    args = server_args.prepare_server_args(words)
    try:
        args.resolve_once()
    except (ValueError, AssertionError) as error:
        return str(error)
    config = types.SimpleNamespace(architectures=["Plain"])
    model = types.SimpleNamespace(is_encoder_decoder=False, hf_config=config)
    runner = types.SimpleNamespace(use_mla_backend=latent, server_args=args, model_config=model, init_new_workspace=0)
    try:
        ATTENTION_BACKENDS[backend](runner)
    except (ValueError, AssertionError) as error:
        return "" if "not published" in str(error) else str(error)  # the backend itself asks more than there is here
    except Exception:  # beyond the oracle's reach
        return ""
    return ""


def answers_of(home: Path, gpu: str) -> list[list[Any]]:
    """Refusals on one GPU: a process of the oracle's own Python, since one process plays one GPU."""
    words = [str(home / "venv" / "bin" / "python"), __file__, str(home), "--gpu", gpu]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{gpu}: {done.stderr[-2000:]}")
    answers: list[list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def table_of(answers: dict[int, list[list[Any]]]) -> dict[str, Any]:
    """Rows of refusals: a phase, a backend and a reason, with the values of each axis that it depends on."""
    from benchmarks.start_attention import boxes

    cells: dict[tuple[str, str, str], set[tuple[Any, ...]]] = defaultdict(set)
    for sm, refusals in answers.items():
        for latent, phase, backend, kv, reason in refusals:
            cells[phase, backend, reason].add((latent, kv, sm))
    axes = {"latent": list(MODELS), "kv": list(KV_DTYPES), "sm": list(answers)}
    rows = []
    for (phase, backend, reason), refused_cells in sorted(cells.items()):
        for box in boxes(refused_cells):
            limits = {axis: values for (axis, every), values in zip(axes.items(), box, strict=True)
                      if len(values) < len(every)}  # fmt: skip
            rows.append({"phase": phase, "backend": backend, "why": reason} | limits)
    return {"source": SOURCE, "asked": list(answers), "refused": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("oracle", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--gpu", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.gpu:
        print("\n" + json.dumps(list(child(options.oracle, options.gpu))))
        return 0
    if not (options.oracle / "sglang-src").is_dir():
        print(f"skipped: {options.oracle} has no sglang-src")
        return 0
    from benchmarks.start_attention import GPUS, settle, text_of

    fresh = text_of(table_of({sm: answers_of(options.oracle, gpu) for sm, gpu in GPUS.items()}))
    return settle(TABLE, fresh, write=options.write)


if __name__ == "__main__":
    sys.exit(main())
