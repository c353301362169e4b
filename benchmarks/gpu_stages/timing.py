"""How long things take on the device itself, and how fast the device is at best."""

import time
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], object]
REPEATS = 20


@torch.inference_mode()
def seconds_per_call(calls: Sequence[Call], device: torch.device, repeats: int = REPEATS) -> list[float]:
    """Seconds that one of the calls takes on average, once per repeat; all of them run in turn in each repeat.

    Give calls that read different memory, or the cache is measured. On a GPU they are captured in one graph, so that
    launches, which may take longer than a kernel, cost nothing.
    """
    for call in calls:
        call()
    if device.type == "cpu":
        return [_on_host(calls) / len(calls) for _ in range(repeats)]
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize(device)
        times.append(start.elapsed_time(stop) / 1000 / len(calls))
    return times


def _on_host(calls: Sequence[Call]) -> float:
    begin = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - begin


def copy_bandwidths(device: torch.device) -> list[float]:
    """Bytes read and written per second by copies far larger than any cache (a GPU's), one value per repeat."""
    numel = 2**30 if device.type == "cuda" else 2**22
    source = torch.randint(0, 256, (numel,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return [2 * numel / s for s in seconds_per_call([lambda: target.copy_(source)], device)]


def matmul_rates(device: torch.device) -> list[float]:
    """Floating-point operations per second of a large bfloat16 matrix product, one value per repeat."""
    size = 8192 if device.type == "cuda" else 256
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return [2 * size**3 / s for s in seconds_per_call([lambda: torch.mm(a, b, out=out)], device)]
