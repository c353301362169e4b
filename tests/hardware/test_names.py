"""Names of GPUs as people type them, drivers print them and Kubernetes and clouds label them: each its GPU, or refused.

Product names are NVML's (nvidia-smi -L), labels those of NVIDIA's GPU feature discovery and of Google's list of
accelerators, numbers of GPUs and
host memory the clouds' own pages, slices `nvidia-smi mig -lgip` of NVIDIA's MIG User Guide.
"""

import pytest

from kvplan.core.errors import UsageError
from kvplan.hardware import apple, slices
from kvplan.hardware.gpu import gpu, gpu_names, of_device, size_note, split_count
from kvplan.hardware.instances import instance, instances
from kvplan.hardware.names import read

GIB = 2**30
TYPED = [
    ("RTX 5070 Ti, 16,303 MiB", None, "rtx-5070-ti"),  # in public texts, as the next six
    ("NVIDIA A100-SXM4-80GB, 81920 MiB", None, "a100-80g"),
    ("NVIDIA GeForce RTX 5070 Ti  15.9GiB  sm_120", None, "rtx-5070-ti"),
    ("RTX 5090, 32GB VRAM", None, "rtx-5090"),
    ("RTX 3060 12GB GDDR6", None, "rtx-3060-12g"),
    ("AMD Instinct MI300X OAM", None, "mi300x"),
    ("Apple M4 Max (MPS) 64GB", None, "m4-max-64g"),
    ("NVIDIA-A100-SXM4-80GB", None, "a100-80g"),
    ("NVIDIA-H100-80GB-HBM3", None, "h100-80g"),
    ("nvidia-h100-80gb", None, "h100-80g"),
    ("nvidia-h100", None, "h100-80g"),
    ("H100-80GB-HBM3", None, "h100-80g"),
    ("nvidia-l4", None, "l4"),
    ("nvidia-tesla-a100", None, "a100-40g"),
    ("nvidia-tesla-t4", None, "t4"),
    ("nvidia-h200-141gb", None, "h200"),
    ("nvidia-b200", None, "b200"),
    ("nvidia-rtx-pro-6000", None, "rtx-pro-6000"),
    ("NVIDIA-A10G", None, "a10g"),
    ("NVIDIA-L40S", None, "l40s"),
    ("NVIDIA-H100-80GB-HBM3-MIG-1g.10gb", None, "h100-80g-1g.10gb"),
    ("NVIDIA-A100-SXM4-40GB-MIG-3g.20gb", None, "a100-40g-3g.20gb"),
    ("h100-1g.10gb", None, "h100-80g-1g.10gb"),
    ("h100 3g.40gb", None, "h100-80g-3g.40gb"),
    ("a100-3g.40gb", None, "a100-80g-3g.40gb"),
    ("h200-1g.18gb", None, "h200-1g.18gb"),
    ("b200-1g.23gb", None, "b200-1g.23gb"),
    ("a30-1g.6gb", None, "a30-1g.6gb"),
    ("p5.48xlarge", 8, "h100-80g"),
    ("p4d.24xlarge", 8, "a100-40g"),
    ("p4de.24xlarge", 8, "a100-80g"),
    ("g5.xlarge", 1, "a10g"),
    ("g6.12xlarge", 4, "l4"),
    ("g6e.48xlarge", 8, "l40s"),
    ("ml.g5.12xlarge", 4, "a10g"),
    ("a3-highgpu-8g", 8, "h100-80g"),
    ("a2-ultragpu-4g", 4, "a100-80g"),
    ("a2-highgpu-1g", 1, "a100-40g"),
    ("Standard_ND96isr_H100_v5", 8, "h100-80g"),
    ("ND96isr_H100_v5", 8, "h100-80g"),
    ("gpu_8x_h100_sxm5", 8, "h100-80g"),
    ("4090x2", 2, "rtx-4090"),
    ("3090x4", 4, "rtx-3090"),
    ("2x h100", 2, "h100-80g"),
    ("8*H100", 8, "h100-80g"),
    ("8 h100s", 8, "h100-80g"),
    ("2080tix2", 2, "rtx-2080-ti"),
    ("2 x rtx 3090", 2, "rtx-3090"),
    ("rtx-5070-ti", None, "rtx-5070-ti"),
    ("5070ti", None, "rtx-5070-ti"),
    ("rtx 4060", None, "rtx-4060"),
    ("RTX 4060 Ti 16GB", None, "rtx-4060-ti-16g"),
    ("4060ti 16gb", None, "rtx-4060-ti-16g"),
    ("rtx-4060-ti-16g", None, "rtx-4060-ti-16g"),
    ("NVIDIA GeForce RTX 4060 Laptop GPU", None, "rtx-4060-laptop"),
    ("RTX 4090 Laptop", None, "rtx-4090-laptop"),
    ("4090 mobile", None, "rtx-4090-laptop"),
    ("RTX 3080 10GB", None, "rtx-3080-10g"),
    ("3060 ti", None, "rtx-3060-ti"),
    ("rtx 3070", None, "rtx-3070"),
    ("RTX A4000", None, "rtx-a4000"),
    ("A4000", None, "rtx-a4000"),
    ("a16", None, "a16"),
    ("a2", None, "a2"),
    ("RTX 4000 Ada", None, "rtx-4000-ada"),
    ("NVIDIA RTX 5000 Ada Generation", None, "rtx-5000-ada"),
    ("rtx-pro-5000", None, "rtx-pro-5000"),
    ("RTX PRO 4500 Blackwell", None, "rtx-pro-4500"),
    ("RTX 6000 Pro", None, "rtx-pro-6000"),
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None, "rtx-pro-6000"),
    ("rx-7900-xtx", None, "rx-7900-xtx"),
    ("7900 xt", None, "rx-7900-xt"),
    ("AMD Radeon RX 7900 XT", None, "rx-7900-xt"),
    ("r9700", None, "r9700"),
    ("Radeon AI PRO R9700", None, "r9700"),
    ("mi350x", None, "mi350x"),
    ("AMD Instinct MI300X", None, "mi300x"),
    ("strix-halo", None, "strix-halo-128g"),
    ("Ryzen AI Max+ 395", None, "strix-halo-128g"),
    ("Radeon 8060S", None, "strix-halo-128g"),
    ("DGX Spark", None, "gb10"),
    ("dgx station", None, "gb300"),
    ("jetson orin nano", None, "jetson-orin-nano-8g"),
    ("b60", None, "arc-pro-b60"),
    ("Arc Pro B60", None, "arc-pro-b60"),
    ("m4-max-64g", None, "m4-max-64g"),
    ("M4 Max 64GB", None, "m4-max-64g"),
    ("Apple M1 8GB", None, "m1-8g"),
    ("l20", None, "l20"),
    ("Tesla P40", None, "p40"),
    ("quadro rtx 8000", None, "quadro-rtx-8000"),
    ("A100 80GB", None, "a100-80g"),
    ("a100 40gb", None, "a100-40g"),
    ("H100 SXM 80GB", None, "h100-80g"),
    ("H100 PCIe", None, "h100-pcie-80g"),
    ("h100 nvl", None, "h100-nvl-94g"),
    ("4090", None, "rtx-4090"),
    ("RTX 4090 24GB", None, "rtx-4090"),
]


