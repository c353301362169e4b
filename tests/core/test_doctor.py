"""`kvplan doctor`: it always answers, tells what there is, and never tells a secret."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from kvplan.measure import doctor
from kvplan.measure.doctor import Driver, Torch, ask_torch, cuda_build, gpu_advice
from tests.support.cli import Run, refused, run
from tests.support.fake_nvml import (
    DRIVER_NOT_LOADED,
    GIB,
    GPU_IS_LOST,
    LIB_RM_VERSION_MISMATCH,
    MIB,
    NO_PERMISSION,
    FakeGpu,
    Install,
    install,
    no_driver,
)

__all__ = ["install", "no_driver", "run"]  # fixtures

ROOT = Path(__file__).resolve().parents[2]

# What a reader of the JSON may rely on.
TEXT, NUMBER, OR_NULL = {"type": "string"}, {"type": "integer"}, {"type": "null"}
KEYS = {
    "schema": {"const": "kvplan/doctor@1"},
    "kvplan": {"anyOf": [TEXT, OR_NULL]},
    "kvplan_path": TEXT,
    "python": TEXT,
    "python_path": TEXT,
    "platform": TEXT,
    "packages": {
        "type": "array",
        "items": {"type": "object", "required": ["name", "version", "extra", "bounds", "fits"]},
    },
    "torch": {"anyOf": [{"type": "object", "required": ["version", "cuda_build", "cuda_available"]}, OR_NULL]},
    "nvml": {"type": "object", "required": ["status", "problem", "driver_version", "cuda_version", "gpus", "warnings"]},
    "host": {"type": "object", "required": ["num_cores", "memory_total", "memory_available", "memory_limit"]},
    "disks": {"type": "array", "items": {"type": "object", "required": ["use", "path", "total", "free"]}},
    "facts": {"type": "array", "items": {"type": "object", "required": ["name", "path", "num_entries"]}},
    "settings": {"type": "array", "items": {"type": "object", "required": ["name", "value", "origin", "meaning"]}},
    "advice": {"type": "array", "items": {"type": "object", "required": ["missing", "needed_for", "cure", "problem"]}},
}


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is asked in a process of its own, and kvplan's metadata for bounds, only by the tests about that."""
    monkeypatch.setattr(doctor, "ask_torch", lambda number, build: Torch(number, build, False, 0, None))
    monkeypatch.setattr(doctor, "requires", lambda name: [])


def row(out: str, name: str, section: str = "") -> str:
    """What stands beside `name`, which is unique in its section; no section: in all."""
    start = out.index(f"{section}\n") if section else 0
    lines = out[start:].split("\n\n")[0].splitlines() if section else out.splitlines()
    (line,) = [line for line in lines if line.startswith(f"  {name} ")]
    return line.removeprefix(f"  {name}").strip()


# --- the machine ------------------------------------------------------------------------------------------------------


def test_a_machine_without_a_gpu_is_an_answer(run: Run, no_driver: None) -> None:
    ran = run("doctor")
    assert (ran.code, ran.err) == (0, "")
    assert row(ran.out, "NVML").startswith("NVIDIA driver: not found (no libnvidia-ml.so.1); install it")
    assert row(ran.out, "Python").startswith(".".join(map(str, sys.version_info[:3])))
    assert row(ran.out, "rich") == version("rich")
    assert [title for title in ran.out.splitlines() if title and not title.startswith(" ")][:5] == [
        "machine", "GPU", "packages", "facts", "settings",
    ]  # fmt: skip


def test_the_json_has_its_keys_and_no_others(run: Run, no_driver: None) -> None:
    document = run("doctor", "--format", "json").json
    jsonschema.validate(document, {"properties": KEYS, "required": list(KEYS), "additionalProperties": False})
    assert document["nvml"]["status"] == "absent"


def test_table_and_json_tell_the_same(run: Run, install: Install) -> None:
    install(FakeGpu())
    table, document = run("doctor").out, run("doctor", "--format", "json").json
    for package in document["packages"]:
        assert row(table, package["name"], "packages").startswith(package["version"] or "missing")
    for file in document["facts"]:
        assert row(table, file["name"]) == f"{file['num_entries']:,} entries ({file['path']})"
    for setting in document["settings"]:
        assert row(table, setting["name"]).startswith(setting["value"] or "(empty)")


