"""The real huggingface_hub against a Hub on the loopback interface: every way it can fail is one line with its cure."""

import http.server
import itertools
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import constants
from huggingface_hub.utils._validators import validate_repo_id
from safetensors.numpy import save

from kvplan.core.errors import EnvironmentProblem, KvplanError, UsageError
from kvplan.models.checkpoint import INDEX_NAME, read_checkpoint
from kvplan.models.hub import ResolvedModel, is_model_id, remote_checkpoint, resolve_model, split_ref
from kvplan.models.quant import SIDE_FILE
from kvplan.models.tensors import TensorInfo

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "org/tiny-model"
CONFIG = b'{"model_type": "llama"}'
INDEX = json.dumps({"metadata": {"total_size": 36}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}).encode()


@dataclass
class Hub:
    """What the loopback server holds and how it behaves; `requests` is what came in."""

    files: dict[str, bytes] = field(default_factory=lambda: {"config.json": CONFIG})
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    hangs: bool = False
    omits_commit: bool = False
    claims_bytes: int | None = None
    etag: str | None = None
    commit: str = COMMIT
    sends: Iterator[bytes] | None = None  # instead of the file, without a length
    requests: list[str] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def serve(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        if MODEL in handler.path:  # the library may ask for lists of its own
            self.requests.append(f"{handler.command} {handler.path}")
        if self.hangs:
            self.released.wait(10)
            return
        name = handler.path.rpartition("/")[2]
        status, headers, body = self.status, dict(self.headers), b""
        if status == 200 and name not in self.files:
            status, headers = 404, {"X-Error-Code": "EntryNotFound"}
        elif status == 200:
            body = self.files[name]
            headers["ETag"] = f'"{abs(hash(body)):x}"' if self.etag is None else self.etag
        if not self.omits_commit:
            headers["X-Repo-Commit"] = self.commit
        if name in self.files and (span := handler.headers.get("Range")) and status == 200:
            first, last = (int(edge) for edge in span.removeprefix("bytes=").split("-"))
            body, status = body[first : last + 1], 206
        if self.sends is None or status != 200:
            headers["Content-Length"] = str(len(body) if self.claims_bytes is None else self.claims_bytes)
        handler.send_response(status)
        for key, value in headers.items():
            handler.send_header(key, value)
        handler.end_headers()
        if handler.command == "GET":
            with suppress(OSError):  # the client may have left
                for part in (body,) if self.sends is None or status != 200 else self.sends:
                    handler.wfile.write(part)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A loopback Hub that the library talks to, with an empty cache and no token."""
    state = Hub()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            state.serve(self)

        do_GET = do_HEAD

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    use_endpoint(monkeypatch, state.url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "agents"), raising=False)  # since 2.x
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    huggingface_hub.close_session()
    yield state
    huggingface_hub.close_session()
    state.released.set()
    server.shutdown()
    server.server_close()
    thread.join()


def use_endpoint(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def refusal(revision: str | None = None, offline: bool = False) -> str:
    with pytest.raises(EnvironmentProblem) as caught:
        resolve_model(MODEL, revision=revision, offline=offline)
    assert caught.value.exit_code == 3
    assert str(caught.value).isprintable()
    return str(caught.value)


# --- ids -------------------------------------------------------------------------------------------------------------

BAD_IDS = [
    "../../etc/passwd",
    "C:\\",
    "C:\\models\\x",
    "a/b/c",
    "-x",
    "-x/y",
    "x/-y",
    "a/[/x]",
    "a/[bold]b[/bold]",
    "a/b\x1b[2J",
    "a/b\n",
    "a/\u202eb",
    "a/\uff42",
    "gpt2",
    "/a/b",
    "a/b/",
    "a//b",
    "./a",
    "a/..",
    "a/b..c",
    "a/b--c",
    "a/b.git",
    "a/b.",
    "",
    "/",
    "@main",
    "https://huggingface.co/a/b",
    "a/" + "b" * 95,
    "a/" + "b" * 10_000_000,
]


@pytest.mark.parametrize("ref", BAD_IDS, ids=range(len(BAD_IDS)))
def test_what_is_no_hub_id_is_refused_before_anything_is_opened(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, ref: str
) -> None:
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("a file was opened"))
    assert not is_model_id(ref)
    with pytest.raises(UsageError) as caught:
        resolve_model(ref)
    assert caught.value.exit_code == 2
    assert str(caught.value).endswith(
        "': not a Hub id; write org/name, or the path of a config.json or model directory"
    )
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 250
    assert hub.requests == []


@pytest.mark.parametrize(
    "ref", ["meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2.5-0.5B", "01-ai/Yi-34B", "a/b", "a/" + "b" * 94, "_x/y_"]
)
def test_hub_ids_are_what_the_library_takes_for_ids(ref: str) -> None:
    assert is_model_id(ref)
    validate_repo_id(ref)


def test_a_revision_is_given_behind_the_id_or_beside_it() -> None:
    assert split_ref("a/b") == ("a/b", "main")
    assert split_ref("a/b@refs/pr/1") == ("a/b", "refs/pr/1")
    assert split_ref("a/b", "v1.0") == ("a/b", "v1.0")
    assert split_ref("a/b@v1", "v1") == ("a/b", "v1")
    with pytest.raises(UsageError, match="two revisions"):
        split_ref("a/b@v1", "v2")


@pytest.mark.parametrize("revision", ["../../x", "-x", "/x", "a b", "a\x1b", "a@b", "x" * 201, "~1", "a\\b"])
def test_what_is_no_revision_is_refused(revision: str) -> None:
    with pytest.raises(UsageError, match="not a branch, tag or commit"):
        split_ref("a/b", revision)


# --- fetching --------------------------------------------------------------------------------------------------------


def test_the_config_and_the_weight_index_are_fetched_and_nothing_else(hub: Hub) -> None:
    hub.files |= {INDEX_NAME: INDEX, "model-00001-of-00001.safetensors": b"weights"}
    resolved = resolve_model(MODEL)
    assert resolved.notes == ()
    assert (resolved.directory / "config.json").read_bytes() == CONFIG
    assert {request.rpartition("/")[2] for request in hub.requests} == {"config.json", INDEX_NAME, SIDE_FILE}
    checkpoint = read_checkpoint(resolved.directory)
    assert checkpoint is not None
    assert checkpoint.total_bytes == 36


@pytest.mark.parametrize(("stated", "fetched"), [(b"null", True), (b'{"quant_method": "fp8"}', False)])
def test_the_quantization_beside_the_config_is_fetched_where_the_config_states_none(
    hub: Hub, stated: bytes, fetched: bool
) -> None:
    hub.files["config.json"] = b'{"model_type": "llama", "quantization_config": ' + stated + b"}"
    hub.files[SIDE_FILE] = b'{"quantization": {"quant_algo": "FP8"}}'
    assert (resolve_model(MODEL).directory / SIDE_FILE).is_file() == fetched
    assert any(SIDE_FILE in request for request in hub.requests) == fetched


def test_a_model_without_an_index_is_fine(hub: Hub) -> None:
    resolved = resolve_model(MODEL, revision="v1")
    assert resolved.notes == ()
    assert [path.name for path in resolved.directory.iterdir()] == ["config.json"]
    assert f"HEAD /{MODEL}/resolve/v1/config.json" in hub.requests


@pytest.mark.parametrize(
    ("status", "headers", "problem"),
    [
        (
            401,
            {"X-Error-Code": "GatedRepo"},
            f"{MODEL}: gated; accept the license at https://huggingface.co/{MODEL} and set HF_TOKEN",
        ),
        (
            403,
            {"X-Error-Code": "GatedRepo"},
            f"{MODEL}: gated; accept the license at https://huggingface.co/{MODEL} and set HF_TOKEN",
        ),
        (
            403,
            {"X-Error-Message": "[bold]no[/bold]\x9b\x07"},
            f"{MODEL}: access denied (403); check HF_TOKEN and your access at https://huggingface.co/{MODEL}",
        ),
        (
            401,
            {"X-Error-Message": "Invalid credentials in Authorization header"},
            f"{MODEL}: access denied (401); check HF_TOKEN and your access at https://huggingface.co/{MODEL}",
        ),
        (
            404,
            {"X-Error-Code": "RepoNotFound"},
            f"{MODEL}: not found on the Hub, or private; check the name, or set HF_TOKEN to a token that may read it",
        ),
        (
            404,
            {"X-Error-Code": "RevisionNotFound"},
            f"{MODEL}: no revision main; check it at https://huggingface.co/{MODEL}/tree/main",
        ),
        (
            404,
            {"X-Error-Code": "EntryNotFound"},
            f"{MODEL} has no config.json at main; pass the model it was made from, or a local config.json",
        ),
        (
            429,
            {"Retry-After": "300"},
            f"{MODEL}: the Hub's rate limit is reached (429); retry in 300 s, or set HF_TOKEN for a higher limit",
        ),
        (
            429,
            {"Retry-After": "[bold]soon"},
            f"{MODEL}: the Hub's rate limit is reached (429); retry in a few minutes, or set HF_TOKEN for a higher "
            "limit",
        ),
        (500, {}, f"{MODEL}: the Hub failed (500); retry in a few minutes"),
        (503, {}, f"{MODEL}: the Hub failed (503); retry in a few minutes"),
    ],
)
def test_what_the_hub_refuses_is_one_line_with_its_cure(
    hub: Hub, status: int, headers: dict[str, str], problem: str
) -> None:
    hub.status = status
    hub.headers = headers
    assert refusal() == problem
    assert len(hub.requests) == 1


def test_a_hub_that_hangs_is_left_after_the_timeout(hub: Hub) -> None:
    hub.hangs = True
    assert refusal() == (f"{MODEL}: no answer from {hub.url} (timeout after 1 s); retry, or pass a local config.json")
    assert len(hub.requests) == 1  # no retries behind the user's back


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
def test_no_network_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    url = f"http://{host}:{unused_port()}"
    use_endpoint(monkeypatch, url)
    assert refusal() == (
        f"{MODEL}: no network to {url} (ConnectError); check the connection or proxy, or pass a local config.json"
    )


@pytest.mark.parametrize("url", ["gopher://x", "nonsense", "http://[::"])
def test_an_endpoint_that_is_none_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    use_endpoint(monkeypatch, url)
    assert refusal().startswith(f"{MODEL}: no network to {url} (")


def test_a_portal_that_answers_for_the_hub_is_no_hub(hub: Hub) -> None:
    hub.omits_commit = True
    assert refusal().startswith(f"{MODEL}: no network to {hub.url} (FileMetadataError); check the connection or proxy")


def test_a_config_too_large_is_refused_before_it_is_fetched(hub: Hub) -> None:
    hub.claims_bytes = 1 << 30
    assert refusal() == f"{MODEL}: config.json is too large (1,073,741,824 bytes, at most 10,485,760)"
    assert [request.split()[0] for request in hub.requests] == ["HEAD"]


def test_a_cache_that_cannot_be_written_is_said(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    assert refusal() == (
        f"{MODEL}: the Hub cache {tmp_path}/file/hub cannot be used (Not a directory); set HF_HOME to a writable folder"
    )


def test_an_index_that_cannot_be_fetched_is_a_note(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files[INDEX_NAME] = INDEX
    monkeypatch.setattr("kvplan.models.hub.MAX_INDEX_BYTES", 10)
    resolved = resolve_model(MODEL)
    assert resolved.notes == (
        f"{MODEL}: {INDEX_NAME} is too large ({len(INDEX)} bytes, at most 10); the weight index is missing",
    )


# --- a Hub that attacks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", ["ETag", "X-Linked-ETag"])
@pytest.mark.parametrize("etag", ["{}/stolen", "../../../../stolen", "..", ""])
def test_an_etag_names_no_file(hub: Hub, tmp_path: Path, header: str, etag: str) -> None:
    hub.etag = etag.format(tmp_path)
    hub.headers = {header: f'"{hub.etag}"'}
    resolved = resolve_model(MODEL)
    assert (resolved.directory / "config.json").read_bytes() == CONFIG
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    folder = "hub/models--org--tiny-model"
    assert files == {f"{folder}/snapshots/{COMMIT}/config.json", f"{folder}/refs/main"}


@pytest.mark.parametrize("commit", ["../../../../stolen", "/stolen", "main", COMMIT.upper(), COMMIT + "0"])
def test_what_is_no_commit_names_no_folder(hub: Hub, tmp_path: Path, commit: str) -> None:
    hub.commit = commit
    assert "(FileMetadataError)" in refusal()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_file_without_an_end_is_left_at_the_limit(hub: Hub, tmp_path: Path) -> None:
    hub.sends = (b" " * (1 << 20) for _ in itertools.count())
    assert refusal() == f"{MODEL}: config.json is too large (its length was not stated, at most 10,485,760)"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_file_that_drips_is_left_after_a_time(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplan.models.hub_files.DOWNLOAD_S", 0.1)
    hub.sends = (b" " for _ in iter(lambda: hub.released.wait(0.01), True))
    assert refusal() == f"{MODEL}: config.json did not arrive within 0.1 s; retry, or pass a local config.json"


def test_an_index_of_too_many_files_is_refused(hub: Hub) -> None:
    names = {f"t{number}": f"{number}.safetensors" for number in range(1001)}
    hub.files[INDEX_NAME] = json.dumps({"weight_map": names}).encode()
    with pytest.raises(EnvironmentProblem, match="names 1,001 files, at most 1,000"):
        remote_checkpoint(MODEL)


def test_a_remote_header_is_read_to_its_end_and_no_further(hub: Hub) -> None:
    content = save({f"layer.{number}.weight": np.zeros(1, np.float16) for number in range(3000)})
    hub.files["model.safetensors"] = content  # its header alone has over 100,000 bytes
    checkpoint = remote_checkpoint(MODEL)
    assert checkpoint is not None
    assert len(checkpoint.tensors) == 3000


# --- the cache -------------------------------------------------------------------------------------------------------


@pytest.fixture
def cached(hub: Hub) -> ResolvedModel:
    resolved = resolve_model(MODEL)
    hub.requests.clear()
    return resolved


def test_offline_takes_the_cached_copy_and_asks_nobody(
    hub: Hub, cached: ResolvedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = (f"{MODEL}: offline, the cached copy 0123456789ab is used",)
    assert resolve_model(MODEL, offline=True) == ResolvedModel(cached.directory, notes)
    assert resolve_model(f"{MODEL}@{COMMIT}", offline=True) == ResolvedModel(cached.directory, notes)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model(MODEL) == ResolvedModel(cached.directory, notes)
    assert hub.requests == []


def test_offline_without_a_cached_copy_is_refused(hub: Hub) -> None:
    assert refusal(offline=True) == (
        f"{MODEL}: not in the Hub cache at main (offline); "
        "run once without --offline and HF_HUB_OFFLINE, or pass a local config.json"
    )
    assert hub.requests == []


def test_the_cached_copy_stands_in_where_the_network_fails(
    hub: Hub, cached: ResolvedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = "; the cached copy 0123456789ab is used"
    hub.status, hub.headers = 429, {"Retry-After": "7"}
    limit = f"{MODEL}: the Hub's rate limit is reached (429); retry in 7 s, or set HF_TOKEN for a higher limit"
    assert resolve_model(MODEL) == ResolvedModel(cached.directory, (limit + used,))
    hub.hangs = True
    timeout = f"{MODEL}: no answer from {hub.url} (timeout after 1 s); retry, or pass a local config.json"
    assert resolve_model(MODEL) == ResolvedModel(cached.directory, (timeout + used,))
    use_endpoint(monkeypatch, f"http://127.0.0.1:{unused_port()}")
    (note,) = resolve_model(MODEL).notes
    assert note.startswith(f"{MODEL}: no network to ")
    assert note.endswith(used)


def test_the_cached_copy_is_offered_but_not_taken_where_the_hub_says_no(hub: Hub, cached: ResolvedModel) -> None:
    hub.status, hub.headers = 401, {"X-Error-Code": "GatedRepo"}
    assert refusal() == (
        f"{MODEL}: gated; accept the license at https://huggingface.co/{MODEL} and set HF_TOKEN "
        "(or use the cached copy with --offline)"
    )


# --- remote headers --------------------------------------------------------------------------------------------------


def test_tensors_are_read_from_the_header_of_a_remote_file(hub: Hub) -> None:
    content = save({"a": np.zeros((2, 3), np.float16), "s": np.array(1.0, np.float32)})
    hub.files["model.safetensors"] = content
    checkpoint = remote_checkpoint(MODEL)
    assert checkpoint is not None
    assert set(checkpoint.tensors) == {TensorInfo("a", "F16", (2, 3), 12), TensorInfo("s", "F32", (), 4)}
    assert (checkpoint.total_bytes, checkpoint.files) == (16, ("model.safetensors",))


def test_a_remote_model_without_safetensors_has_no_checkpoint(hub: Hub) -> None:
    assert remote_checkpoint(MODEL) is None


@pytest.mark.parametrize("content", [b"", b"\0" * 8, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 1 << 40)])
def test_a_bad_remote_header_is_refused(hub: Hub, content: bytes) -> None:
    hub.files["model.safetensors"] = content
    with pytest.raises(KvplanError):
        remote_checkpoint(MODEL)


# --- as a user runs it -----------------------------------------------------------------------------------------------

RUN = """
import sys
from kvplan.core.errors import KvplanError
from kvplan.models.hub import resolve_model
try:
    print(*resolve_model("org/tiny-model").notes)
except KvplanError as error:
    print(error)
    sys.exit(error.exit_code)
finally:
    heavy = {"torch", "numpy", "pandas", "transformers"} & set(sys.modules)
    assert not heavy, heavy
"""


def run(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    plain_env = {
        key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()
    }
    return subprocess.run(
        [sys.executable, "-c", RUN], env=plain_env | env, capture_output=True, text=True, timeout=900, check=False
    )


def test_the_environment_decides_endpoint_cache_and_offline(hub: Hub, tmp_path: Path) -> None:
    env = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url}
    first = run(env)
    assert (first.returncode, first.stdout, first.stderr) == (0, "\n", "")
    offline = run({**env, "HF_HUB_OFFLINE": "1"})
    line = f"{MODEL}: offline, the cached copy 0123456789ab is used\n"
    assert (offline.returncode, offline.stdout, offline.stderr) == (0, line, "")
    hub.status, hub.headers = 401, {"X-Error-Code": "GatedRepo"}
    gated = run({"HF_HOME": str(tmp_path / "other"), "HF_ENDPOINT": hub.url})
    line = f"{MODEL}: gated; accept the license at https://huggingface.co/{MODEL} and set HF_TOKEN\n"
    assert (gated.returncode, gated.stdout, gated.stderr) == (3, line, "")


def test_without_the_library_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(EnvironmentProblem, match="run `pip install huggingface_hub`, or pass a local config") as caught:
        resolve_model(MODEL)
    assert caught.value.exit_code == 3
