"""What a server makes of the data sheet: shares of it that are reached, and seconds that are lost on the way.

Fitted to published results of real servers by `python -m benchmarks.timing.fit` (tests/facts/time_cases.csv names each
result and its source); the errors on sources, models and GPUs that a fit has not seen are in docs/accuracy.md.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from kvplan.core.records import dataclass
from kvplan.servers.plans import Plan


@dataclass(frozen=True, slots=True)
class Constants:
    """One server's.

    weights, experts, kv  shares of the memory's bandwidth that dense weights, experts and keys and values are read at
    widened               the same of experts that are stored in fewer bits than this GPU multiplies
    flops, attention      shares of the FLOP rate that matmuls and (query, key) pairs reach
    layer                 seconds that a layer adds to a step: kernels that start and end
    prefill_layer         seconds below which no layer stays where prompts are computed: kernels launched one by one
    step, sequence        seconds that a step takes of the server itself, and each sequence in it
    switch, switch_s      an all-reduce over NVLink or Infinity Fabric: share of the link, seconds for each doubling of
                          ranks
    switch_large          the share that is reached by what is beyond SMALL_BYTES of an all-reduce
    pcie, pcie_s          the same over PCIe
    request, crowd, prompt_token  seconds that a request spends outside of the steps, those for each other request that
                          is answered meanwhile, and those of each of its prompt tokens
    first_step, first_sequence  what vLLM's first engine (0.7 and older), which prepares its steps one after the other
                          in Python, adds to a step, and for each sequence
    """

    weights: float
    experts: float
    widened: float
    kv: float
    flops: float
    attention: float
    layer: float
    prefill_layer: float
    step: float
    sequence: float
    switch: float
    switch_s: float
    switch_large: float
    pcie: float
    pcie_s: float
    request: float
    crowd: float
    prompt_token: float
    first_step: float
    first_sequence: float


V1: Final = Constants(
    weights=0.87,
    experts=0.95,
    widened=0.64,
    kv=0.85,
    flops=0.42,
    attention=0.50,
    layer=50e-6,
    prefill_layer=145e-6,
    step=0.75e-3,
    sequence=10e-6,
    switch=0.15,
    switch_s=1.95e-6,
    switch_large=0.33,
    pcie=0.082,
    pcie_s=30e-6,
    request=14e-3,
    crowd=0.12e-3,
    prompt_token=3e-6,
    first_step=2.8e-3,
    first_sequence=65e-6,
)


# Up to so much vLLM's own all-reduce sends; NCCL's rings take over beyond.
SMALL_BYTES: Final = 8 * 2**20  # vllm/distributed/device_communicators/custom_all_reduce.py: max_size


def scaled(constants: Constants, factors: Mapping[str, float]) -> Constants:
    """Constants with what the device, the server, the link and a request take multiplied; 1 leaves them as they are."""
    device, server, link, request = (factors[name] for name in ("device", "server", "link", "request"))
    return replace(
        constants,
        weights=constants.weights / device,
        experts=constants.experts / device,
        widened=constants.widened / device,
        kv=constants.kv / device,
        flops=constants.flops / device,
        attention=constants.attention / device,
        layer=constants.layer * server,
        prefill_layer=constants.prefill_layer * server,
        step=constants.step * server,
        sequence=constants.sequence * server,
        switch=constants.switch / link,
        switch_large=constants.switch_large / link,
        switch_s=constants.switch_s * link,
        pcie=constants.pcie / link,
        pcie_s=constants.pcie_s * link,
        request=constants.request * request,
        crowd=constants.crowd * request,
        prompt_token=constants.prompt_token * request,
    )


def adapted(constants: Constants, plan: Plan) -> Constants:
    """Constants fitted to vLLM's second engine, for the engine of a plan."""
    release = plan.request.release
    if release.runs_first_engine:
        return replace(
            constants,
            step=constants.step + constants.first_step,
            sequence=constants.sequence + constants.first_sequence,
        )
    return constants


def constants_of(plan: Plan) -> Constants:
    """Those of a plan's server."""
    return adapted(V1, plan)