def test_every_entry_of_the_catalogs_is_counted(run: Run, no_driver: None) -> None:
    counts = {file["name"]: file["num_entries"] for file in run("doctor", "--format", "json").json["facts"]}
    for name, path in (("models.yaml", ROOT / "models.yaml"), ("gpus.yaml", ROOT / "kvplan/hardware/gpus.yaml")):
        assert counts[name] == len(re.findall(r"(?m)^[^\s#][^\n]*:$", path.read_text(encoding="utf-8")))


def test_gpus_are_listed_in_bytes(run: Run, install: Install) -> None:
    install(
        FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b", name="NVIDIA L4", total=24 * GIB, reserved=300 * MIB, used=GIB)
    )
    ran = run("doctor", "--format", "json")
    assert ran.json["nvml"] == {
        "status": "ok",
        "problem": None,
        "driver_version": "580.95.05",
        "cuda_version": "13.0",
        "gpus": [
            {
                "index": index, "uuid": uuid, "name": name, "is_mig": False, "problem": None,
                "memory": {
                    "total": total, "reserved": reserved, "used": used, "free": total - reserved - used,
                    "is_host": False,
                },
            }
            for index, (uuid, name, total, reserved, used) in enumerate(
                [
                    ("GPU-a", "NVIDIA A100-SXM4-80GB", 80 * GIB, 600 * MIB, 10 * GIB),
                    ("GPU-b", "NVIDIA L4", 24 * GIB, 300 * MIB, GIB),
                ]
            )
        ],
        "warnings": [],
    }  # fmt: skip
    output = run("doctor").out
    assert row(output, "NVML") == "ok, driver 580.95.05, CUDA up to 13.0"
    assert row(output, "GPU 1") == "NVIDIA L4, 22.71 GiB of 24.00 GiB free, 0.29 GiB kept by the driver, GPU-b"


@pytest.mark.parametrize(
    ("code", "status", "cure"),
    [
        (LIB_RM_VERSION_MISMATCH, "mismatch", "reload the kernel module or reboot"),
        (DRIVER_NOT_LOADED, "not_loaded", "modprobe nvidia"),
        (NO_PERMISSION, "permission", "/dev/nvidia*"),
    ],
)
def test_a_broken_driver_is_an_answer_with_its_cure(
    run: Run, install: Install, code: int, status: str, cure: str
) -> None:
    install(FakeGpu(), errors={"nvmlInitWithFlags": code})
    ran = run("doctor", "--format", "json")
    assert (ran.code, ran.json["nvml"]["status"]) == (0, status)
    assert any(cure in advice["cure"] for advice in ran.json["advice"])
    assert cure in run("doctor").out


def test_a_lost_gpu_leaves_the_others(run: Run, install: Install) -> None:
    lost = {"nvmlDeviceGetMemoryInfo_v2": GPU_IS_LOST}
    install(FakeGpu(errors=lost), FakeGpu(uuid="GPU-b"))
    ran = run("doctor")
    assert ran.code == 0
    assert "GPU 0: lost" in row(ran.out, "GPU 0", "GPU")
    assert "free" in row(ran.out, "GPU 1", "GPU")
    assert "missing for kvplan profile and kvplan watch on it: GPU 0: lost" in row(ran.out, "GPU 0", "to do")


def test_bad_usage_is_one_line(run: Run) -> None:
    assert refused(run("doctor", "--format", "csv")).startswith("--format: 'csv' is not one of")


# --- settings ---------------------------------------------------------------------------------------------------------


def test_every_environment_variable_that_is_read_is_listed() -> None:
    name = r"""["']([A-Z][A-Z0-9_]+)["']"""
    read = re.compile(rf"(?:environ(?:\.\w+)?|getenv)[\[(]\s*{name}|{name} (?:not )?in os\.environ")
    used = {
        match[1] or match[2]
        for folder in ("kvplan", "engine")
        for path in (ROOT / folder).rglob("*.py")
        for match in read.finditer(path.read_text(encoding="utf-8"))
    }
    assert {"KVPLAN_DEBUG", "NO_COLOR", "CUDA_VISIBLE_DEVICES"} <= used  # the search finds what is there
    assert used <= set(doctor.SETTINGS)


