"""llama-server's own flags for the arguments of kvplan's table. Source: llama.cpp 0c1e57098 common/arg.cpp."""

from collections.abc import Mapping
from typing import Final

from kvplan.servers.words.arguments import Flag

FLAGS: Final[Mapping[str, Flag]] = {
    "max_model_len": Flag(("ctx_size",), ("c",)),
    "max_num_seqs": Flag(("parallel",), ("np",)),
    "max_num_batched_tokens": Flag(("batch_size",), ("b",)),
    "micro_batch_size": Flag(("ubatch_size",), ("ub",)),
    "quantization": Flag(("quant",), printed=False),  # part of the file's name, or of --hf-repo
    "gpu_layers": Flag(("gpu_layers", "n_gpu_layers"), ("ngl",)),
    "n_cpu_moe": Flag(short=("ncmoe",)),
    "cpu_moe": Flag(short=("cmoe",), on=True),
    "override_tensor": Flag(short=("ot",)),
    "tensor_split": Flag(short=("ts",)),
    "split_mode": Flag(short=("sm",)),
    "main_gpu": Flag(short=("mg",)),
    "kv_offload": Flag(short=("kvo",)),
    "op_offload": Flag(),
    "cache_type_k": Flag(short=("ctk",)),
    "cache_type_v": Flag(short=("ctv",)),
    "kv_unified": Flag(short=("kvu",)),
    "swa_full": Flag(on=True),
    "flash_attn": Flag(short=("fa",), values={"1": "on", "true": "on", "0": "off", "false": "off"}),
    "fit": Flag(short=("fit",), values={"1": "on", "true": "on", "0": "off", "false": "off"}),
    "fit_target": Flag(short=("fitt",)),
    "fit_ctx": Flag(short=("fitc",)),
    "lora": Flag(),
    "mmproj": Flag(short=("mm",)),
    "mmproj_offload": Flag(),
    "draft_gpu_layers": Flag(("spec_draft_ngl", "gpu_layers_draft", "n_gpu_layers_draft"), ("ngld",)),
    "draft_quant": Flag(printed=False),  # part of the file's name
    "speculative_method": Flag(printed=False),  # --spec-type
    "num_speculative_tokens": Flag(("spec_draft_n_max",)),
}
NEGATED: Final = {"nkvo": "kv_offload", "no_kvu": "kv_unified"}  # short forms that turn a switch off
