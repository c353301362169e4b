"""A Hub on the loopback interface that answers as the real one may, or attacks whoever asks it for a model.

    python -m benchmarks.attacks.hub [--modes ok,endless] [--repeats 2]

Each mode is a way to answer for config.json or the weight index. A valid one must give a plan; any breaks when the
command ends in a traceback, takes a GiB or has no end, when a file appears outside the Hub's cache or more than 64 MiB
in it, or when the token goes to another server.
"""

import argparse
import contextlib
import http.server
import itertools
import json
import os
import shutil
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.attacks.outcomes import Outcome, Tally, command

CONFIG = json.dumps({
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "torch_dtype": "bfloat16",
}).encode()  # fmt: skip
INDEX = json.dumps(
    {"metadata": {"total_size": 1192135096}, "weight_map": {"lm_head.weight": "model.safetensors"}}
).encode()
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MIB = 1 << 20
MOST_CACHED = 64 * MIB


@dataclass
class Answer:
    """What a mode changes of the answer to a request for its file."""

    status: int = 200
    body: bytes = CONFIG
    headers: dict[str, str | None] = field(default_factory=dict)  # None: without it
    parts: Callable[[], Iterable[bytes]] | None = None  # of a GET, instead of the body
    is_cut: bool = False


def sized(length: int | str, **more: str) -> Answer:
    """Of another stated length than the body's."""
    return Answer(headers={"Content-Length": str(length), **more})


def with_etag(etag: str, name: str = "ETag") -> Answer:
    return Answer(headers={name: f'"{etag}"'})


def with_body(body: bytes, **headers: str) -> Answer:
    return Answer(body=body, headers={**headers})


def redirect(location: str, status: int = 302) -> Answer:
    return Answer(status, b"", {"Location": location})


def spaces(count: int | None, *, is_chunked: bool = False) -> Callable[[], Iterator[bytes]]:
    """So many MiB, or without an end."""
    part = b"100000\r\n" + b" " * MIB + b"\r\n" if is_chunked else b" " * MIB
    return lambda: itertools.repeat(part) if count is None else itertools.repeat(part, count)


def gzipped() -> Iterator[bytes]:
    """1 GiB, as some MB."""
    packer = zlib.compressobj(1, wbits=31)
    yield from (packer.compress(part) for part in spaces(1 << 10)())
    yield packer.flush()


