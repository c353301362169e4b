"""Options for which requests arrive, and how."""

from dataclasses import dataclass
from typing import Annotated

from kvplan.cli.options import PlanOptions, Text, complete, option


def complete_profile(incomplete: str) -> list[str]:
    return complete("workloads.yaml", incomplete)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions(PlanOptions):
    """Options of a load, in addition to a plan; None: not given."""

    # requests
    trace: Annotated[
        Text, option("--trace", help="Trace file to replay (`kvplan trace stats FILE`).", metavar="FILE")
    ] = None
    profile: Annotated[
        Text,
        option(
            "--profile",
            help="Named workload to draw requests from (`kvplan trace profiles`).",
            metavar="NAME",
            complete=complete_profile,
        ),
    ] = None
    prompt_tokens: Annotated[
        Text, option("--prompt-tokens", help="Prompt lengths, e.g. 3000 or lognormal:mean=2k,p95=6k.", metavar="N|DIST")
    ] = None
    output_tokens: Annotated[
        Text, option("--output-tokens", help="Output lengths, in the same form.", metavar="N|DIST")
    ] = None
    shared_prefix: Annotated[
        Text, option("--shared-prefix", help="Length of the prefix that all prompts share.", metavar="TOKENS")
    ] = None
    num_requests: Annotated[
        Text,
        option(
            "--num-requests",
            help="Number of requests. Default: the whole trace, or 2,000, or 10 per user (up to 20,000).",
            metavar="N",
        ),
    ] = None
    seed: Annotated[Text, option("--seed", help="Random seed. Default: 0.", metavar="N")] = None
    # arrivals
    rate: Annotated[
        Text,
        option(
            "--rate",
            help="Requests per second: 4, inf (all at once), 2:60s,8:120s (stages). Default: the trace's own rate.",
            metavar="N",
        ),
    ] = None
    arrivals: Annotated[
        Text,
        option(
            "--arrivals",
            help="Gaps between requests: poisson (default), constant, or gamma:SHAPE (below 1: in bursts).",
            metavar="KIND",
        ),
    ] = None
    max_concurrency: Annotated[
        Text,
        option(
            "--max-concurrency",
            help="Maximum requests in flight, as in `vllm bench serve`; the initial burst is included in the results.",
            metavar="N",
        ),
    ] = None
    bench_command: Annotated[
        Text,
        option(
            "--bench-command",
            help="Read the load of a pasted `vllm bench serve ...` (or SGLang's, guidellm's, aiperf's tool).",
            metavar="TEXT",
        ),
    ] = None
    users: Annotated[
        Text,
        option(
            "--users",
            help="Number of users who each wait for a response before sending again; instead of --rate.",
            metavar="N",
        ),
    ] = None
    think: Annotated[
        Text, option("--think", help="Time a user waits before sending again. Default: 0s.", metavar="TIME")
    ] = None
    ramp: Annotated[Text, option("--ramp", help="Time over which the users join. Default: 60s.", metavar="TIME")] = None
