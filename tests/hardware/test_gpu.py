"""GPU facts: complete, sourced, physically possible, and the totals that real CUDA runtimes report."""

import json
import re
from collections import Counter
from typing import Any

import pytest

from kvplan.core import entries
from kvplan.core.errors import InvalidInputError, UsageError
from kvplan.hardware.gpu import GpuSpec, custom_gpu, gpu, gpu_names, read_entry, split_count, with_memory
from tests.support.oracle_data import DATA, needs_oracle_data

GIB = 2**30
MIB = 2**20
NAMES = gpu_names()


def test_there_are_at_least_35_gpus() -> None:
    assert len(NAMES) >= 35
    names = """v100-16g v100-32g t4 a10 a10g a30 a40 rtx-a6000 a100-40g a100-80g a100-pcie-80g l4 l40 l40s h100-80g
    h100-pcie-80g h100-nvl-94g h800-80g h200 h20 gh200-96g gh200-144g b200 b300 gb200 rtx-3090 rtx-4090 rtx-5090
    rtx-pro-6000 gb10 mi210 mi250 mi300x mi325x mi355x rx-7900-xtx"""
    assert set(names.split()) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_is_complete_and_sourced(name: str) -> None:
    spec = gpu(name)
    assert spec.name == name
    assert spec.memory_bandwidth is not None
    assert len(spec.source) > 10
    assert len(spec.total_memory_source) > 10
    assert spec.unified or spec.bf16_flops or spec.fp16_flops
    assert (spec.vendor == "nvidia") == (spec.sm > 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_total_is_below_the_vendors_figure_and_above_nine_tenths_of_it(name: str) -> None:
    spec = gpu(name)
    assert spec.nominal_memory is not None
    assert spec.total_memory_low <= spec.total_memory <= spec.total_memory_high < spec.nominal_memory
    if not spec.has_own_limit:
        assert spec.total_memory_low > 0.9 * spec.nominal_memory


@pytest.mark.parametrize("name", NAMES)
def test_bf16_and_fp8_rates_follow_the_architecture(name: str) -> None:
    spec = gpu(name)
    if spec.vendor == "nvidia" and not spec.unified:
        assert (spec.bf16_flops is not None) == (spec.sm >= 80)  # bf16 tensor cores came with Ampere
        assert (spec.fp8_flops is not None) == (spec.sm >= 89)  # fp8 with Ada and Hopper
    if spec.fp8_flops is not None and spec.bf16_flops is not None:
        # Doubled by design; L40S's datasheet says 362.05 and 733. A sparse figure beside a dense one would give 4.
        assert spec.fp8_flops / spec.bf16_flops == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("a100-80g", 81_152 * MIB),  # llama.cpp --list-devices of NVIDIA A100-SXM4-80GB, driver 590
        ("a100-40g", 40_326 * MIB),  # torch.cuda.get_device_properties of NVIDIA A100-PCIE-40GB
        ("h100-80g", 85_017_755_648),  # deviceQuery of NVIDIA H100 80GB HBM3, driver 13.0
        ("h100-pcie-80g", 81_008 * MIB),  # torch.cuda.get_device_properties of NVIDIA H100 PCIe
        ("h20", 97_285 * MIB),  # torch.cuda.get_device_properties of NVIDIA H20
        ("gh200-96g", 102_005_473_280),  # deviceQuery of NVIDIA GH200 480GB
        ("b300", 287_428_771_840),  # device_total_bytes in a training log of B300 nodes
        ("a10g", 22_587 * MIB),  # torch.cuda.get_device_properties of NVIDIA A10G, torch 2.15 nightly
        ("l40s", 47_576_711_168),  # cuda-device-query of NVIDIA L40S
        ("rtx-4090", 25_386_352_640),  # deviceQuery of NVIDIA GeForce RTX 4090, CUDA 12.4
        ("rtx-5090", 33_660_534_784),  # deviceQuery of NVIDIA GeForce RTX 5090, driver 13.0
        ("mi355x", 294_896 * MIB),  # llama.cpp --list-devices of AMD Instinct MI355X
    ],
)
def test_totals_are_those_of_public_device_queries(name: str, total: int) -> None:
    assert gpu(name).total_memory == total


