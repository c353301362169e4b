"""The options of `kvplan serve` and `kvplan mcp`."""

from typing import ClassVar, Literal

from kvplan.cli.engine_options import OFFLOADING_DISK, SPECULATIVE_CONFIG
from kvplan.cli.fields import QUIET, Text, Texts, argument, complete_gpu, complete_model, option
from kvplan.cli.options import PlanOptions
from kvplan.core.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(PlanOptions):
    """Options of `kvplan serve`; None: not given."""

    takes_contexts: ClassVar[bool] = False

    model: Text = argument(
        "MODEL|DIR", "Directory with weights, or a model name (weights are then random).", complete=complete_model
    )
    gpu: Texts = option(
        "--simulate, --gpu GPU",
        "Simulate a server on this GPU: planned memory and step times; no model is run.",
        complete=complete_gpu,
    )
    max_model_len: Texts = option("--max-model-len, --ctx TOKENS", "Context length. Default: the model's maximum.")
    # the API
    host: Text = option("--host ADDRESS", "Address to listen on. Default: 127.0.0.1.")
    port: Text = option("--port N", "Port to listen on; 0: any free port. Default: 8000.")
    api_key: Texts = option("--api-key KEY", "API key required for requests under /v1; repeatable.")
    served_model_name: Texts = option("--served-model-name NAME", "Name of the model for clients; repeatable.")
    lora_modules: Texts = option(
        "--lora-modules NAME=DIR",
        "PEFT adapter that clients request by NAME instead of the model; repeatable. Needs --enable-lora.",
    )
    max_num_queued_reqs: Text = option(
        "--max-num-queued-reqs N",
        "Maximum number of unfinished requests; more are rejected (503). Default: 1024, or 4 x --max-num-seqs.",
    )
    max_num_queued_tokens: Text = option(
        "--max-num-queued-tokens TOKENS",
        "Maximum number of waiting prefill tokens; more requests are rejected (503). Default: no limit.",
    )
    request_timeout: Text = option(
        "--request-timeout TIME", "Abort a request after this time, e.g. 10m. Default: never."
    )
    drain_timeout: Text = option(
        "--drain-timeout TIME", "Time for running requests to finish after SIGTERM. Default: 30s."
    )
    strict_fields: bool = option(
        "--strict-fields", "Reject unknown and unsupported request fields (400) instead of logging them once.", False
    )
    # text
    tokenizer: Text = option(
        "--tokenizer DIR",
        "Directory with tokenizer.json. Default: the model's, or a fallback tokenizer that makes about twice as "
        "many tokens.",
    )
    # the simulated server
    speed: Text = option("--speed FACTOR", "With --simulate: how much faster than planned. Default: 1.")
    output_tokens: Text = option(
        "--output-tokens TOKENS", "With --simulate: output length if the request sets no limit. Default: 128."
    )
    tier: Texts = option(
        "--tier TIER", "With --simulate: host memory for prompts' KV cache, then files: cpu=64GiB@25GB/s; repeatable."
    )
    efficiency: Text = option(
        "--efficiency SHARES",
        "With --simulate: achieved fractions of the GPU's peak bandwidth and FLOP/s, as for `simulate`.",
    )
    replicas: Text = option(
        "--replicas N", "With --simulate: so many servers in this process, on ports in a row from --port. Default: 1."
    )
    kv_events_config: Text = option(
        "--kv-events-config JSON",
        "With --simulate: publish stored and evicted KV blocks over ZMQ, as vLLM does: "
        '{"enable_kv_cache_events": true}.',
    )
    faults: Text = option(
        "--faults SHARES", "With --simulate: shares of requests that fail, e.g. rate_limit=5%,server_error=1%."
    )
    noise: Text = option(
        "--noise SHARE", "With --simulate: standard deviation of step times, as a share, e.g. 0.1. Default: 0."
    )
    startup_time: Text = option("--startup-time TIME", "With --simulate: time before it listens, e.g. 90s.")
    clock: Literal["wall", "virtual"] | None = option(
        "--clock wall|virtual", "With --simulate: virtual: nobody waits, and every time is the plan's. Default: wall."
    )
    link: Text = option(
        "--link SIZE/s[,TIME]",
        "With --simulate and --kv-transfer-config: bandwidth by which a decode server gets prompts' KV, and a latency: "
        "50GB/s,2ms.",
    )
    # the engine
    device: Text = option("--device DEVICE", "cpu, cuda or cuda:N. Default: a GPU if there is one.")
    speculative_config: Text = option(*SPECULATIVE_CONFIG)
    seed: Text = option("--seed N", "Seed of random weights and of sampling.")
    kv_offloading_dir: Text = option(
        "--kv-offloading-dir PATH",
        "Also keep offloaded KV in files in this directory, reused after a restart. With --kv-offloading-size.",
    )
    kv_offloading_disk_size: Text = option(*OFFLOADING_DISK)
    quiet: bool = option(*QUIET, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class McpOptions:
    """Options of `kvplan mcp`: which tools, and whether they are only listed."""

    tools: Text = option("--tools NAMES", "Tools to offer, separated by commas. Default: all.")
    listing: bool = option("--list", "Print the tools with their schemas as JSON, and end.", False)
