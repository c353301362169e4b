"""How fast a simulated server is: requests, tokens and its processor time under load, by how clients read.

    python benchmarks/serve_load.py                              # 8 servers, 48 clients, by the plan's clock
    python benchmarks/serve_load.py --stream --clock wall
    python benchmarks/serve_load.py --replicas 1 --clients 256 --requests 1000

Processor time is the figure to compare: the client runs beside the server. Before and after a change, measure both in
turn on the same machine.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MODEL: Final = ("serve", "llama-3.1-8b", "--simulate", "h100-80g")
FIRST_PORT: Final = 8600
PROMPT_LEN: Final = 32
END: Final = b"0\r\n\r\n"  # of a response in chunks


def body(number: int, num_tokens: int, *, stream: bool) -> bytes:
    """Return a request of its own prompt."""
    prompt = [(number * 7 + place) % 1000 + 1 for place in range(PROMPT_LEN)]
    fields = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": stream}
    data = json.dumps(fields).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)


async def client(port: int, bodies: Iterator[bytes]) -> None:
    """Send requests one after the other; raise ValueError if one is not answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for data in bodies:
        writer.write(data)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b" 200 " not in head:
            raise ValueError(head.decode())
        _, is_whole, length = head.partition(b"content-length: ")
        if is_whole:
            await reader.readexactly(int(length.split(b"\r\n")[0]))
            continue
        tail = b""
        while not tail.endswith(END):
            tail = tail[-len(END) :] + await reader.read(1 << 16)
    writer.close()


async def load(args: argparse.Namespace) -> None:
    bodies = iter([body(number, args.tokens, stream=args.stream) for number in range(args.requests)])
    ports = (FIRST_PORT + number % args.replicas for number in range(args.clients))
    await asyncio.gather(*[client(port, bodies) for port in ports])


def cpu_s(process: int) -> float:
    """Return a process's processor time."""
    times = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--clock", default="virtual")
    for name, default in (("replicas", 8), ("clients", 48), ("requests", 400), ("tokens", 200)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    options = ("--replicas", str(args.replicas), "--port", str(FIRST_PORT), "--clock", args.clock)
    server = subprocess.Popen([sys.executable, "-m", "kvplan", *MODEL, *options], stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        while f":{FIRST_PORT}" not in (line := server.stderr.readline()):
            if not line:
                raise SystemExit("the server did not start")
        begin, cpu = time.monotonic(), cpu_s(server.pid)
        asyncio.run(load(args))
        seconds, cpu = time.monotonic() - begin, cpu_s(server.pid) - cpu
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
    tokens = args.requests * args.tokens
    print(f"{args.requests / seconds:,.0f} requests/s, {tokens / seconds:,.0f} tokens/s")
    print(f"processor time of the server: {cpu / tokens * 1e6:.1f} us per token, {cpu / seconds:.2f} cores")


if __name__ == "__main__":
    main()