@pytest.mark.parametrize(
    ("name", "reading_gib"),
    [
        ("h200", 143_156 / 1024),  # torch.cuda.get_device_properties of NVIDIA H200
        ("b200", 182_642 / 1024),  # torch.cuda.get_device_properties of NVIDIA B200, another host than the entry's
        ("a100-80g", 85_100_068_864 / GIB),  # deviceQuery of NVIDIA A100-SXM4-80GB, CUDA 12.5
        ("rtx-pro-6000", 97_250 / 1024),  # torch.cuda.get_device_properties of the Server Edition
        ("mi300x", 196_592 / 1024),  # ROCm/ROCm#4203
        ("rtx-3090", 24_268 / 1024),  # transformers' documentation
        ("t4", 14.56),  # vllm-project/vllm#15766
    ],
)
def test_other_readings_of_the_same_gpu_lie_in_its_range(name: str, reading_gib: float) -> None:
    spec = gpu(name)
    assert spec.total_memory_low / GIB - 0.005 <= reading_gib <= spec.total_memory_high / GIB + 0.005


# server log's id -> entry, where the log (or its notes) names the GPU. H100 of llm-d-planner: 142-151.
LOGGED = {
    38: "a100-40g",
    81: "mi300x",
    116: "t4",
    120: "t4",
    137: "h100-80g",
    140: "rtx-3090",
    141: "rtx-3090",
    158: "rtx-pro-6000",
    186: "rtx-3090",
    191: "h200",
    210: "a100-80g",
    220: "l40s",
    273: "a100-40g",
    277: "v100-32g",
    292: "h100-nvl-94g",
} | dict.fromkeys(range(142, 152), "h100-80g")


@needs_oracle_data
def test_logged_totals_are_the_entries_totals() -> None:
    lines = (DATA / "server_logs.jsonl").read_text(encoding="utf-8").splitlines()
    logs = {row["id"]: row["measured"].get("total_gpu_mem_gib") for row in map(json.loads, lines)}
    readings: dict[str, list[float]] = {}
    for log_id, name in LOGGED.items():
        readings.setdefault(name, []).append(logs[log_id])
    for name, values in readings.items():
        spec = gpu(name)
        # Servers print two decimals: half of the last one each way, and the middle value is the entry's.
        assert sorted(values)[(len(values) - 1) // 2] == pytest.approx(spec.total_memory / GIB, abs=0.0051), name
        assert min(values) >= spec.total_memory_low / GIB - 0.0051, name
        assert max(values) <= spec.total_memory_high / GIB + 0.0051, name


# The rule of kvplan.hardware.gpu's docstring, by hand: nominal GiB x (low, middle, high).
INLINE_ECC, UP_TO_48, FROM_80 = (0.909, 0.921, 0.928), (0.966, 0.982, 0.993), (0.984, 0.990, 0.992)


@pytest.mark.parametrize(
    ("name", "nominal", "ratios"),
    [
        ("a10", 24, INLINE_ECC),
        ("l40", 48, INLINE_ECC),
        ("a30", 24, UP_TO_48),
        ("a800-80g", 80, FROM_80),
        ("h800-80g", 80, FROM_80),
        ("h200-nvl-141g", 141, FROM_80),
        ("h20-3e-141g", 141, FROM_80),
        *((name, size, INLINE_ECC) for name, size in (("a2", 16), ("a16", 16), ("l2", 24), ("l20", 48), ("p40", 24))),
    ],
)
def test_a_nominal_total_is_a_share_of_the_published_size(
    name: str, nominal: int, ratios: tuple[float, float, float]
) -> None:
    spec = gpu(name)
    totals = (spec.total_memory_low, spec.total_memory, spec.total_memory_high)
    assert spec.total_memory_kind == "nominal"
    assert totals == tuple(round(nominal * GIB * ratio) for ratio in ratios)


def test_the_rules_ratios_span_the_sourced_totals() -> None:
    inline_ecc = {"t4", "a10g", "a40", "l4", "l40s"}
    for spec in map(gpu, NAMES):
        # B300 holds 288 GB, of which its runtime shows 268: no basis for a rule about reserves.
        if spec.vendor != "nvidia" or spec.unified or spec.nominal_memory is None or spec.name == "b300":
            continue
        if spec.total_memory_kind == "nominal" or spec.name == "rtx-4070-super":  # by another rule, under Windows
            continue
        small = FROM_80 if spec.nominal_memory > 48 * GIB else UP_TO_48
        low, _, high = INLINE_ECC if spec.name in inline_ecc | {"a10", "l40"} else small
        assert low * spec.nominal_memory <= spec.total_memory <= high * spec.nominal_memory, spec.name


# MiB that logged cards keep back, whatever their size: of each in gpus.yaml without ECC in the same memory.
KEPT_BACK = {
    "8.6": (244, 465), "8.9": (335, 502), "12.0": (543, 667),
}  # fmt: skip


def test_the_ranges_span_what_logged_cards_of_the_kind_keep_back() -> None:
    logged: dict[str, list[float]] = {}
    for spec in map(gpu, NAMES):
        if spec.total_memory_kind == "logged" and "GeForce" in spec.device_name and spec.capability is not None:
            assert spec.nominal_memory is not None
            logged.setdefault(spec.compute_capability or "", []).append((spec.nominal_memory - spec.total_memory) / MIB)
    for capability, (low, high) in KEPT_BACK.items():
        # The RTX 4070 SUPER was logged under Windows, where a card keeps back 7 MiB.
        sizes = [size for size in logged[capability] if size > 7]
        assert low <= min(sizes), capability
        assert max(sizes) <= high, capability


@pytest.mark.parametrize("name", NAMES)
def test_a_nominal_geforce_is_its_size_less_what_its_kind_keeps_back(name: str) -> None:
    spec = gpu(name)
    if spec.total_memory_kind != "nominal" or "GeForce" not in spec.device_name:
        return
    low, high = KEPT_BACK.get(spec.compute_capability or "", (224, 288))  # Pascal and Turing: V100, RTX 2080 Ti
    assert spec.nominal_memory is not None
    ends = [(spec.nominal_memory - total) / MIB for total in (spec.total_memory_high, spec.total_memory_low)]
    assert ends == [7, 245 if spec.compute_capability == "7.5" else high]
    assert low <= (spec.nominal_memory - spec.total_memory) / MIB <= high


LLAMACPP = {
    "RTX 3090 Ti": "rtx-3090-ti", "RTX 3060": "rtx-3060-12g", "RTX 4070": "rtx-4070",
    "RTX 4070 SUPER": "rtx-4070-super",
    "Apple M1 8GB": "m1-8g", "Apple M5": "m5-24g", "Apple M4 Max": "m4-max-36g",
    "Radeon 8060S (Strix Halo)": "strix-halo-128g",
}  # fmt: skip


@needs_oracle_data
def test_totals_that_llama_cpp_logged_are_the_entries() -> None:
    rows = map(json.loads, (DATA / "llamacpp_logs.jsonl").read_text(encoding="utf-8").splitlines())
    seen = set()
    for row in rows:
        places = [place for key, place in row["buffers_mib"].items() if key.startswith(("CUDA", "MTL", "ROCm"))]
        for label, place in zip(row["gpus"] or (), places, strict=False):
            if label in LLAMACPP and "total" in place:
                spec = gpu(LLAMACPP[label])
                assert spec.total_memory_low <= place["total"] * MIB <= spec.total_memory_high, label
                assert spec.total_memory_kind == "logged"
                seen.add(label)
    assert seen == set(LLAMACPP)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("a100", "a100-80g"),
        ("h100", "h100-80g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80g"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("Tesla T4", "t4"),
        ("4090", "rtx-4090"),
        (" H200 ", "h200"),
        ("dgx-spark", "gb10"),
    ],
)
def test_aliases_resolve_whatever_their_case(alias: str, name: str) -> None:
    assert gpu(alias).name == name