CLOSED: dict[str, str | None] = {"Content-Length": None, "Connection": "close"}
VALID: dict[str, Answer] = {
    "ok": Answer(),
    "weak etag": Answer(headers={"ETag": 'W/"abc"'}),
    "linked etag": with_etag("a" * 64, "X-Linked-ETag"),
    "relative redirect": redirect("/org/elsewhere/resolve/main/config.json", 307),
    "unknown headers": Answer(headers={"X-More": "x" * 1000, "Server": "other"}),
    "another type": Answer(headers={"Content-Type": "text/plain"}),
    "more keys": with_body(json.dumps({**json.loads(CONFIG), "x_more": [1, {"a": None}]}).encode()),
    "remote code": with_body(json.dumps({**json.loads(CONFIG), "auto_map": {"AutoConfig": "x--evil.Config"}}).encode()),
    "a line break first": with_body(b"\n" + CONFIG),
}
HOSTILE: dict[str, Answer] = {
    "endless": Answer(
        headers={"Content-Length": None, "Transfer-Encoding": "chunked"}, parts=spaces(None, is_chunked=True)
    ),
    "6 GiB": Answer(headers={"Content-Length": str(6 << 30)}, parts=spaces(6 << 10)),
    "half": sized(len(CONFIG) // 2),
    "cut": Answer(is_cut=True),
    "longer than stated": Answer(body=CONFIG + b" " * 100, headers={"Content-Length": str(len(CONFIG))}),
    "no length": Answer(headers=CLOSED),
    "negative length": sized(-5, Connection="close"),
    "length of letters": sized("1e9", Connection="close"),
    "commit that climbs": Answer(headers={"X-Repo-Commit": "../../../../../../stolen"}),
    "commit of a path": Answer(headers={"X-Repo-Commit": "ROOT/stolen"}),
    "no commit": Answer(headers={"X-Repo-Commit": None}),
    "etag that climbs": with_etag("../../../../../../../stolen"),
    "etag of a path": with_etag("ROOT/stolen"),
    "linked etag of a path": with_etag("ROOT/stolen", "X-Linked-ETag"),
    "linked size": Answer(headers={"X-Linked-Size": "5"}),
    "redirect to another host": redirect("http://localhost:OTHER/evil/config.json"),
    "redirect to a file": redirect("file:///etc/passwd"),
    "redirect to itself": redirect("/org/evil/resolve/main/config.json"),
    "gzip of 1 GiB": Answer(headers={**CLOSED, "Content-Encoding": "gzip"}, parts=gzipped),
    "HTML": Answer(body=b"<html>", headers={"Content-Type": "text/html", "X-Repo-Commit": None}),
    "deep JSON": with_body(b'{"model_type": "qwen3", "a": ' + b"[" * 30_000 + b"]" * 30_000 + b"}"),
    "a list": with_body(b"[1]"),
    "no Unicode": with_body(b"\xff\xfe{}"),
    "escapes in the error": Answer(418, b"", {"X-Error-Message": "\x1b[31mred"}),
    "error of the server": Answer(503, b""),
}
MODES = {
    **{name: ("valid", "config.json", answer) for name, answer in VALID.items()},
    **{name: ("hostile", "config.json", answer) for name, answer in HOSTILE.items()},
    **{
        f"index: {name}": ("hostile", "model.safetensors.index.json", HOSTILE[name])
        for name in ("endless", "half", "commit that climbs", "etag of a path", "deep JSON")
    },
    "index: ok": ("valid", "model.safetensors.index.json", Answer(body=INDEX)),
}


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Clients may leave."""


class Hub:
    """The server, and whether a host that is not it was shown the token."""

    def __init__(self, root: Path) -> None:
        self.root, self.mode, self.has_leaked = root, "ok", False
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                hub.answer(self)

            do_GET = do_HEAD

            def log_message(self, *_: object) -> None:
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        name, (_, attacked, answer) = handler.path.rpartition("/")[2], MODES[self.mode]
        if handler.headers["Host"].startswith("localhost"):
            self.has_leaked |= "Authorization" in handler.headers
        elsewhere = "elsewhere" in handler.path or handler.path.startswith("/evil")
        if elsewhere or (name == "config.json" != attacked):
            answer = Answer()
        elif name != attacked:
            answer = Answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        headers: dict[str, str | None] = {
            "X-Repo-Commit": COMMIT, "ETag": '"abc"', "Content-Length": str(len(answer.body)), **answer.headers,
        }  # fmt: skip
        handler.send_response(answer.status)
        for key, value in headers.items():
            if value is not None:
                text = value.replace("ROOT", str(self.root)).replace("OTHER", str(self.server.server_port))
                handler.send_header(key, text)
        handler.end_headers()
        handler.close_connection = answer.is_cut or headers.get("Connection") == "close"
        if handler.command == "GET":
            whole = answer.body[:50] if answer.is_cut else answer.body
            with contextlib.suppress(OSError):  # the client may have left
                for part in (whole,) if answer.parts is None else answer.parts():
                    handler.wfile.write(part)


def fault_of(hub: Hub) -> str | None:
    """What is wrong with the files that a command left, or with whom it spoke to."""
    files = [path for path in hub.root.rglob("*") if path.is_file()]
    strangers = [str(path) for path in files if (hub.root / "home") not in path.parents]
    if strangers or "stolen" in " ".join(map(str, files)):
        return f"files outside the cache: {strangers[:3]}"
    if sum(path.stat().st_size for path in files) > MOST_CACHED:
        return "more than 64 MiB in the cache"
    return "the token went to another server" if hub.has_leaked else None


def plan_of(hub: Hub, mode: str) -> Outcome:
    """A plan of the Hub's model, with an empty cache."""
    shutil.rmtree(hub.root / "home", ignore_errors=True)
    hub.mode, hub.has_leaked = mode, False
    return command("estimate", "org/evil", "--gpu", "l40s", "--ctx", "4k")


def attack(modes: Sequence[str], repeats: int) -> Tally:
    """Run once in a process: huggingface_hub reads its settings when it is imported."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        hub = Hub(Path(folder))
        for name in [name for name in os.environ if name.startswith("HF_") or "proxy" in name.lower()]:
            del os.environ[name]
        url = f"http://127.0.0.1:{hub.server.server_port}"
        os.environ.update(HF_ENDPOINT=url, HF_HOME=f"{folder}/home", HF_TOKEN="hf_secret", HF_HUB_ETAG_TIMEOUT="60")
        for mode in modes:
            kind = MODES[mode][0]
            for _ in range(repeats if kind == "valid" else 1):
                outcome = plan_of(hub, mode)
                tally.judge(kind, mode, outcome, fault_of(hub))
        hub.server.shutdown()
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--repeats", type=int, default=3, help="of the valid modes")
    options = parser.parse_args(argv)
    return attack(options.modes.split(","), options.repeats).closing()


if __name__ == "__main__":
    sys.exit(main())