def test_a_setting_says_where_it_comes_from(run: Run, no_driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    monkeypatch.delenv("HF_HOME", raising=False)
    settings = {setting["name"]: setting for setting in run("doctor", "--format", "json").json["settings"]}
    assert (settings["CUDA_VISIBLE_DEVICES"]["value"], settings["CUDA_VISIBLE_DEVICES"]["origin"]) == (
        "1,0",
        "environment",
    )
    assert (settings["HF_HOME"]["value"], settings["HF_HOME"]["origin"]) == ("~/.cache/huggingface", "default")


@pytest.mark.parametrize("format", ["table", "json"])
def test_no_secret_is_told(run: Run, no_driver: None, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklm")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:pass-word@mirror.example/hub")
    out = run("doctor", "--format", format).out
    assert "hf_abc" not in out
    assert "pass-word" not in out
    assert "(set, not shown)" in out
    assert "https://***@mirror.example/hub" in out


def test_control_characters_of_a_setting_are_spelled_out(
    run: Run, no_driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", "/a\x1b[31m\nb")
    assert row(run("doctor").out, "HF_HOME").startswith("/a\\x1b[31m\\nb")


# --- packages ---------------------------------------------------------------------------------------------------------


def test_every_dependency_is_listed_with_its_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {None: project["dependencies"], **project["optional-dependencies"]}
    listed = {name.lower(): extra for name, extra in doctor.PACKAGES.items()}
    extras: dict[str, list[str | None]] = {}  # serve needs what others bring, too
    for extra, needs in groups.items():
        if extra not in ("all", "dev"):
            for need in needs:
                extras.setdefault(re.split(r"[^\w.-]", need)[0].lower(), []).append(extra)
    for name, bringing in extras.items():
        assert listed.get(name, "not listed") in bringing, name
    assert set(doctor.NEEDED_FOR) == set(groups) - {None, "all", "dev"}


def test_a_missing_extra_says_what_it_is_for_and_how_to_get_it(
    run: Run, no_driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(name: str) -> str:
        if name in ("torch", "triton", "jinja2"):
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(doctor, "version", without)
    out = run("doctor").out
    assert row(out, "jinja2", "packages") == "missing (extra: report)"
    assert "torch, triton         missing for kvplan profile, kvplan watch --pid: pip install '.[engine]'" in out
    assert "jinja2                missing for kvplan report: pip install '.[report]' in kvplan's sources" in out


def test_nothing_heavy_is_loaded() -> None:
    code = (
        "import sys; from kvplan.cli.main import main; main(['doctor']);"
        "print(*(name for name in sys.modules if name in sys.argv[1:]), file=sys.stderr)"
    )
    heavy = ["torch", "triton", "transformers", "pandas", "matplotlib", "numpy"]
    done = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""


# --- bounds -----------------------------------------------------------------------------------------------------------

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
NEEDS = [
    Requirement(need)
    for needs in (
        PROJECT["build-system"]["requires"],
        PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"].values(),
    )
    for need in needs
]


@pytest.mark.parametrize("need", [need for need in NEEDS if need.name != "kvplan"], ids=str)
def test_every_dependency_has_a_bound_above_that_doctor_reads(need: Requirement) -> None:
    """So a new major version is first tried here."""
    assert {specifier.operator for specifier in need.specifier} <= {">=", "<", "=="}
    assert any(specifier.operator in ("<", "==") for specifier in need.specifier)


def test_ci_records_a_version_within_the_bounds_of_every_dependency() -> None:
    lines = (ROOT / "constraints/py311.txt").read_text(encoding="utf-8").splitlines()
    recorded = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {
        canonicalize_name(requirement.name): str(requirement.specifier).removeprefix("==") for requirement in recorded
    }
    assert len(versions) == len(recorded)
    assert not [
        version for version in versions.values() if "+" in version or "/" in version
    ]  # no build or path of one machine
    for need in NEEDS:
        if need.name != "kvplan":
            assert versions[canonicalize_name(need.name)] in need.specifier, need


@given(
    st.lists(st.tuples(st.sampled_from([">=", "<", "=="]), st.lists(st.integers(0, 12), min_size=1, max_size=4))),
    st.lists(st.integers(0, 12), min_size=1, max_size=4),
    st.sampled_from(["", "+cpu"]),
)
def test_releases_are_compared_as_packaging_does(
    bounds: list[tuple[str, list[int]]], release: list[int], build: str
) -> None:
    text = ",".join(operator + ".".join(map(str, numbers)) for operator, numbers in bounds) or ">=0"
    number = ".".join(map(str, release)) + build
    assert doctor.within(number, text) is (number in SpecifierSet(text))


def test_bounds_of_another_form_are_not_judged() -> None:
    assert doctor.within("2.0", "~=1.4") is None
    assert doctor.within("2.0", ">=1.*") is None
    assert doctor.within("unknown", ">=1.4") is None


def plant(folder: Path, name: str, number: str, *needs: str) -> None:
    info = folder / f"{name}-{number}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {number}", *(f"Requires-Dist: {n}" for n in needs)]
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose metadata of distributions are seen before the installed ones'."""
    monkeypatch.setattr(doctor, "requires", requires)
    monkeypatch.setattr(doctor, "torch_facts", lambda: None)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


# As hatchling writes them.
METADATA = (
    "rich<16,>=13.9",
    "kvplan[engine,gguf,hub,metrics,report]; extra == 'all'",
    "triton==3.6.0; (sys_platform == 'linux') and extra == 'dev'",
    "torch<2.14,>=2.11; extra == 'engine'",
    "triton<4,>=3.6; (sys_platform == 'linux') and extra == 'engine'",
    "huggingface-hub<3,>=0.34; extra == 'hub'",
    "jinja2; extra == 'report'",
)


def test_a_version_outside_the_bounds_is_a_thing_to_do(run: Run, no_driver: None, planted: Path) -> None:
    plant(planted, "kvplan", "0.1.0", *METADATA)
    plant(planted, "torch", "2.15.0+cu130")
    plant(planted, "triton", "3.9.0")  # what the tests are written against binds nobody else
    plant(planted, "rich", "13.8.1")
    plant(planted, "huggingface_hub", "2.99.0")
    out = run("doctor").out
    assert row(out, "torch", "packages") == "2.15.0+cu130 (outside >=2.11,<2.14)"
    assert row(out, "triton", "packages") == "3.9.0"
    assert row(out, "huggingface_hub", "packages") == "2.99.0"
    assert row(out, "rich", "to do") == (
        "13.8.1 is outside kvplan's bounds (>=13.9,<16); needed for kvplan itself: pip install 'rich>=13.9,<16'"
    )
    assert row(out, "torch", "to do") == (
        "2.15.0+cu130 is outside kvplan's bounds (>=2.11,<2.14); needed for kvplan profile, kvplan watch --pid: "
        "pip install 'torch>=2.11,<2.14'"
    )
    document = run("doctor", "--format", "json").json
    packages = {package["name"]: (package["bounds"], package["fits"]) for package in document["packages"]}
    assert packages["torch"] == (">=2.11,<2.14", False)
    assert packages["triton"] == (">=3.6,<4", True)
    assert packages["huggingface_hub"] == (">=0.34,<3", True)
    assert packages["jinja2"] == (None, None)
    problems = {step["missing"]: step["problem"] for step in document["advice"] if step["problem"]}
    assert set(problems) == {"rich", "torch"}


def test_a_checkout_that_is_not_installed_has_no_bounds(
    run: Run, no_driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "requires", absent)
    ran = run("doctor", "--format", "json")
    assert {package["fits"] for package in ran.json["packages"]} == {None}


# --- torch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "build"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n", None),
        ("__version__ = '2.11.0'\ndebug = False\ncuda: Optional[str] = '12.8'\n", "12.8"),
        ("cuda = '13.0'\n", "13.0"),
        ("not_cuda = '13.0'\n", None),
        ("", None),
    ],
)
def test_the_build_is_read_from_torchs_version_file(tmp_path: Path, text: str, build: str | None) -> None:
    file = tmp_path / "version.py"
    assert cuda_build(file) is None
    file.write_text(text)
    assert cuda_build(file) == build


@pytest.mark.parametrize(
    ("module", "answer"),
    [
        (
            "class cuda:\n    is_available = staticmethod(lambda: True)\n    device_count = staticmethod(lambda: 2)\n",
            Torch("2.11.0", "12.8", True, 2, None),
        ),
        (
            "raise ImportError('libcudart.so.12: cannot open')",
            Torch(
                "2.11.0", "12.8", None, None,
                "cannot be loaded (ImportError: libcudart.so.12: cannot open); reinstall it",
            ),
        ),
        ("import os\nos._exit(9)", Torch("2.11.0", "12.8", None, None, "cannot be loaded (exit code 9); reinstall it")),
    ],
    ids=["two GPUs", "broken", "dies"],
)  # fmt: skip
def test_a_torch_for_cuda_is_asked_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, answer: Torch
) -> None:
    (tmp_path / "torch.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert ask_torch("2.11.0", "12.8") == answer


def test_a_torch_that_hangs_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "_CUDA_TIMEOUT_S", 0.3)
    assert ask_torch("2.11.0", "12.8").problem == "no answer in 0.3 s; see what `nvidia-smi` says"