def test_no_alias_means_two_gpus_and_every_device_name_is_one() -> None:
    path = entries.locate("gpus.yaml")
    facts = {name: entries.entry(path, name) for name in NAMES}
    spoken = Counter(str(word).lower() for name, entry in facts.items() for word in {name, *entry["aliases"]})
    assert [word for word, count in spoken.items() if count > 1] == []
    for name, entry in facts.items():
        for word in entry["aliases"]:
            assert entries.resolve(path, str(word)) == name
    counts = Counter(gpu(name).device_name for name in NAMES)
    for spec in map(gpu, NAMES):
        if counts[spec.device_name] == 1:
            assert gpu(spec.device_name) == spec
    several = {
        "NVIDIA GeForce RTX 4060 Ti",
        "NVIDIA GeForce RTX 5060 Ti",
        "NVIDIA GeForce RTX 3080",
        "NVIDIA RTX A2000",
    }
    for device in several:  # sold with two sizes
        with pytest.raises(UsageError, match="fits 2 GPUs"):
            gpu(device)


def test_one_gpu_is_read_without_parsing_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    read = entries.entry

    def note(path: Any, name: str) -> dict[str, Any]:
        parsed.append(name)
        return read(path, name)

    gpu.cache_clear()
    monkeypatch.setattr(entries, "entry", note)
    gpu("l40s")
    assert parsed == ["l40s"]


