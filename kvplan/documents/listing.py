"""What lists print: kvplan/models@1, gpus@1 and workloads@1; and one entry: kvplan/model@1, gpu@1."""

from typing import Annotated, Literal, TypedDict

from kvplan.core.records import Count, Number, Size
from kvplan.hardware.gpu import TotalKind


class ModelRow(TypedDict):
    """A model: bytes of its checkpoint and of KV in bf16 on one rank, windows counted as if nothing left them."""

    name: str
    parameters: Size
    bf16_gb: Annotated[Number, "GB of its parameters in bf16."]
    stored_bytes: Annotated[Size | None, "null: its format cannot be sized."]
    kv_bytes_per_token: Count
    window_bytes_per_token: Annotated[Count, "What stops growing: that of windows and chunks."]
    state_bytes: Annotated[Count, "Of one sequence, whatever its length."]
    max_model_len: Size
    quantization: str | None
    scheme: Annotated[str | None, "How its linear layers are stored."]
    published: Annotated[bool, "Whether the facts are a copy of the published config.json."]
    source: str


class FittingRow(ModelRow):
    """A model that fits on the GPU of the question."""

    users: Annotated[Count, "Requests of the context that run at once."]


class FittingDocument(TypedDict):
    """The models of the catalog that fit on a GPU (kvplan models --gpu), the largest first."""

    schema: Literal["kvplan/fitting@1"]
    gpu: str
    context: Size
    of: Annotated[Count, "Models that were tried."]
    fitting: list[FittingRow]


class ModelHead(TypedDict):
    schema: Literal["kvplan/model@1"]


class ModelFacts(TypedDict):
    id: str
    aliases: list[str]
    architecture: str
    model_type: str
    dtype: str
    parameter_groups: Annotated[dict[str, Count], "Parameters by tensor group."]
    layers: Annotated[list[str], "Layers of one kind in a line."]
    notes: list[str]


class ModelDocument(ModelHead, ModelRow, ModelFacts):
    """A model of the catalog (kvplan models NAME): bytes of its checkpoint, and of KV in bf16 on one rank."""


class ModelsDocument(TypedDict):
    """The models that kvplan knows by name."""

    schema: Literal["kvplan/models@1"]
    models: Annotated[list[ModelRow], "By name."]


class GpuRow(TypedDict):
    """A GPU: bytes, bytes/s and dense FLOP/s; null where nobody states a figure."""

    name: str
    device_name: str
    total_memory: Annotated[Size, "As CUDA reports it; low and high: what was seen, or the rule's range."]
    total_memory_low: Size
    total_memory_high: Size
    total_memory_kind: TotalKind
    memory_bandwidth: Size | None
    bf16_flops: Size | None
    fp8_flops: Size | None
    compute_capability: Annotated[str | None, "CUDA's, or the name of AMD's architecture."]
    source: str
    total_memory_source: str


class GpuHead(TypedDict):
    schema: Literal["kvplan/gpu@1"]


class GpuDocument(GpuHead, GpuRow):
    """A GPU (kvplan gpus NAME): bytes, bytes/s and dense FLOP/s; null where nobody states a figure."""


class GpusDocument(TypedDict):
    """The GPUs that kvplan knows by name."""

    schema: Literal["kvplan/gpus@1"]
    gpus: Annotated[list[GpuRow], "As gpus.yaml lists them."]


class WorkloadRow(TypedDict):
    """A named workload: tokens and requests per second."""

    name: str
    kind: Literal["published", "assumed"]
    rate_per_s: Number | None
    prompt_mean: Number
    prompt_p50: Size
    prompt_most: Size
    output_mean: Number
    output_p50: Size
    output_most: Size
    shared_prefix: Size | None
    summary: str
    source: str
    licence: str


class WorkloadsDocument(TypedDict):
    """The workloads that kvplan knows by name (kvplan trace profiles)."""

    schema: Literal["kvplan/workloads@1"]
    workloads: Annotated[list[WorkloadRow], "By name."]