# --- the last line agrees with the rows above -------------------------------------------------------------------------


def whole(name: str) -> str:
    return "1.0"


def test_without_a_driver_nothing_is_missing_for_the_cpu_alone(
    run: Run, no_driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "version", whole)
    assert run("doctor").out.splitlines()[-1] == (
        "nothing is missing for the CPU; a GPU would need its driver (see NVML above)"
    )


def test_a_driver_without_a_gpu_is_told_apart(run: Run, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", whole)
    install()
    ran = run("doctor")
    assert row(ran.out, "NVML").endswith("; no GPU")
    assert ran.out.splitlines()[-1] == ("nothing is missing for the CPU; the driver finds no GPU (see NVML above)")


def test_with_a_gpu_that_works_nothing_is_missing(run: Run, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(FakeGpu())
    monkeypatch.setattr(doctor, "version", whole)
    monkeypatch.setattr(doctor, "torch_facts", lambda: Torch("2.13.0", "13.0", True, 1, None))
    assert run("doctor").out.splitlines()[-1] == "nothing is missing"


def test_a_missing_test_package_is_no_lack_but_named(
    run: Run, no_driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(name: str) -> str:
        if name == "transformers":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(doctor, "version", without)
    assert (
        run("doctor")
        .out.splitlines()[-1]
        .startswith(
            "nothing is missing for the CPU but transformers, for kvplan's own tests; a GPU would need its driver"
        )
    )


def test_a_missing_package_of_kvplan_itself_is_a_thing_to_do(
    run: Run, no_driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(name: str) -> str:
        if name == "nvidia-ml-py":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(doctor, "version", without)
    out = run("doctor").out
    assert row(out, "nvidia-ml-py", "packages") == "missing"
    assert row(out, "nvidia-ml-py", "to do") == "missing for kvplan itself: pip install . in kvplan's sources"
    assert "nothing is missing" not in out


def test_a_torch_that_cannot_be_loaded_is_a_thing_to_do_without_a_gpu_too(
    run: Run, no_driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "version", whole)
    monkeypatch.setattr(
        doctor, "torch_facts", lambda: Torch("2.13.0", "13.0", None, None, "cannot be loaded (x); reinstall it")
    )
    out = run("doctor").out
    assert row(out, "torch", "to do") == "missing for kvplan profile: torch cannot be loaded (x); reinstall it"
    assert "nothing is missing" not in out


def test_facts_that_cannot_be_read_are_a_thing_to_do(
    run: Run, no_driver: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable() -> None:
        raise OSError("unreadable")

    monkeypatch.setattr(doctor, "version", whole)
    monkeypatch.setattr(doctor, "gpu_names", unreadable)
    out = run("doctor").out
    assert row(out, "gpus.yaml", "to do") == "missing for GPUs by name: unreadable"
    assert "nothing is missing" not in out


GPU = doctor.Gpu(0, "GPU-a", "NVIDIA L4", False, None, None)
DRIVER = Driver("ok", None, "580.95.05", "13.0", (GPU,), ())


@pytest.mark.parametrize(
    ("torch", "cure"),
    [
        (Torch("2.13.0+cpu", None, False, 0, None), "install torch built for CUDA (pytorch.org)"),
        (Torch("2.13.0", "13.1", False, 0, None), "a driver for CUDA 13.1, or a torch built for CUDA 13.0"),
        (Torch("2.13.0", "13.0", None, None, "no answer in 60 s"), "torch: no answer in 60 s"),
        (Torch("2.13.0", "13.0", True, 1, None), None),
        (None, None),  # the missing extra says it
    ],
    ids=["CPU build", "newer CUDA", "broken", "fine", "no torch"],
)
def test_a_gpu_that_torch_cannot_use_is_told(torch: Torch | None, cure: str | None) -> None:
    assert [advice.cure for advice in gpu_advice(torch, DRIVER)] == ([] if cure is None else [cure])


def test_the_json_is_valid_whatever_the_machine(run: Run, install: Install) -> None:
    install(FakeGpu(name='"\\\u0007 {'))
    ran = run("doctor", "--format", "json")
    assert json.loads(ran.out)["nvml"]["gpus"][0]["name"] == '"\\\\x07 {'