@pytest.mark.parametrize(("typed", "count", "name"), TYPED)
def test_a_typed_name_is_its_gpu(typed: str, count: int | None, name: str) -> None:
    named = read(typed)
    assert (named.spec.name, named.count) == (name, count)
    number, own = split_count(typed)
    assert (gpu(own).name, number) == (name, count)


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("rtx 6000", "fits 3 GPUs; write rtx-6000-ada, rtx-pro-6000 or quadro-rtx-6000"),
        ("4060 ti", "fits 2 GPUs; write rtx-4060-ti-8g or rtx-4060-ti-16g"),
        ("NVIDIA GeForce RTX 3080", "fits 2 GPUs; write rtx-3080-10g or rtx-3080-12g"),
        ("a100-1g.10gb", "fits 3 GPUs; write a100-40g-1g.10gb, a100-80g-1g.10gb or a100-pcie-80g-1g.10gb"),
        ("h100-2g.7gb", "h100-80g has no such slice; it has 1g.10gb, 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb"),
        ("4090-1g.6gb", "rtx-4090 cannot be divided into MIG slices; name it whole: rtx-4090"),
        ("m4", "does not say how much memory it has; write m4-16g, m4-24g or m4-32g"),
        ("M4 Max 96GB", "no Mac with m4-max has 96 GB; write m4-max-36g, m4-max-48g, m4-max-64g or m4-max-128g"),
        ("gtx 1080", "not in the catalog; did you mean gtx-1080-ti?"),  # another card
        ("4080s", "not in the catalog; did you mean rtx-4080"),  # short for the SUPER
        ("p5.64xlarge", "not in the catalog; did you mean p5.4xlarge, p5.48xlarge, p5e.48xlarge?"),
        ("24gb", "is a size, and no GPU has all of its published size to give: not in the catalog"),
        (
            "gaudi3",
            "is an Intel Gaudi accelerator, of whose memory no rule is known; Intel's plug-ins for Gaudi serve on it",
        ),
        ("tpu-v5e", "is a TPU, of whose memory no rule is known; JetStream serves on it"),
        ("trn2.48xlarge", "is an AWS chip, of whose memory no rule is known; AWS's plug-ins serve on it"),
        ("cpu", "is a CPU, not a GPU, of whose memory no rule is known; llama.cpp and Ollama serve on it"),
    ],
)
def test_a_name_of_two_or_none_is_refused_in_one_line(typed: str, text: str) -> None:
    with pytest.raises(UsageError) as error:
        gpu(typed)
    assert text in str(error.value)
    assert "\n" not in str(error.value)