def test_an_unknown_gpu_gets_near_misses() -> None:
    with pytest.raises(UsageError, match=r"^gpu 'a100-80gbb': not in the catalog; did you mean .*a100-80g"):
        gpu("a100-80gbb")


@pytest.mark.parametrize(
    ("name", "sm"), [("v100-32g", 70), ("a100-80g", 80), ("l4", 89), ("h200", 90), ("b200", 100), ("b300", 103)]
)
def test_sm_is_the_compute_capability_in_tenths(name: str, sm: int) -> None:
    assert gpu(name).sm == sm


def test_sm_has_two_digits_before_the_point_from_blackwell_on() -> None:
    assert (gpu("rtx-5090").sm, gpu("gb10").sm, gpu("mi300x").sm) == (120, 121, 0)
    assert gpu("mi300x").architecture == "gfx942"


def test_what_the_scheduler_defaults_ask_of_a_device() -> None:
    """vLLM 0.33: from 160 GiB; from 70 GiB unless it is A100 or GB10; the rest."""
    assert {name for name in NAMES if gpu(name).is_a100} == {"a100-40g", "a100-80g", "a100-pcie-80g"}
    assert {name for name in NAMES if gpu(name).is_gb10} == {"gb10"}
    large = {name for name in NAMES if gpu(name).total_memory >= 160 * GIB}
    assert large == {"b200", "b300", "gb200", "gb300", "mi300x", "mi325x", "mi350x", "mi355x"}


def test_unified_memory_is_marked() -> None:
    shared = {name for name in NAMES if gpu(name).unified}
    assert shared == {"gb10", "mi300a"} | {name for name in NAMES if name.startswith(("jetson", "strix-halo"))}
    assert {name for name in shared if gpu(name).has_own_limit} == {n for n in NAMES if n.startswith("strix-halo")}


@pytest.mark.parametrize(
    ("name", "kind", "bandwidth"),
    [  # the vendors' data sheets, both directions together
        ("a100-80g", "nvlink", 600), ("a800-80g", "nvlink", 400), ("h100-80g", "nvlink", 900), ("b200", "nvlink", 1800),
        ("h100-pcie-80g", "pcie", 128), ("rtx-4090", "pcie", 64), ("l40s", "pcie", 64), ("t4", "pcie", 32),
        ("mi300x", "infinity-fabric", 896), ("gb10", "none", None),
    ],
)  # fmt: skip
def test_what_gpus_of_one_server_speak_over(name: str, kind: str, bandwidth: int | None) -> None:
    spec = gpu(name)
    assert (spec.interconnect, spec.interconnect_bandwidth) == (kind, bandwidth and bandwidth * 10**9)


def test_a_given_size_is_exact_and_claims_no_speed() -> None:
    spec = custom_gpu(24 * GIB)
    assert (spec.total_memory_low, spec.total_memory, spec.total_memory_high) == (24 * GIB,) * 3
    assert (spec.memory_bandwidth, spec.bf16_flops, spec.sm) == (None, None, 0)
    assert spec.total_memory_kind == "given"


def test_a_given_size_keeps_the_rest_of_a_known_gpu() -> None:
    spec = with_memory(gpu("h100"), 78 * GIB)
    assert (spec.total_memory, spec.total_memory_kind, spec.sm) == (78 * GIB, "given", 90)


@pytest.mark.parametrize("make", [custom_gpu, lambda size: with_memory(gpu("h100"), size)])
@pytest.mark.parametrize("size", [0, -1])
def test_a_given_size_of_nothing_is_refused(make: Any, size: int) -> None:
    with pytest.raises(UsageError, match=r"^--gpu-memory must be greater than 0"):
        make(size)


GOOD: dict[str, Any] = {
    "vendor": "nvidia",
    "device_name": "NVIDIA Test",
    "nominal_memory": 80 * GIB,
    "total_memory": 79 * GIB,
    "total_memory_range": [79 * GIB, 79 * GIB],
    "total_memory_kind": "logged",
    "total_memory_source": "a log",
    "memory_bandwidth": 10**12,
    "compute_capability": "9.0",
    "source": "a datasheet",
    "interconnect": "nvlink",
    "interconnect_bandwidth": 900 * 10**9,
    "interconnect_source": "a datasheet",
}


def test_a_sound_entry_is_read() -> None:
    assert isinstance(read_entry("test", GOOD), GpuSpec)


