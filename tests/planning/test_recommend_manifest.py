"""`kvplan recommend --output`: manifests that the formats' own schemas accept and `check` reads back as the same plan.

tests/facts/schemas/ holds the parts of Kubernetes' and compose's schemas that they go through, each with its source.
"""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvplan.core.units import GIB
from tests.support.cli import Run, refused
from tests.support.cli import run as run  # the fixture

SCHEMAS = Path(__file__).parents[1] / "facts" / "schemas"
ASKED = {
    "one GPU": ("llama-3.1-8b", "--users", "20", "--ctx", "8k", "--gpus", "l40s"),
    "two servers of two": ("llama-3.1-70b", "--users", "100", "--ctx", "16k", "--mean-tokens", "6k", "--gpus", "h200"),
    "given GPUs": ("qwen3-8b", "--users", "30", "--ctx", "8k", "--gpu", "2xl40s"),
    "an older release": ("qwen2.5-7b", "--users", "8", "--ctx", "4k", "--gpus", "t4", "--engine", "vllm@0.9.2"),
    "data-parallel ranks": ("deepseek-v3", "--users", "60", "--ctx", "32k", "--gpu", "8xh200"),
    "the first engine": ("qwen2.5-7b", "--users", "8", "--ctx", "4k", "--gpus", "l4", "--engine", "vllm@0.9+v0"),
}


def written(run: Run, tmp_path: Path, name: str, output: str) -> Path:
    ran = run("recommend", *ASKED[name], "--output", output, "-q")
    assert ran.code == 0, ran
    file = tmp_path / "out.yaml"
    file.write_text(ran.out, encoding="utf-8")
    return file


def kubernetes_errors(document: Any) -> list[str]:
    facts = json.loads((SCHEMAS / "kubernetes.json").read_text())
    schema = {"$ref": f"#/definitions/{facts['kinds'][document['kind']]}", "definitions": facts["definitions"]}
    return [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(document)]


def compose_errors(document: Any) -> list[str]:
    schema = json.loads((SCHEMAS / "compose.json").read_text())
    return [error.message for error in jsonschema.Draft7Validator(schema).iter_errors(document)]


@pytest.mark.parametrize("name", ASKED)
def test_kubernetes_schema_accepts_what_is_written(run: Run, tmp_path: Path, name: str) -> None:
    documents = list(yaml.safe_load_all(written(run, tmp_path, name, "k8s").read_text()))
    assert [document["kind"] for document in documents] == ["PersistentVolumeClaim", "Deployment", "Service"]
    assert [kubernetes_errors(document) for document in documents] == [[], [], []]


@pytest.mark.parametrize("name", ASKED)
def test_compose_schema_accepts_what_is_written(run: Run, tmp_path: Path, name: str) -> None:
    assert compose_errors(yaml.safe_load(written(run, tmp_path, name, "compose").read_text())) == []


def test_the_schemas_refuse_what_is_wrong(run: Run, tmp_path: Path) -> None:
    """Else the two tests above would say nothing."""
    documents = list(yaml.safe_load_all(written(run, tmp_path, "one GPU", "k8s").read_text()))
    pod = documents[1]["spec"]["template"]["spec"]
    pod["containers"][0]["argz"] = pod["containers"][0].pop("args")
    assert kubernetes_errors(documents[1])
    documents[2]["spec"]["ports"] = 80
    assert kubernetes_errors(documents[2])
    project = yaml.safe_load(written(run, tmp_path, "one GPU", "compose").read_text())
    (service,) = project["services"].values()
    service["shmsize"] = service.pop("shm_size")
    assert compose_errors(project)


