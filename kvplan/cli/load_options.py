"""Options for which requests arrive, and how."""

from typing import TYPE_CHECKING

from kvplan.cli.fields import Text, complete_profile, option
from kvplan.cli.options import PlanOptions
from kvplan.core.records import dataclass

if TYPE_CHECKING:
    from kvplan.simulate.load import LoadWords


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions(PlanOptions):
    """Options of a load, in addition to a plan; None: not given."""

    # requests
    trace: Text = option("--trace FILE", "Trace file to replay (`kvplan trace stats FILE`).")
    profile: Text = option(
        "--profile NAME", "Named workload to draw requests from (`kvplan trace profiles`).", complete=complete_profile
    )
    prompt_tokens: Text = option("--prompt-tokens N|DIST", "Prompt lengths, e.g. 3000 or lognormal:mean=2k,p95=6k.")
    output_tokens: Text = option("--output-tokens N|DIST", "Output lengths, in the same form.")
    shared_prefix: Text = option("--shared-prefix TOKENS", "Length of the prefix that all prompts share.")
    num_requests: Text = option(
        "--num-requests N", "Number of requests. Default: the whole trace, or 2,000, or 10 per user (up to 20,000)."
    )
    seed: Text = option("--seed N", "Random seed. Default: 0.")
    # arrivals
    rate: Text = option(
        "--rate N", "Requests per second: 4, inf (all at once), 2:60s,8:120s (stages). Default: the trace's own rate."
    )
    arrivals: Text = option(
        "--arrivals KIND", "Gaps between requests: poisson (default), constant, or gamma:SHAPE (below 1: in bursts)."
    )
    max_concurrency: Text = option(
        "--max-concurrency N",
        "Maximum requests in flight, as in `vllm bench serve`; the initial burst is included in the results.",
    )
    bench_command: Text = option(
        "--bench-command TEXT",
        "Read the load of a pasted `vllm bench serve ...` (or SGLang's, guidellm's, aiperf's tool).",
    )
    users: Text = option(
        "--users N", "Number of users who each wait for a response before sending again; instead of --rate."
    )
    think: Text = option("--think TIME", "Time a user waits before sending again. Default: 0s.")
    ramp: Text = option("--ramp TIME", "Time over which the users join. Default: 60s.")


def words_of(options: object) -> "LoadWords":
    """The load that options give, as far as the command has them."""
    from dataclasses import fields

    from kvplan.simulate.load import LoadWords

    return LoadWords(**{field.name: getattr(options, field.name, None) for field in fields(LoadWords)})