def test_every_own_name_is_read_as_itself() -> None:
    macs = apple.names()
    parts = [f"{name}-{profile}" for name in slices.WHOLE for profile in slices.profiles(name)]
    for name in [*gpu_names(), *macs, *parts]:
        assert gpu(name).name == name
        assert split_count(name) == (None, name)


# (GPU, profile, GiB, SMs) of `nvidia-smi mig -lgip`.
GUIDE = [
    ("a100-40g", "1g.5gb", 4.75, 14), ("a100-40g", "3g.20gb", 19.62, 42), ("a100-40g", "7g.40gb", 39.25, 98),
    ("a100-80g", "1g.10gb", 9.5, 14), ("a100-80g", "2g.20gb", 19.5, 28), ("a100-80g", "3g.40gb", 39.25, 42),
    ("h100-80g", "1g.10gb", 9.75, 16), ("h100-80g", "1g.20gb", 19.62, 26), ("h100-80g", "4g.40gb", 39.5, 64),
    ("a30", "1g.6gb", 5.81, 14), ("a30", "2g.12gb", 11.68, 28),
]  # fmt: skip


@pytest.mark.parametrize(("name", "profile", "gib", "sms"), GUIDE)
def test_a_slice_has_the_guides_memory_and_sms(name: str, profile: str, gib: float, sms: int) -> None:
    spec = gpu(f"{name}-{profile}")
    assert (spec.total_memory, spec.sm_count) == (round(gib * GIB), sms)
    assert (spec.compute_capability, spec.total_memory_kind) == (gpu(name).compute_capability, "logged")


NAMES_OF_PROFILES = {
    "a100-40g": "1g.5gb 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb", "a30": "1g.6gb 2g.12gb 4g.24gb",
    "h100-nvl-94g": "1g.12gb 1g.24gb 2g.24gb 3g.47gb 4g.47gb 7g.94gb",
    "h200": "1g.18gb 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb",
    "gh200-96g": "1g.12gb 1g.24gb 2g.24gb 3g.48gb 4g.48gb 7g.96gb",
    "b200": "1g.23gb 1g.45gb 2g.45gb 3g.90gb 4g.90gb 7g.180gb",
    "gb200": "1g.23gb 1g.47gb 2g.47gb 3g.93gb 4g.93gb 7g.186gb", "rtx-pro-6000": "1g.24gb 2g.48gb 4g.96gb",
}  # fmt: skip