@pytest.mark.parametrize("output", ["k8s", "compose"])
@pytest.mark.parametrize("name", ASKED)
def test_check_reads_what_is_written_as_the_same_plan(run: Run, tmp_path: Path, name: str, output: str) -> None:
    file = written(run, tmp_path, name, output)
    doc = run("recommend", *ASKED[name], "--format", "json", "-q").json
    best = doc["fit"]["solution"] if doc["fit"] else doc["placements"][0]
    engine = ASKED[name][ASKED[name].index("--engine") + 1] if "--engine" in ASKED[name] else "vllm@0.33.0"
    plan = run(
        "estimate",
        "--from-command",
        best["command"],
        "--gpu",
        best["gpu"],
        "--engine",
        engine,
        "--format",
        "json",
        "-q",
    ).json
    targets = run("check", file, "--format", "json", "-q").json["targets"]
    assert len(targets) == (1 if output == "k8s" else best["replicas"] // best["data_parallel_size"])
    for target in targets:
        assert target["figures"]["kv_tokens"] == plan["kv"]["tokens"]
        assert target["figures"]["weights"] == plan["memory"]["weights"]
        assert f"on {best['gpu']}, tp {best['tensor_parallel_size']}, " in target["title"]
        assert [rule["outcome"] for rule in target["findings"]] == ["pass"]


def test_gpus_memory_and_shared_memory_are_sized(run: Run, tmp_path: Path) -> None:
    claim, deployment, _ = yaml.safe_load_all(written(run, tmp_path, "two servers of two", "k8s").read_text())
    assert deployment["spec"]["replicas"] == 2
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    assert limits["nvidia.com/gpu"] == 2
    # vLLM's queues for 2 ranks are (16 MiB + 3 B) x 10 + 2 x (24 MiB + 2 B) x 10 + (4 MiB + 2 B) x 6 = 664 MiB; with
    # 1 GiB assumed for NCCL that is 2 GiB.
    assert pod["volumes"][1]["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    # 4 processes at 4 GiB, assumed; Llama-3.1-70B's files are 141.1 GB on the Hub, 131.4 GiB.
    assert requests["memory"] == "18Gi"
    assert limits["memory"] == "150Gi"
    assert int(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi")) * GIB > 1.1 * 141.1e9


ONE_GPU = ("llama-3.1-8b", "--gpus", "l40s", "--users", "4", "--ctx", "16k")
LMCACHE = json.dumps({"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"})


@pytest.mark.parametrize(
    ("words", "shm", "request_gib", "limit"),
    [
        # 2 processes at 4 GiB, 1 GiB of /dev/shm for NCCL, both assumed, and 15 GiB of files on the Hub (16.06 GB).
        ((), 1, 9, 24),
        # 64 GiB is a whole number of blocks (32 layers x 2 x 8 heads x 128 x 2 B x 16 tokens = 2 MiB). vLLM 0.33 maps
        # them in /dev/shm (v1/kv_offload/cpu/shared_offload_region.py, and fails to start where it has less room); a
        # container's memory counts /dev/shm. Before 0.21 they are pinned in the process.
        (("--kv-offloading-size", "64"), 65, 73, 88),
        (("--kv-offloading-size", "64", "--engine", "vllm@0.19"), 1, 73, 88),
        (("--kv-transfer-config", LMCACHE), 1, 14, 29),  # max_local_cpu_size is 5 GiB by default
    ],
)
def test_offloaded_kv_is_memory_of_the_container(
    run: Run, words: tuple[str, ...], shm: int, request_gib: int, limit: int
) -> None:
    documents = list(yaml.safe_load_all(run("recommend", *ONE_GPU, *words, "--output", "k8s", "-q").out))
    pod = documents[1]["spec"]["template"]["spec"]
    resources = pod["containers"][0]["resources"]
    figures = pod["volumes"][1]["emptyDir"]["sizeLimit"], resources["requests"]["memory"], resources["limits"]["memory"]
    assert figures == (f"{shm}Gi", f"{request_gib}Gi", f"{limit}Gi")
    project = yaml.safe_load(run("recommend", *ONE_GPU, *words, "--output", "compose", "-q").out)
    (service,) = project["services"].values()
    memory = service["deploy"]["resources"]
    figures = service["shm_size"], memory["reservations"]["memory"], memory["limits"]["memory"]
    assert figures == (f"{shm}g", f"{request_gib}g", f"{limit}g")


def test_a_pod_has_all_data_parallel_ranks_of_its_server(run: Run, tmp_path: Path) -> None:
    """8 API servers, 8 engine cores that compute themselves, and a coordinator (vLLM 0.33 entrypoints/cli/serve.py,
    v1/engine/utils.py), at 4 GiB each, assumed; 1 GiB of /dev/shm. DeepSeek-V3's files are 688.6 GB on the Hub.
    """
    documents = list(yaml.safe_load_all(written(run, tmp_path, "data-parallel ranks", "k8s").read_text()))
    assert documents[1]["spec"]["replicas"] == 1
    (container,) = documents[1]["spec"]["template"]["spec"]["containers"]
    words = container["args"]
    assert words[words.index("--data-parallel-size") + 1] == "8"
    assert "--enable-expert-parallel" in words
    resources = container["resources"]
    assert (resources["limits"]["nvidia.com/gpu"], resources["requests"]["memory"]) == (8, f"{17 * 4 + 1}Gi")


def test_replicas_of_a_compose_file_take_gpus_and_ports_of_their_own(run: Run, tmp_path: Path) -> None:
    services = yaml.safe_load(written(run, tmp_path, "two servers of two", "compose").read_text())["services"]
    devices = [
        service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for service in services.values()
    ]
    assert devices == [["0", "1"], ["2", "3"]]
    assert [service["ports"] for service in services.values()] == [["8000:8000"], ["8001:8000"]]


REFUSALS = [
    (
        ("llama-3.1-8b", "--users", "20", "--ctx", "8k", "--gpus", "mi300x", "--output", "k8s"),
        "--output writes manifests only for NVIDIA GPUs (mi300x is amd)",
    ),
    (("llama-3.1-405b", "--users", "9", "--ctx", "8k", "--gpus", "a100-80g", "--output", "k8s"), "at most 8 GPUs"),
    (
        ("deepseek-v3", "--users", "400", "--ctx", "32k", "--gpus", "h200", "--output", "k8s"),
        "--output writes servers of one machine with at most 8 GPUs (16 here); remove it and use the printed command",
    ),
    (
        ("llama-3.1-8b", "--users", "2000", "--ctx", "16k", "--gpus", "l4", "--output", "compose"),
        "one machine of at most 8",
    ),
    (("llama-3.1-8b", "--users", "9", "--ctx", "8k", "--output", "k8s", "--format", "json"), "use only one"),
]


@pytest.mark.parametrize(("words", "fault"), REFUSALS)
def test_what_one_machine_cannot_run_is_refused(run: Run, words: tuple[str, ...], fault: str) -> None:
    assert fault in refused(run("recommend", *words, "-q"))


def test_users_that_nothing_holds_give_no_manifest(run: Run) -> None:
    words = ("llama-3.1-405b", "--users", "900000", "--ctx", "128k", "--gpu", "t4", "--output", "k8s", "-q")
    assert "no placement fits these users" in refused(run("recommend", *words))
