"""Bad inputs and faults: each ends as the table of the design says, never in a traceback or a wrong number."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.models.test_hub import MODEL, Hub
from tests.models.test_hub import hub as hub  # likewise
from tests.support.cli import LLAMA, Run, config_file, refused
from tests.support.cli import run as run  # the fixture

AT = ("--ctx", "4k", "--gpu", "h200")


def plan_of(run: Run, folder: Path, *flags: str) -> tuple[dict[str, Any], str]:
    """(the plan, standard error) of a directory's model."""
    ran = run("estimate", folder, *AT, "--format", "json", *flags)
    assert ran.code == 0, ran.err
    return ran.json, ran.err


def per_token(run: Run, folder: Path, *flags: str) -> int:
    size: int = plan_of(run, folder, *flags)[0]["kv"]["bytes_per_token"]
    return size


@pytest.mark.parametrize("dtype", ["x\x1b[31m", "x\ny", "\u202ex"])
def test_a_dtype_of_control_characters_is_one_fault(run: Run, dtype: str) -> None:
    escaped = dtype.encode("unicode_escape").decode()
    line = refused(run("estimate", "llama-3.1-8b", *AT, "--dtype", dtype))
    assert line == f"--dtype is not a name ('{escaped}'); write a name that vLLM accepts"


