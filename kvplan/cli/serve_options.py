"""The options of `kvplan serve`."""

from dataclasses import dataclass
from typing import Annotated

import typer

from kvplan.cli.engine_options import OffloadingDiskOption, SpeculativeConfigOption
from kvplan.cli.options import PlanOptions, QuietOption, Text, Texts, complete_gpu, complete_model, option


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(PlanOptions):
    """Options of `kvplan serve`; None: not given."""

    model: Annotated[
        Text,
        typer.Argument(
            metavar="MODEL|DIR",
            help="Directory with weights, or a model name (weights are then random).",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None
    gpu: Annotated[
        Texts,
        option(
            "--simulate",
            "--gpu",
            help="Simulate a server on this GPU: planned memory and step times; no model is run.",
            metavar="GPU",
            complete=complete_gpu,
        ),
    ] = None
    max_model_len: Annotated[
        Texts,
        option("--max-model-len", "--ctx", help="Context length. Default: the model's maximum.", metavar="TOKENS"),
    ] = None
    # the API
    host: Annotated[Text, option("--host", help="Address to listen on. Default: 127.0.0.1.", metavar="ADDRESS")] = None
    port: Annotated[Text, option("--port", help="Port to listen on; 0: any free port. Default: 8000.", metavar="N")] = (
        None
    )
    api_key: Annotated[
        Texts, option("--api-key", help="API key required for requests under /v1; repeatable.", metavar="KEY")
    ] = None
    served_model_name: Annotated[
        Texts, option("--served-model-name", help="Name of the model for clients; repeatable.", metavar="NAME")
    ] = None
    lora_modules: Annotated[
        Texts,
        option(
            "--lora-modules",
            help="PEFT adapter that clients request by NAME instead of the model; repeatable. Needs --enable-lora.",
            metavar="NAME=DIR",
        ),
    ] = None
    max_num_queued_reqs: Annotated[
        Text,
        option(
            "--max-num-queued-reqs",
            help="Maximum number of unfinished requests; more are rejected (503). Default: 1024, or 4 x "
            "--max-num-seqs.",
            metavar="N",
        ),
    ] = None
    max_num_queued_tokens: Annotated[
        Text,
        option(
            "--max-num-queued-tokens",
            help="Maximum number of waiting prefill tokens; more requests are rejected (503). Default: no limit.",
            metavar="TOKENS",
        ),
    ] = None
    request_timeout: Annotated[
        Text,
        option("--request-timeout", help="Abort a request after this time, e.g. 10m. Default: never.", metavar="TIME"),
    ] = None
    drain_timeout: Annotated[
        Text,
        option(
            "--drain-timeout", help="Time for running requests to finish after SIGTERM. Default: 30s.", metavar="TIME"
        ),
    ] = None
    # text
    tokenizer: Annotated[
        Text,
        option(
            "--tokenizer",
            help="Directory with tokenizer.json. Default: the model's, or a fallback tokenizer that makes about "
            "twice as many tokens.",
            metavar="DIR",
        ),
    ] = None
    # the simulated server
    speed: Annotated[
        Text, option("--speed", help="With --simulate: how much faster than planned. Default: 1.", metavar="FACTOR")
    ] = None
    output_tokens: Annotated[
        Text,
        option(
            "--output-tokens",
            help="With --simulate: output length if the request sets no limit. Default: 128.",
            metavar="TOKENS",
        ),
    ] = None
    tier: Annotated[
        Texts,
        option(
            "--tier",
            help="With --simulate: host memory for prompts' KV cache, then files: cpu=64GiB@25GB/s; repeatable.",
            metavar="TIER",
        ),
    ] = None
    efficiency: Annotated[
        Text,
        option(
            "--efficiency",
            help="With --simulate: achieved fractions of the GPU's peak bandwidth and FLOP/s, as for `simulate`.",
            metavar="SHARES",
        ),
    ] = None
    # the engine
    device: Annotated[
        Text, option("--device", help="cpu, cuda or cuda:N. Default: a GPU if there is one.", metavar="DEVICE")
    ] = None
    speculative_config: SpeculativeConfigOption = None
    seed: Annotated[Text, option("--seed", help="Seed of random weights and of sampling.", metavar="N")] = None
    kv_offloading_dir: Annotated[
        Text,
        option(
            "--kv-offloading-dir",
            help="Also keep offloaded KV in files in this directory, reused after a restart. With "
            "--kv-offloading-size.",
            metavar="PATH",
        ),
    ] = None
    kv_offloading_disk_size: OffloadingDiskOption = None
    quiet: QuietOption = False
