"""The options of `kvplan serve`."""

from dataclasses import dataclass
from typing import Annotated

import typer

from kvplan.cli.options import PlanOptions, QuietOption, Text, Texts, complete_gpu, complete_model, option


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions(PlanOptions):
    """`kvplan serve`; None: not said."""

    model: Annotated[
        Text,
        typer.Argument(
            metavar="MODEL|DIR",
            help="Directory with weights, or a model's name: its weights are then random.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None
    gpu: Annotated[
        Texts,
        option(
            "--simulate",
            "--gpu",
            help="Compute nothing: take the memory and the step times that are planned for this GPU.",
            metavar="GPU",
            complete=complete_gpu,
        ),
    ] = None
    max_model_len: Annotated[
        Texts,
        option("--max-model-len", "--ctx", help="Context length. Default: the model's maximum.", metavar="TOKENS"),
    ] = None
    # the face
    host: Annotated[Text, option("--host", help="Address to listen on. Default: 127.0.0.1.", metavar="ADDRESS")] = None
    port: Annotated[
        Text, option("--port", help="Port to listen on; 0: any that is free. Default: 8000.", metavar="N")
    ] = None
    api_key: Annotated[
        Texts, option("--api-key", help="Key that requests under /v1 must bring; repeatable.", metavar="KEY")
    ] = None
    served_model_name: Annotated[
        Texts, option("--served-model-name", help="Name of the model for clients; repeatable.", metavar="NAME")
    ] = None
    lora_modules: Annotated[
        Texts,
        option(
            "--lora-modules",
            help="Adapter of peft's that clients name in place of the model; repeatable. Needs --enable-lora.",
            metavar="NAME=DIR",
        ),
    ] = None
    max_num_queued_reqs: Annotated[
        Text,
        option(
            "--max-num-queued-reqs",
            help="Unfinished requests above which more are refused (503). Default: 1024, or 4 x --max-num-seqs.",
            metavar="N",
        ),
    ] = None
    max_num_queued_tokens: Annotated[
        Text,
        option(
            "--max-num-queued-tokens",
            help="Prompt tokens still to be computed at which more requests are refused (503). Default: no limit.",
            metavar="TOKENS",
        ),
    ] = None
    request_timeout: Annotated[
        Text,
        option("--request-timeout", help="Give a request up after this time: 10m. Default: never.", metavar="TIME"),
    ] = None
    drain_timeout: Annotated[
        Text,
        option("--drain-timeout", help="Time for running requests to end after SIGTERM. Default: 30s.", metavar="TIME"),
    ] = None
    # text
    tokenizer: Annotated[
        Text,
        option(
            "--tokenizer",
            help="Directory with tokenizer.json. Default: the model's; else a stand-in that makes about twice as many "
            "tokens.",
            metavar="DIR",
        ),
    ] = None
    # the twin
    speed: Annotated[
        Text, option("--speed", help="With --simulate: how much faster than planned. Default: 1.", metavar="FACTOR")
    ] = None
    output_tokens: Annotated[
        Text,
        option(
            "--output-tokens",
            help="With --simulate: length of an answer that the request does not end before. Default: 128.",
            metavar="TOKENS",
        ),
    ] = None
    efficiency: Annotated[
        Text,
        option(
            "--efficiency",
            help="With --simulate: fractions of the GPU's peak figures that are reached, as for `simulate`.",
            metavar="SHARES",
        ),
    ] = None
    # the engine
    device: Annotated[
        Text, option("--device", help="cpu, cuda or cuda:N. Default: a GPU if there is one.", metavar="DEVICE")
    ] = None
    speculative_config: Annotated[
        Text,
        option(
            "--speculative-config",
            help='Guess tokens and check several at a time: \'{"method": "ngram", "num_speculative_tokens": 4}\', or '
            '"draft_model" with "model": DIR.',
            metavar="JSON",
        ),
    ] = None
    seed: Annotated[Text, option("--seed", help="Seed of random weights and of sampling.", metavar="N")] = None
    kv_offloading_dir: Annotated[
        Text,
        option(
            "--kv-offloading-dir",
            help="Keep KV in files of this directory too; a restart finds them. With --kv-offloading-size.",
            metavar="PATH",
        ),
    ] = None
    kv_offloading_disk_size: Annotated[
        Text, option("--kv-offloading-disk-size", help="GiB of files in --kv-offloading-dir.", metavar="GIB")
    ] = None
    quiet: QuietOption = False
