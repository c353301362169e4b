"""Environment variables of SGLang that change its memory."""

from collections.abc import Mapping
from typing import Final

from kvplan.models.spec import ModelSpec
from kvplan.servers.words.arguments import EngineArgs
from kvplan.servers.words.command import Variable


def _has_states(spec: ModelSpec, args: EngineArgs) -> bool:
    return spec.has_states


VARIABLES: Final[Mapping[str, Variable]] = {
    "SGLANG_PP_LAYER_PARTITION": Variable(
        "sglang", "pp_layer_partition", "text", "the layers of each pipeline stage",
        "sglang 0.5.23 srt/distributed/utils.py", (0, 5),
    ),
    "SGLANG_MAMBA_SSM_DTYPE": Variable(
        "sglang", "mamba_ssm_cache_dtype", "text", "the dtype of recurrent states, as --mamba-ssm-dtype",
        "sglang 0.5.9 and 0.5.23 srt/configs/mamba_utils.py", (0, 5),
    ),
    "SGLANG_MAMBA_CONV_DTYPE": Variable(
        "sglang", "", "text", "the dtype of convolution states", "sglang 0.5.9 and 0.5.23 srt/configs/mamba_utils.py",
        (0, 5), None, _has_states, usual=("", "bfloat16"),
    ),
    "SGLANG_VLM_CACHE_SIZE_MB": Variable(
        "sglang", "", "size", "the MiB reserved for images", "sglang 0.5.23 srt/mem_cache/kv_cache_configurator.py",
        (0, 5), None, lambda spec, args: spec.multimodal and args.enable_multimodal is not False, usual=("100",),
    ),
    "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": Variable(
        "sglang", "", "text", "the tokens that DeepEP's buffers hold",
        "sglang 0.5.23 layers/moe/token_dispatcher/deepep.py", (0, 5), None,
        lambda spec, args: args.all2all_backend == "deepep", usual=("128",),
    ),
    "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": Variable(
        "sglang", "", "on", "1 sizes the pool after the graphs are captured",
        "sglang 0.5.23 srt/arg_groups/overrides.py", (0, 5), None, lambda spec, args: True,
    ),
}  # fmt: skip