def test_one_rule_makes_the_names_of_every_profile() -> None:
    for name, profiles in NAMES_OF_PROFILES.items():
        assert " ".join(slices.profiles(name)) == profiles


def test_slices_of_a_gpu_never_add_up_to_more_than_it() -> None:
    for name, whole in slices.WHOLE.items():
        for profile, part in slices.profiles(name).items():
            spec = gpu(f"{name}-{profile}")
            assert spec.total_memory_low <= spec.total_memory <= spec.total_memory_high
            assert spec.total_memory * whole.parts // part.parts <= gpu(name).total_memory_high


def test_a_slice_is_known_by_its_device_name() -> None:
    spec = of_device("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 0)
    assert spec is not None
    assert (spec.name, spec.is_a100, spec.interconnect) == ("a100-80g-3g.40gb", True, "none")
    assert of_device("NVIDIA Something MIG 1g.5gb", 0) is None


@pytest.mark.parametrize(
    ("name", "board", "count", "host_gib"),
    [
        ("p5.48xlarge", "h100-80g", 8, 2048), ("p4d.24xlarge", "a100-40g", 8, 1152), ("g6e.xlarge", "l40s", 1, 32),
        ("g5.12xlarge", "a10g", 4, 192), ("a3-highgpu-8g", "h100-80g", 8, 1872), ("a2-ultragpu-1g", "a100-80g", 1, 170),
        ("g2-standard-96", "l4", 8, 384), ("nd96isr_h200_v5", "h200", 8, 1850),
        ("Standard_NC24ads_A100_v4", "a100-pcie-80g", 1, 220), ("BM.GPU.MI300X.8", "mi300x", 8, 2048),
    ],
)  # fmt: skip
def test_an_instance_is_its_clouds(name: str, board: str, count: int, host_gib: int) -> None:
    machine = instance(name)
    assert machine is not None
    assert (machine.gpu, machine.count, machine.host_memory) == (board, count, host_gib * GIB)


def test_every_instance_has_a_gpu_of_the_catalog() -> None:
    assert {machine.gpu for machine in instances().values()} <= set(gpu_names())
    assert len(instances()) >= 100


def test_a_mac_has_what_metal_gives_it() -> None:
    """Sizes of recommendedMaxWorkingSetSize in public logs of llama.cpp, and a range where none is."""
    for name, mib in (("m1-8g", 5461), ("m5-24g", 18186), ("m4-max-36g", 28753), ("m1-max-64g", 53084)):
        assert (gpu(name).total_memory, gpu(name).total_memory_kind) == (mib * 2**20, "logged")
    spec = gpu("m4-pro-48g")
    assert (spec.total_memory, spec.total_memory_kind) == (36 * GIB, "nominal")
    assert (spec.total_memory_low, spec.total_memory_high) == (32 * GIB, round(0.81 * 48 * GIB))
    assert (spec.unified, spec.has_own_limit, spec.shared_memory) == (True, True, 48 * GIB)


@pytest.mark.parametrize(
    ("name", "taken", "other"),
    [
        ("a100", "a100-80g", "the other is a100-40g"),  # sold with 40 and with 80 GB (NVIDIA's data sheet)
        ("v100", "v100-32g", "the other is v100-16g"),
        ("3060", "rtx-3060-12g", "--gpu-memory"),  # and with 8 GB, which is not in the catalog
    ],
)
def test_a_name_of_several_sizes_says_which_was_taken(name: str, taken: str, other: str) -> None:
    note = size_note(name, gpu(name))
    assert note is not None
    assert note.startswith(f"--gpu {name}: taken as {taken}; ")
    assert other in note


@pytest.mark.parametrize("name", ["a100-80g", "NVIDIA-A100-SXM4-80GB", "a100-40gb", "h100", "h200", "l40s", "4090"])
def test_a_name_that_leaves_nothing_open_has_no_note(name: str) -> None:
    assert size_note(name, gpu(name)) is None
