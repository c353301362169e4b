"""What vLLM takes of the host's memory beside its processes themselves."""

from collections.abc import Iterator
from typing import Final

from kvplan.core.units import GIB, MIB, format_gib
from kvplan.servers.host import HostRow
from kvplan.servers.plans import Plan

SWAP_SPACE: Final = 4 * GIB  # --swap-space of the first engine, by default
COMMAND_CHUNK, RESPONSE_CHUNK, GROUP_CHUNK = 16 * MIB, 24 * MIB, 4 * MIB
CHUNKS, GROUP_CHUNKS = 10, 6
EXECUTOR: Final = "vLLM 0.33 v1/executor/multiproc_executor.py, distributed/device_communicators/shm_broadcast.py"


def rows(plan: Plan) -> Iterator[HostRow]:
    args, capacity = plan.request.args, plan.capacity
    ranks = args.tensor_parallel_size * args.pipeline_parallel_size
    if plan.settings.first_engine:
        blocks = SWAP_SPACE // capacity.bytes_per_block
        yield HostRow(
            "swap_space", blocks * capacity.bytes_per_block, "rank",
            f"--swap-space {format_gib(SWAP_SPACE)} by default, in whole blocks: {blocks:,}, pinned",
            "vLLM 0.6 worker/worker.py (determine_num_available_blocks)",
            'the "# CPU blocks" of posted logs of Llama-3-8B, Llama-3.1-70B and Qwen2.5 0.5B to 7B: equal',
        )  # fmt: skip
    if args.kv_offloading_size:
        yield HostRow(
            "kv_offloading", args.kv_offloading_size // ranks, "rank",
            f"--kv-offloading-size {format_gib(args.kv_offloading_size)} over {ranks} ranks, pinned",
            "vLLM 0.33 v1/kv_offload", "",
        )  # fmt: skip
    if ranks > 1 and not plan.settings.first_engine:
        commands = (COMMAND_CHUNK + 1 + ranks) * CHUNKS
        group = (GROUP_CHUNK + args.tensor_parallel_size) * GROUP_CHUNKS if args.tensor_parallel_size > 1 else 0
        responses = ranks * (RESPONSE_CHUNK + 2) * CHUNKS
        yield HostRow(
            "shared_memory", commands + responses + args.pipeline_parallel_size * group, "replica",
            f"queues between processes in /dev/shm: {CHUNKS} x {COMMAND_CHUNK // MIB} MiB of commands, {CHUNKS} x "
            f"{RESPONSE_CHUNK // MIB} MiB of answers of each rank, {GROUP_CHUNKS} x {GROUP_CHUNK // MIB} MiB of each "
            "tensor-parallel group; NCCL's own come on top",
            EXECUTOR, "",
        )  # fmt: skip
