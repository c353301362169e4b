"""Step-time constants: achieved fractions of the GPU's data-sheet rates, and overheads in seconds.

Fitted to published results of real servers by `python -m benchmarks.timing.fit` (tests/facts/time_cases.csv names each
result and its source); errors on held-out sources, models and GPUs are in docs/accuracy.md.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from kvplan.core.records import dataclass
from kvplan.servers.plans import Plan


@dataclass(frozen=True, slots=True)
class Constants:
    """Step-time constants of one server type.

    weights, experts, kv  achieved fractions of memory bandwidth for reading dense weights, experts and KV
    widened               fraction for experts stored in fewer bits than this GPU multiplies (dequantized first)
    flops, attention      achieved fractions of the FLOP rate in matmuls and in attention
    layer                 seconds that a layer adds to a step: starting and ending kernels
    prefill_layer         minimum seconds of a layer in a prefill step: kernels are launched one by one
    step, sequence        server overhead in seconds, per step and per sequence in it
    switch, switch_s      all-reduce over NVLink or Infinity Fabric: fraction of the link, seconds per doubling of
                          ranks
    switch_large          fraction of the link for the part of an all-reduce beyond SMALL_BYTES
    pcie, pcie_s          all-reduce over PCIe, peer to peer
    host, host_s          all-reduce through host memory, between GPUs without peer access (GeForce)
    request, crowd, prompt_token  seconds that a request spends outside of the steps: fixed, per other running request,
                          and per prompt token
    first_step, first_sequence  extra seconds per step and per sequence in vLLM V0 (0.7 and older), which prepares its
                          steps sequentially in Python
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
    host: float
    host_s: float
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
    pcie=0.27,
    pcie_s=28e-6,
    host=0.053,
    host_s=26e-6,
    request=14e-3,
    crowd=0.12e-3,
    prompt_token=3e-6,
    first_step=2.5e-3,
    first_sequence=50e-6,
)


# Largest all-reduce of vLLM's custom kernel; NCCL's rings take over beyond.
SMALL_BYTES: Final = 8 * 2**20  # vllm/distributed/device_communicators/custom_all_reduce.py: max_size


def scaled(constants: Constants, factors: Mapping[str, float]) -> Constants:
    """Return the constants with device, server, link and request times multiplied by their factors."""
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
        host=constants.host / link,
        host_s=constants.host_s * link,
        request=constants.request * request,
        crowd=constants.crowd * request,
        prompt_token=constants.prompt_token * request,
    )


def adapted(constants: Constants, plan: Plan) -> Constants:
    """Return constants fitted to vLLM V1, adapted to the engine of a plan."""
    release = plan.request.release
    if release.runs_first_engine:
        return replace(
            constants,
            step=constants.step + constants.first_step,
            sequence=constants.sequence + constants.first_sequence,
        )
    return constants


def constants_of(plan: Plan) -> Constants:
    """Return the constants of a plan's server."""
    return adapted(V1, plan)