# --- 1 to 8: what a config leaves out or says twice -------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [None, 0, "missing"])
def test_1_and_2_a_head_dim_that_is_missing_null_or_0_is_derived(run: Run, tmp_path: Path, head_dim: Any) -> None:
    drop = ("head_dim",) if head_dim == "missing" else ()
    doc, err = plan_of(run, config_file(tmp_path / "m", {"head_dim": head_dim}, drop=drop))
    assert doc["kv"]["bytes_per_token"] == 32 * 2 * 8 * (4096 // 32) * 2
    if head_dim != 0:
        assert "derived: hidden_size 4096 / 32 heads = 128" in err


def test_3_a_head_dim_that_is_not_hidden_over_heads_wins(run: Run, tmp_path: Path) -> None:
    assert per_token(run, config_file(tmp_path / "m", {"head_dim": 96})) == 32 * 2 * 8 * 96 * 2


def test_4_another_key_for_the_head_dim_or_no_whole_one(run: Run, tmp_path: Path) -> None:
    folder = config_file(tmp_path / "m", {"hidden_size_per_head": 80, "hidden_size": 4100}, drop=("head_dim",))
    assert per_token(run, folder) == 32 * 2 * 8 * 80 * 2
    folder = config_file(tmp_path / "m", {"hidden_size": 4100}, drop=("head_dim",))
    line = refused(run("estimate", folder, *AT))
    assert "4100" in line
    assert "32" in line


@pytest.mark.parametrize("change", ["missing", None])
def test_5_without_kv_heads_every_head_keeps_its_own(run: Run, tmp_path: Path, change: Any) -> None:
    drop = ("num_key_value_heads",) if change == "missing" else ()
    doc, err = plan_of(run, config_file(tmp_path / "m", {"num_key_value_heads": change}, drop=drop))
    assert doc["kv"]["bytes_per_token"] == 32 * 2 * 32 * 128 * 2
    assert "kvplan: note:" in err
    assert "MHA" in err
    assert any("MHA" in note for note in doc["notes"])


def test_6_kv_heads_are_replicated_when_there_are_more_ranks(run: Run, tmp_path: Path) -> None:
    folder = config_file(tmp_path / "m", {"num_key_value_heads": 2})
    assert per_token(run, folder, "--tp", "2") == 32 * 2 * 1 * 128 * 2
    assert per_token(run, folder, "--tp", "8") == 32 * 2 * 1 * 128 * 2
    assert "does not divide the 32 attention heads" in refused(run("estimate", folder, *AT, "--tp", "3"))


@pytest.mark.parametrize("key", ["text_config", "llm_config", "thinker_config"])
def test_7_a_nested_config_is_read_and_wins(run: Run, tmp_path: Path, key: str) -> None:
    (tmp_path / "m").mkdir()
    outer = {"model_type": "some_vlm", "num_hidden_layers": 7, key: LLAMA}
    (tmp_path / "m/config.json").write_text(json.dumps(outer), encoding="utf-8")
    doc, err = plan_of(run, tmp_path / "m")
    assert doc["kv"]["bytes_per_token"] == 131_072
    assert f"kvplan: warning: num_hidden_layers differs between {key} (32) and the outer config" in err


def mistral(**changes: Any) -> dict[str, Any]:
    return {"model_type": "mistral", "sliding_window": 4096, **changes}


def test_8_windows_null_switched_off_or_of_a_wrong_length(run: Run, tmp_path: Path) -> None:
    null = plan_of(run, config_file(tmp_path / "a", mistral(sliding_window=None)))[0]
    assert [group["kind"] for group in null["kv"]["groups"]] == ["full"]
    off = config_file(tmp_path / "b", {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False})
    assert [group["kind"] for group in plan_of(run, off)[0]["kv"]["groups"]] == ["full"]
    gemma = {"model_type": "gemma2", "sliding_window": 4096, "layer_types": ["full_attention"] * 31}
    line = refused(run("estimate", config_file(tmp_path / "c", gemma), *AT))
    assert "layer_types" in line
    assert "31" in line
    assert "32" in line


# --- 9 to 16: values that are none ------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_key_value_heads", "hidden_size", "vocab_size"])
@pytest.mark.parametrize("value", ["32", True, 32.5, [32], {"x": 32}])
def test_9_what_is_no_number_is_refused_with_key_value_and_file(run: Run, tmp_path: Path, key: str, value: Any) -> None:
    line = refused(run("estimate", config_file(tmp_path / "m", {key: value}), *AT))
    assert key in line
    assert repr(value) in line
    assert "config.json" in line


def test_9_a_whole_float_is_taken_with_a_warning(run: Run, tmp_path: Path) -> None:
    doc, err = plan_of(run, config_file(tmp_path / "m", {"num_hidden_layers": 32.0}))
    assert doc["kv"]["bytes_per_token"] == 131_072
    assert "kvplan: warning: num_hidden_layers is written 32.0" in err


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_attention_heads", "vocab_size", "hidden_size"])
@pytest.mark.parametrize("value", [0, -1, 2**31 + 1, 10**25])
def test_10_a_count_out_of_bounds_is_refused_with_the_bound(run: Run, tmp_path: Path, key: str, value: int) -> None:
    line = refused(run("estimate", config_file(tmp_path / "m", {key: value}), *AT))
    assert f"{key} must be between 1 and " in line
    assert str(value) in line


def test_10_a_product_that_no_machine_holds_is_refused(run: Run, tmp_path: Path) -> None:
    folder = config_file(tmp_path / "m", {"hidden_size": 2**31, "intermediate_size": 2**31, "num_hidden_layers": 4096})
    assert "2^63" in refused(run("estimate", folder, *AT))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_11_a_number_that_is_not_finite_is_refused(run: Run, tmp_path: Path, number: str) -> None:
    text = json.dumps(LLAMA).replace("14336", number)
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    assert "non-finite" in refused(run("estimate", tmp_path, *AT))


def test_12_a_byte_order_mark_is_accepted(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert per_token(run, tmp_path) == 131_072


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "empty"),
        (b"[]", "line 1"),
        (b"null", "line 1"),
        (json.dumps(LLAMA).encode("utf-16"), "byte 0"),
        (b'{"a": "\x00"}', "byte 7"),
        (json.dumps(LLAMA).encode()[:-20], "cut short"),
        (b"\xff{}", "byte 0"),
        (b'{\n  "a": 1,\n  "a": 2\n}', "duplicate key 'a'"),  # 13: a key given twice
        (b"[" * 100_000, "nested"),  # 14
        (b'{"a": ' + b"9" * 5_000 + b"}", "5,000 digits"),
    ],
)
def test_12_to_14_a_file_that_is_no_config_is_refused_with_the_place(
    run: Run, tmp_path: Path, data: bytes, fault: str
) -> None:
    (tmp_path / "config.json").write_bytes(data)
    line = refused(run("estimate", tmp_path, *AT))
    assert "config.json" in line
    assert fault in line


