"""What SGLang does not run on a GPU or with a model, however much memory there is."""

from pathlib import Path
from typing import Final

from kvplan.servers.plans import Request
from kvplan.servers.settings import Settings
from kvplan.servers.sglang import models
from kvplan.servers.start import Refusal, unsupported

OLDEST_GPU: Final = 75  # srt/model_executor/model_runner_components/load_model_utils.py
SPARSE_MLA_CAPABILITY: Final = 90  # srt/layers/attention/dsa_backend.py: kernels for 9.x, 10.x and 12.x

TABLE: Final = Path(__file__).with_name("quantized.txt")  # SGLang 0.5.23's answers

# Weights that a class creates without a check of their blocks (skip_block_quant_check). Source: srt/models/mimo_v2.py.
UNCHECKED: Final = dict.fromkeys(("MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM"), frozenset({"self_attn.qkv_proj"}))


def refusal(request: Request, settings: Settings) -> Refusal | None:
    """Return the first refusal of a combination that SGLang could be sized with, or None if it starts."""
    spec, sm = request.spec, request.gpu.sm
    if 0 < sm < OLDEST_GPU:
        return unsupported(f"it needs compute capability {OLDEST_GPU / 10:.1f}, this GPU has {sm / 10:.1f}")
    if spec.is_sparse_mla and 0 < sm < SPARSE_MLA_CAPABILITY:
        needs = f"needs compute capability 9.0, this GPU has {sm / 10:.1f}"
        return unsupported(f"the sparse attention of {spec.name} {needs}")
    return models.backend_refusal(spec, sm, request.args, request.release) or weights(request, settings)


def weights(request: Request, settings: Settings) -> Refusal | None:
    """Return a refusal of quantized weights: their scheme, or their shapes on a rank."""
    if request.spec.quantization is None and request.args.quantization is None:
        return None
    if not request.release.has("table_of_layers"):
        return None
    from kvplan.servers import quantized  # most models store none

    return quantized.refusal(request, TABLE, settings.dtype, UNCHECKED.get(request.spec.architecture, frozenset()))
