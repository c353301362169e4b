"""The options of `kvplan calibrate`."""

from dataclasses import dataclass
from typing import Annotated

from kvplan.cli.options import ForceOption, PlanOptions, QuietOption, Text, complete_gpu, option


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions(PlanOptions):
    """Options of `kvplan calibrate`; None: not given."""

    gpu: Annotated[
        list[str] | None,
        option("--gpu", help="The GPU that the server ran on.", metavar="NAME", complete=complete_gpu),
    ] = None
    max_model_len: Annotated[
        list[str] | None,
        option("--max-model-len", "--ctx", help="The server's context in tokens.", metavar="TOKENS"),
    ] = None
    bench: Annotated[
        list[str] | None,
        option(
            "--bench",
            help="Result files of vllm bench serve, sglang.bench_serving, guidellm, aiperf or InferenceX; repeatable, "
            "and 'results/*.json'.",
            metavar="FILE",
        ),
    ] = None
    prompt_tokens: Annotated[
        Text, option("--prompt-tokens", help="Mean prompt length, if a result lacks it.", metavar="N")
    ] = None
    output_tokens: Annotated[
        Text, option("--output-tokens", help="Mean output length, if a result lacks it.", metavar="N")
    ] = None
    output: Annotated[Text, option("--output", "-o", help="File to write, for --calibration.", metavar="FILE.json")] = (
        None
    )
    force: ForceOption = False
    quiet: QuietOption = False
