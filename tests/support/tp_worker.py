"""One rank of a tensor-parallel engine: runs the jobs of a JSON file, prints an answer per job, a line of JSON each."""

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.draft_rules import SpeculativeConfig
from engine.request import RequestOutput
from kvplan.cli.main import end
from kvplan.core.errors import KvplanError


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """Tokens of the job's prompts, and this rank's bytes; or why the engine refused."""
    draft = job.get("draft")
    speculative = None if draft is None else SpeculativeConfig("draft_model", 3, model=draft)
    try:
        engine = Engine(Path(job["folder"]), EngineConfig(**job["config"], speculative_config=speculative))
    except KvplanError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    for name, path in job.get("adapters", {}).items():
        engine.load_adapter(name, path)
    rank = int(os.environ["RANK"])
    prompts = [prompt[rank:] for prompt in job["prompts"]] if job.get("own_prompts") else job["prompts"]
    params = SamplingParams(**job["params"])
    params_of_prompts = [
        replace(params, max_tokens=n) for n in job.get("max_tokens", [params.max_tokens] * len(prompts))
    ]
    schedule: list[Any] = []
    engine.on_schedule = lambda batch: schedule.append(
        ([[seq.request_id, n] for seq, n in batch.num_tokens.items()], [seq.request_id for seq in batch.preempted])
    )
    outputs = with_adapters(engine, job, params) if "adapters" in job else engine.generate(prompts, params_of_prompts)
    memory = engine.memory_report()
    return {
        "tokens": [output.token_ids for output in outputs],
        "logprobs": [scores_of(output) for output in outputs],
        "schedule": [step for step in schedule if step[0]],
        "num_preemptions": engine.stats().num_preemptions,
        "weights": memory.weights,
        "buffers": memory.buffers,
        "block_bytes": memory.block_bytes,
        "lora": memory.lora,
        "activations": memory.activations,
        "kv_cache": memory.kv_cache,
        "num_blocks": memory.num_blocks,
        "guesses": None if (guesses := engine.draft_stats()) is None else guesses.counts,
    }


def scores_of(output: RequestOutput) -> list[Any]:
    rows = [*(output.logprobs or ()), *(output.prompt_logprobs or ())]
    return [None if row is None else asdict(row) for row in rows]


def with_adapters(engine: Engine, job: dict[str, Any], params: SamplingParams) -> list[RequestOutput]:
    """One batch, a request of each adapter in turn and one of none."""
    names = [*job["adapters"], None]
    ids = [engine.add_request(prompt, params, adapter=names[i % len(names)]) for i, prompt in enumerate(job["prompts"])]
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
    return [outputs[request_id] for request_id in ids]


def main() -> None:
    torch.set_num_threads(1)
    for job in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        print(json.dumps(answer(job)), flush=True)
    end(0)


if __name__ == "__main__":
    main()
