"""The options of `kvplan calibrate`."""

from typing import ClassVar

from kvplan.cli.fields import FORCE, QUIET, Text, Texts, complete_gpu, option
from kvplan.cli.options import PlanOptions
from kvplan.core.records import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions(PlanOptions):
    """Options of `kvplan calibrate`; None: not given."""

    takes_contexts: ClassVar[bool] = False

    gpu: Texts = option("--gpu NAME", "The GPU that the server ran on.", complete=complete_gpu)
    max_model_len: Texts = option("--max-model-len, --ctx TOKENS", "The server's context in tokens.")
    bench: Texts = option(
        "--bench FILE",
        "Result files of vllm bench serve, sglang.bench_serving, guidellm, aiperf or InferenceX; repeatable, and "
        "'results/*.json'.",
    )
    prompt_tokens: Text = option("--prompt-tokens N", "Mean prompt length, if a result lacks it.")
    output_tokens: Text = option("--output-tokens N", "Mean output length, if a result lacks it.")
    output: Text = option("--output, -o FILE.json", "File to write, for --calibration.")
    force: bool = option(*FORCE, False)
    quiet: bool = option(*QUIET, False)
