"""Buffers of DeepEP, a library by which servers exchange tokens between ranks of experts.

Sources: DeepEP (commit dd758ca) csrc/legacy/config.hpp, csrc/legacy/buffer.hpp and deep_ep/buffers/legacy.py. As the
code reads, compared with no device.
"""

from typing import Final

from kvplan.core.units import MIB
from kvplan.sizing.weights import up

SCALED_COLUMNS: Final = 128  # columns that share a scale in a message
GPUS_PER_NODE: Final = 8  # a larger group spans nodes, and has a second buffer for inter-node traffic
CHANNELS: Final = 10  # of its 20 multiprocessors, two for each
WORKSPACE: Final = 32 * MIB
# Beside a token's values: where it came from, and the most experts (8-byte numbers, weights) and scales it can have.
BESIDE: Final = 8 + 128 * 8 + 128 * 4 + 128 * 4
# Ranks -> tokens that a channel receives at once over NVLink. Over RDMA it is 128, rounded up to what is sent at once.
RECEIVED: Final = {
    2: 256, 4: 256, 8: 256, 16: 288, 24: 288, 32: 288, 48: 288, 64: 288, 96: 480, 128: 560, 144: 720, 160: 720,
}  # fmt: skip
SENT: Final = {2: 6, 4: 6, 8: 6, 16: 20, 24: 8, 32: 8, 48: 8, 64: 8, 96: 12, 128: 12, 144: 12, 160: 12}


def low_latency_bytes(tokens: int, hidden: int, experts: int) -> int:
    """Bytes of the low-latency buffer, for so many tokens of a rank in one dispatch."""
    scales = hidden // SCALED_COLUMNS
    dispatch = 16 + max(2 * hidden, hidden + 4 * scales)
    combine = 4 * scales + 2 * hidden
    send = max(tokens * dispatch, experts * tokens * combine)
    receive = experts * tokens * max(dispatch, combine)
    total = 2 * (send + receive + up(4 * experts, 128))
    return (total + 128) // 128 * 128


def normal_bytes(ranks: int, hidden: int) -> tuple[int, int]:
    """Bytes of the buffers for prefills, in 16 bits: inside a node, and between nodes. Ranks are keys of RECEIVED."""
    peers, nodes = min(ranks, GPUS_PER_NODE), max(1, ranks // GPUS_PER_NODE)
    token = 2 * hidden + BESIDE
    inside = CHANNELS * peers * ((2 * nodes + 3) * 4 + RECEIVED[ranks] * token)
    if ranks <= GPUS_PER_NODE:
        return up(inside, 128), 0
    between = 2 * CHANNELS * nodes * ((2 * GPUS_PER_NODE + 2) * 4 + up(128, SENT[ranks]) * (token + 16))
    return up(inside, 128), up(between, 128)