def test_14_a_file_of_a_gibibyte_is_refused_before_it_is_read(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(2**30)
    assert "too large" in refused(run("estimate", path, *AT))


def test_15_an_unknown_type_is_refused_by_name_unless_told_it_is_dense(run: Run, tmp_path: Path) -> None:
    folder = config_file(tmp_path / "m", {"model_type": "nobody_knows"})
    line = refused(run("estimate", folder, *AT))
    assert "nobody_knows" in line
    assert "--assume-dense" in line
    doc, err = plan_of(run, folder, "--assume-dense")
    assert doc["kv"]["bytes_per_token"] == 131_072
    assert "kvplan: warning: model_type 'nobody_knows' is unknown" in err


@pytest.mark.parametrize("model_type", ["rwkv7", "t5", "xlstm", "minicpm_sala"])
def test_16_a_cache_that_is_not_modelled_gives_no_number(run: Run, tmp_path: Path, model_type: str) -> None:
    folder = config_file(tmp_path / "m", {"model_type": model_type})
    assert model_type in refused(run("estimate", folder, *AT))


# --- 17 to 20: weights ------------------------------------------------------------------------------------------------


def safetensors(
    path: Path, shapes: dict[str, list[int]], *, changes: dict[str, Any] | None = None, dtype: str = "BF16"
) -> int:
    """A safetensors file of zeros (sparse on disk), and the bytes of its tensors."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        size = {"BF16": 2, "F32": 4}[dtype]
        for dim in shape:
            size *= dim
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    for name, change in (changes or {}).items():
        header[name] |= change
    data = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(data)) + data)
        file.truncate(8 + len(data) + end)
    return end


def test_17_an_unknown_quantisation_takes_the_files_sizes_or_asks(run: Run, tmp_path: Path) -> None:
    unknown = config_file(tmp_path / "n", {"quantization_config": {"quant_method": "qubit"}})
    line = refused(run("estimate", unknown, *AT))
    assert "Unknown quantization method: qubit" in line
    assert "--weights-bytes" not in line  # of no use: vLLM has no such method
    folder = config_file(tmp_path / "m", {"quantization_config": {"quant_method": "torchao"}})
    line = refused(run("estimate", folder, *AT))
    assert "torchao" in line
    assert "--weights-bytes" in line
    size = safetensors(folder / "model.safetensors", {"model.embed_tokens.weight": [128256, 4096]})
    doc, err = plan_of(run, folder)
    assert doc["memory"]["weights"] == size
    assert "torchao" in err
    assert plan_of(run, folder, "--tp", "2")[0]["memory"]["weights"] == size // 2
    assert plan_of(run, folder, "--weights-bytes", "5GB")[0]["memory"]["weights"] == 5 * 10**9


# Llama's tensors at a tenth of the width, so that a file of zeros stays small.
TINY = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024,
}  # fmt: skip
TINY_SHAPES = {
    "model.embed_tokens.weight": [1024, 256], "lm_head.weight": [1024, 256], "model.norm.weight": [256],
    **{
        f"model.layers.{i}.{name}.weight": shape
        for i in range(2)
        for name, shape in {
            "self_attn.q_proj": [256, 256], "self_attn.k_proj": [128, 256], "self_attn.v_proj": [128, 256],
            "self_attn.o_proj": [256, 256], "mlp.gate_proj": [512, 256], "mlp.up_proj": [512, 256],
            "mlp.down_proj": [256, 512], "input_layernorm": [256], "post_attention_layernorm": [256],
        }.items()
    },
}  # fmt: skip


def test_17_a_checkpoint_in_another_dtype_is_no_reason_for_a_note(run: Run, tmp_path: Path) -> None:
    folder = config_file(tmp_path / "m", TINY)
    stored_bytes = safetensors(folder / "model.safetensors", TINY_SHAPES, dtype="F32")
    doc, err = plan_of(run, folder)
    assert doc["memory"]["weights"] == stored_bytes // 2  # the config says bfloat16
    assert "belong together" not in err


def test_17_files_that_are_not_the_configs_are_noted_with_both_sizes(run: Run, tmp_path: Path) -> None:
    folder = config_file(tmp_path / "m", TINY)
    stored_bytes = safetensors(folder / "model.safetensors", TINY_SHAPES | {"model.embed_tokens.weight": [2048, 256]})
    _, err = plan_of(run, folder)
    assert f"come to {stored_bytes:,} bytes in bfloat16, the config to {stored_bytes - 2 * 1024 * 256:,}" in err


def test_18_pickled_weights_are_sized_and_never_opened(run: Run, tmp_path: Path) -> None:
    folder = config_file(tmp_path / "m", {"quantization_config": {"quant_method": "qubit"}})
    with (folder / "pytorch_model.bin").open("wb") as file:
        file.write(b"PK\x03\x04 not a pickle")
        file.truncate(3 * 10**9)
    doc, err = plan_of(run, folder)
    assert doc["memory"]["weights"] == 3 * 10**9
    assert "kvplan: warning:" in err


def test_18_files_of_less_than_a_bit_a_parameter_are_not_believed(run: Run, tmp_path: Path) -> None:
    """8,030,261,248 parameters of Llama-3.1-8B in 1,003,782,656 bytes: exactly a bit each."""
    folder = config_file(tmp_path / "m", {"quantization_config": {"quant_method": "qubit"}})
    (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    line = refused(run("estimate", folder, *AT))
    assert "4 bytes, less than one bit for each of 8,030,261,248 parameters" in line
    assert "--weights-bytes" in line
    assert run("estimate", folder, *AT, "--weights-bytes", "5GB").code == 0
    os.truncate(folder / "pytorch_model.bin", 1_003_782_656)
    assert run("estimate", folder, *AT).code == 0


@pytest.mark.parametrize(
    ("changes", "tail", "fault"),
    [
        ({"b": {"data_offsets": [0, 64]}}, None, "model.safetensors"),  # overlaps a
        ({"b": {"dtype": "Q7"}}, None, "model.safetensors"),
        ({}, b"\xff" * 7 + b"\x7f{}", "model.safetensors"),  # a header longer than the file
    ],
)
def test_19_damaged_headers_are_refused_with_the_shard(
    run: Run, tmp_path: Path, changes: dict[str, Any], tail: bytes | None, fault: str
) -> None:
    folder = config_file(tmp_path / "m")
    safetensors(folder / "model.safetensors", {"a": [4, 8], "b": [4, 8]}, changes=changes)
    if tail is not None:
        (folder / "model.safetensors").write_bytes(tail)
    assert fault in refused(run("estimate", folder, *AT))


def index(folder: Path, shard: str) -> None:
    weight_map = {"weight_map": {"model.embed_tokens.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weight_map), encoding="utf-8")


def test_19_an_index_that_names_a_missing_shard_is_refused(run: Run, tmp_path: Path) -> None:
    folder = config_file(tmp_path / "m")
    index(folder, "model-00001-of-00002.safetensors")
    safetensors(folder / "model-00002-of-00002.safetensors", {"a": [4]})
    assert "model-00001-of-00002.safetensors" in refused(run("estimate", folder, *AT))


@pytest.mark.parametrize(
    "data",
    [
        b"GGML" + bytes(60),  # wrong magic
        b"GGUF" + struct.pack("<I", 99) + bytes(60),  # a version nobody wrote
        b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0) + bytes(60),  # more tensors than bytes
        b"GGUF" + struct.pack(">IQQ", 3, 1, 0) + bytes(60),  # big-endian
        b"",
    ],
)
def test_20_a_damaged_gguf_is_refused(run: Run, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    assert "m.gguf" in refused(run("estimate", path, *AT))


def test_20_a_gguf_without_a_model_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    name = b"t"
    tensor = struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 64, 0, 0)  # 64 x F32
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(256))
    assert "m.gguf: its metadata has no general.architecture" in refused(run("estimate", path, *AT))


# --- 21 to 23: names and paths ----------------------------------------------------------------------------------------


def test_21_a_model_that_is_not_cached_is_code_3_offline(run: Run) -> None:
    line = refused(run("estimate", "nobody/no-such-model", *AT, "--offline"), 3)
    assert "not in the Hub cache" in line
    assert "config.json" in line


@pytest.mark.parametrize(
    ("status", "code", "cure"),
    [
        (401, "GatedRepo", "gated; accept the license at https://huggingface.co/org/tiny-model and set HF_TOKEN"),
        (403, "GatedRepo", "gated; accept the license"),
        (401, "RepoNotFound", "not found on the Hub, or private"),
        (404, "RepoNotFound", "not found on the Hub"),
        (403, "", "access denied (403)"),
        (429, "", "retry"),
        (500, "", "retry"),
    ],
)
def test_21_what_the_hub_answers_becomes_a_cure(run: Run, hub: Hub, status: int, code: str, cure: str) -> None:
    hub.status, hub.headers = status, {"X-Error-Code": code} if code else {}
    assert cure in refused(run("estimate", MODEL, *AT), 3)


def test_21_a_hub_that_does_not_answer_is_code_3_and_the_cached_copy_is_used_with_a_note(run: Run, hub: Hub) -> None:
    hub.files["config.json"] = json.dumps(LLAMA).encode()
    first = run("estimate", MODEL, *AT, "--format", "json")
    assert first.json["kv"]["bytes_per_token"] == 131_072
    assert first.json["inputs"]["model"]["id"] == MODEL
    offline = run("estimate", MODEL, *AT, "--format", "json", "--offline")
    assert offline.out == first.out
    assert "kvplan: note: org/tiny-model: offline, the cached copy" in offline.err
    hub.status = 500
    assert "the cached copy" in run("estimate", MODEL, *AT).err


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd", "/etc/passwd", "C:\\", "a/b/c", "a//b", "x\x1b[31m/y", "[/x]", "[bold]a/b[/bold]", "a/b\n",
        "\u202ea/b", "a\0b", "./a\0b", "", "..", "~nobody-here", "a" * 5000, "a/" + "b" * 500,
    ],
)  # fmt: skip
def test_22_a_name_that_is_none_is_refused_and_printed_safely(
    run: Run, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refused(run("estimate", name, *AT))
    assert len(line) < 1000


def test_22_a_name_like_an_option_is_refused(run: Run) -> None:
    assert refused(run("estimate", "-x")).startswith("-x: no such option")
    refused(run("estimate", "--", "-x"))


def test_22_a_file_that_is_no_config_is_not_opened(run: Run, tmp_path: Path) -> None:
    secret = tmp_path / "passwd"
    secret.write_text("sesame:x:0:0", encoding="utf-8")
    line = refused(run("estimate", secret, *AT))
    assert "not a directory or a .json file" in line
    assert "sesame" not in line


def test_23_an_index_that_points_outside_its_directory_is_refused(run: Run, tmp_path: Path) -> None:
    folder = config_file(tmp_path / "m")
    safetensors(tmp_path / "x.safetensors", {"model.embed_tokens.weight": [4]})
    index(folder, "../x.safetensors")
    assert "outside" in refused(run("estimate", folder, *AT))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs FIFOs and symbolic links")
def test_23_loops_fifos_and_devices_are_refused_at_once(run: Run, tmp_path: Path) -> None:
    loop = tmp_path / "loop.json"
    loop.symlink_to(loop)
    assert "loop" in refused(run("estimate", loop, *AT))
    fifo = tmp_path / "fifo.json"
    os.mkfifo(fifo)
    assert "not a regular file" in refused(run("estimate", fifo, *AT))
    device = tmp_path / "device.json"
    device.symlink_to("/dev/zero")
    assert "not a regular file" in refused(run("estimate", device, *AT))


# --- 27, 28, 30: flags and reports ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["32kb", "-2", "0", "1.5.5k", "３２", "1_000", "", "4k,", "nan", "+5", "9" * 30])
def test_27_a_context_that_is_none_is_refused_with_the_accepted_forms(run: Run, text: str) -> None:
    line = refused(run("estimate", "llama-3.1-8b", "--gpu", "h200", f"--ctx={text}"))
    assert "32k" in line
    assert "auto" in line


@pytest.mark.parametrize("text", ["auto", "-1", "32k", "32K", "32Ki", "32768"])
def test_27_a_context_that_is_one_is_taken(run: Run, text: str) -> None:
    assert run("estimate", "llama-3.1-8b", "--gpu", "h200", "--ctx", text).code == 0


@pytest.mark.parametrize("text", ["1.2", "0", "nan", "inf", "-0.5", "1.0000001", "ninety", "", "101%"])
def test_28_a_utilization_outside_0_to_1_is_refused(run: Run, text: str) -> None:
    line = refused(run("estimate", "llama-3.1-8b", *AT, f"--gpu-memory-utilization={text}"))
    assert line.startswith(
        ("--gpu-memory-utilization: not a number", "--gpu-memory-utilization must be greater than 0")
    )
    assert line.endswith("write a fraction or a percentage, such as 0.92 or 92%")


def test_28_the_ends_of_the_range(run: Run) -> None:
    assert run("estimate", "llama-3.1-8b", *AT, "--gpu-memory-utilization", "1").code == 0
    assert run("estimate", "llama-3.1-8b", *AT, "--gpu-memory-utilization", "0.0001").code == 0


def test_30_a_report_that_cannot_be_written_is_refused_before_the_work(run: Run, tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "file").write_text("", encoding="utf-8")
    faults = {
        "none/a.json": "no such directory",
        "folder.json": "is a directory",
        "file/a.json": "no such directory",
        "a.txt": "unknown file type",
        "a": "unknown file type",
    }
    for name, fault in faults.items():
        ran = run("estimate", "no-such-model", "--report", tmp_path / name)  # the report is looked at first
        assert (ran.code, fault in ran.errors[0]) == (2, True), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.json"]


def test_30_a_read_only_place_is_refused_before_the_work(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # a superuser may write anywhere, so it is pretended
    old = tmp_path / "old.json"
    old.write_text("old", encoding="utf-8")
    assert "is read-only" in run("estimate", "no-such-model", "--report", old).errors[0]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="a superuser may write anywhere")
def test_30_a_read_only_directory_is_refused_before_the_work(run: Run, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert "Permission denied" in refused(run("estimate", "no-such-model", "--report", tmp_path / "a.json"))


def test_30_nothing_is_left_when_the_work_fails(run: Run, tmp_path: Path) -> None:
    refused(run("estimate", "no-such-model", "--report", tmp_path / "a.json", "--report", tmp_path / "b.csv"))
    assert list(tmp_path.iterdir()) == []