@pytest.mark.parametrize(
    ("fact", "value", "text"),
    [
        ("total_memory", 0, "total_memory is not a positive integer (0)"),
        ("total_memory", None, "total_memory is not a positive integer (None)"),
        ("total_memory", 79.2, "total_memory is not a positive integer (79.2)"),
        ("total_memory", True, "total_memory is not a positive integer (True)"),
        ("total_memory", 78 * GIB, "total_memory is outside total_memory_range"),
        ("total_memory_range", [2, 1], "total_memory_range is not [low, high] in bytes ([2, 1])"),
        ("total_memory_range", [79 * GIB], "total_memory_range is not [low, high] in bytes"),
        ("total_memory_range", [79 * GIB, 81 * GIB], "total_memory_range exceeds nominal_memory"),
        ("total_memory_kind", "guessed", "total_memory_kind is none of logged, nominal ('guessed')"),
        ("vendor", "apple", "vendor is none of nvidia, amd, intel ('apple')"),
        ("source", " ", "source is not text (' ')"),
        ("interconnect", "ethernet", "interconnect is none of nvlink, infinity-fabric, pcie, none ('ethernet')"),
        ("interconnect", "none", "interconnect_bandwidth stands beside an interconnect, and only there"),
        ("interconnect_bandwidth", None, "interconnect_bandwidth stands beside an interconnect, and only there"),
        ("bf16_flops", -5, "bf16_flops is not a positive integer (-5)"),
        ("bf16_flops", float("nan"), "bf16_flops is not a positive integer (nan)"),
        ("compute_capability", "nine", "compute_capability is not of the form '9.0' ('nine')"),
        ("compute_capability", "9.", "compute_capability is not of the form '9.0' ('9.')"),
        ("compute_capability", "90", "compute_capability is not of the form '9.0' ('90')"),
        ("compute_capability", 9.0, "compute_capability is not text (9.0)"),
        ("compute_capability", None, "compute_capability and architecture: exactly one is needed"),
        ("architecture", "gfx942", "compute_capability and architecture: exactly one is needed"),
        ("unified", "yes", "unified is neither true nor false ('yes')"),
    ],
)
def test_a_wrong_fact_is_named(fact: str, value: object, text: str) -> None:
    with pytest.raises(InvalidInputError, match=r"^gpus\.yaml: test: " + re.escape(text)):
        read_entry("test", GOOD | {fact: value})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("A100 80GB", "a100-80g"),  # SXM, as `a100` alone is
        ("A100 80GB PCIe", "a100-pcie-80g"),
        ("NVIDIA A100 80GB", "a100-80g"),
        ("NVIDIA L40S", "l40s"),
        ("nvidia rtx 4090", "rtx-4090"),
        (" RTX  4090 ", "rtx-4090"),
        ("AMD MI300X", "mi300x"),
    ],
)
def test_spaces_stand_for_hyphens_and_the_maker_may_be_said(text: str, name: str) -> None:
    assert gpu(text).name == name


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("4090x2", 2, "4090"),
        ("8 h100s", 8, "h100s"),
        ("p5.48xlarge", 8, "h100-80g"),
        ("2 x g6.12xlarge", 8, "l4"),
        ("8xh100", 8, "h100"),
        ("8 x h100-80g", 8, "h100-80g"),
        ("2xl40s", 2, "l40s"),
        ("2 × l40s", 2, "l40s"),
        ("l40s:2", 2, "l40s"),
        ("4X A100 80GB", 4, "A100 80GB"),
        ("1xb200", 1, "b200"),
        ("h100", None, "h100"),
        ("0xh100", None, "0xh100"),
        ("l40s:", None, "l40s:"),
        ("xh100", None, "xh100"),
        ("10000xh100", None, "10000xh100"),
    ],
)
def test_a_number_of_gpus_is_read_before_or_after_the_name(text: str, count: int | None, name: str) -> None:
    assert split_count(text) == (count, name)


def test_no_name_of_a_gpu_is_read_as_a_number_of_gpus() -> None:
    path = entries.locate("gpus.yaml")
    aliases = [str(word) for name in NAMES for word in entries.entry(path, name).get("aliases", ())]
    for name in (*NAMES, *aliases):
        assert split_count(name) == (None, name)
        assert split_count(f"8x{name}") == (8, name)
        assert split_count(f"{name}:8") == (8, name)


def test_a_chip_that_holds_host_and_gpu_is_one_of_its_machine() -> None:
    assert {name: gpu(name).node_gpus for name in ("gb10", "jetson-thor", "m4-max-128g", "mi300a", "h100-80g")} == {
        "gb10": 1, "jetson-thor": 1, "m4-max-128g": 1, "mi300a": 8, "h100-80g": 8,
    }  # fmt: skip  # HPE's and Supermicro's MI300A nodes have 4, joined by Infinity Fabric
