"""Starts `kvplan serve` with the arguments given, asks it something, shows what /metrics says of that, and stops it.

python examples/serve_demo.py llama-3.1-8b --simulate h100-80g
"""

import json
import signal
import subprocess
import sys
import urllib.request

SHOWN = ("vllm:prompt_tokens_total{", "vllm:generation_tokens_total{", "vllm:request_success_total{")


def main(words: list[str]) -> int:
    command = [sys.executable, "-m", "kvplan", "serve", *words, "--port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        url = listening(server)
        if url is None:
            return 1
        body = {"messages": [{"role": "user", "content": "How much memory do you need?"}], "max_tokens": 12}
        answer = json.loads(get(f"{url}/v1/chat/completions", json.dumps(body).encode()))
        print("answer:", json.dumps(answer["choices"][0]["message"]["content"]), answer["usage"])
        for line in get(f"{url}/metrics").splitlines():
            if line.startswith(SHOWN) and not line.endswith(" 0.0"):
                print(line)
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate()
    print(f"stopped by SIGTERM: exit code {server.returncode}")
    return 0


def listening(server: "subprocess.Popen[str]") -> str | None:
    """Where it listens, once it says so; None where it ends instead."""
    assert server.stderr is not None
    for line in server.stderr:
        print(line, end="", flush=True)
        if " on http://" in line:
            return line.split()[-1]
    return None


def get(url: str, data: bytes | None = None) -> str:
    with urllib.request.urlopen(url, data, timeout=300) as answer:
        text: str = answer.read().decode()
    return text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
