"""Bytes of the parameters that SGLang's own class of a model has on one rank, on torch's meta device.

`benchmarks/ask_sglang.py` asks it beside the pools. Process groups are played (size and rank only), and so are
operators of kernels that are not installed: parameters are made by SGLang's own layers, with their own shapes and
dtypes, before anything is loaded or converted. A parameter that is used twice counts once.
"""

import types

# What configs lack that stand in rows without what says nothing about sizes, and what Transformers 5 no longer has.
NO_SIZES = {
    "attention_dropout": 0.0, "embedding_dropout": 0.0, "hc_eps": 1e-6, "hc_pre_from_prev_sublayer": False,
    "hc_sinkhorn_iters": 20, "hidden_act": "silu", "hidden_dropout": 0.0, "in_chans": 3, "initializer_range": 0.02,
    "layer_norm_eps": 1e-5, "moe_layer_freq": 1, "output_dropout": 0.0, "pad_token_id": 0,
    "position_embedding_type": "absolute", "resid_dropout": 0.0, "rms_norm_eps": 1e-6, "scoring_func": "sigmoid",
    "vision_rope_theta": 10000.0,
}  # fmt: skip


class Group:
    """Answers what a model's construction asks of a process group of a size."""

    def __init__(self, size, rank=0):
        self.world_size, self.ranks, self.unique_name = size, list(range(size)), "group"
        self.rank = self.rank_in_group = self.local_rank = rank
        self.first_rank, self.last_rank = 0, size - 1
        self.is_first_rank, self.is_last_rank = rank == 0, rank == size - 1
        self.device_group = self.cpu_group = types.SimpleNamespace(size=lambda: size, rank=lambda: rank)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda x=None, *args, **kwargs: x


def play_groups(tp, pp, stage):
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    sizes = {"tp_group": tp, "attn_tp_group": parallel.attn_tp_size, "moe_ep_group": parallel.moe_ep_size,
             "moe_tp_group": parallel.moe_tp_size, "moe_dp_group": 1, "attn_cp_group": 1,
             "shared_experts_tp_group": tp, "world_group": tp * pp}  # fmt: skip
    groups = {name: Group(size) for name, size in sizes.items()} | {"pp_group": Group(pp, stage)}
    parallel.override_permanently(**groups)


def on_meta():
    """A mode in which tensors that a class asks for on a GPU are on the meta device."""
    import torch
    from torch.overrides import TorchFunctionMode

    def is_gpu(value):
        return isinstance(value, (str, torch.device)) and str(value).split(":")[0] == "cuda"

    class OnMeta(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.Tensor.cuda:
                return args[0]
            if func is torch.Tensor.item and args[0].is_meta:
                return 0
            kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
            if func is torch.Tensor.to:
                args = tuple("meta" if is_gpu(value) else value for value in args)
            if func is not torch.get_device_module and is_gpu(kwargs.get("device")):
                kwargs["device"] = "meta"
            return func(*args, **kwargs)

    return OnMeta()


def build(server, stage=0):
    """SGLang's own model of one rank."""
    import deep_gemm
    import torch
    import transformers
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.runtime_context import get_exec

    play_groups(server.tp, server.pp, stage)
    for name, value in NO_SIZES.items():
        setattr(transformers.PretrainedConfig, name, value)
    if server.model_config.hf_text_config.model_type.startswith("gemma"):
        transformers.PretrainedConfig.hidden_act = "gelu_pytorch_tanh"
    initialize_moe_config()
    if offloads := get_exec().offload.ple_offload_embedding:  # as its loader does
        server.model_config.hf_text_config.ple_offload_embedding = offloads
    deep_gemm.get_num_sms = lambda: torch.cuda.get_device_properties(0).multi_processor_count
    load = LoadConfig(load_format="dummy")
    quantization = _get_quantization_config(server.model_config, load)
    with set_default_torch_dtype(server.model_config.dtype), torch.device("meta"), on_meta():
        return _initialize_model(server.model_config, load, quantization)


def weights(server):
    model = build(server)
    by_name = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    buffers = {id(b): b.numel() * b.element_size() for _, b in model.named_buffers()}
    return {"params": sum(by_name.values()), "buffers": sum(buffers.values()), "by_kind": kinds(by_name)}


def kinds(by_name):
    """The bytes summed over layers and experts, the largest first."""
    totals = {}
    for name, size in by_name.items():
        kind = ".".join("N" if part.isdigit() else part for part in name.split("."))
        totals[kind] = totals.get(kind, 0) + size
    return dict(sorted(totals.items(), key=lambda item: -item[1]))
