"""Every difference between SGLang's releases that affects an answer.

The third field of a version marks a feature release. A change between two releases whose code was read is dated to the
later one.
"""

from typing import Final

from kvplan.servers.releases import ReleaseChange, Releases

SOURCE: Final = "sglang 0.5.23 srt/mem_cache/kv_cache_configurator.py and srt/arg_groups/memory_hook.py"
READ = "sglang 0.4.9, 0.5.2, 0.5.5, 0.5.9, 0.5.12, 0.5.15 and 0.5.23 were read"
CHANGES: Final = {
    "fraction_by_memory": ReleaseChange(
        (0, 4, 5), "the default fraction follows the GPU's memory; before, a table by tensor parallel size",
        "sglang srt/server_args.py; the releases between are not read", "0.4.4, 0.4.9",
    ),
    "window_pools": ReleaseChange(
        (0, 5), "window layers have a pool of their own in the models that SGLang lists",
        "sglang 0.5.2 srt/server_args.py",
    ),
    "state_pools": ReleaseChange(
        (0, 5), "recurrent states have slots in addition to the tokens", "sglang 0.5.9 and 0.5.23",
    ),
    "reserve_by_parts": ReleaseChange(
        (0, 5, 5), "the default fraction reserves 1.5 MiB per token of a chunk and 2 per sequence of the largest "
        "graph; before, it came from a table by GPU memory", f"{READ}: srt/server_args.py",
    ),
    "datacenter_pages": ReleaseChange(
        (0, 5, 9), "attention backends of compute capability 10.x with pages of 64 tokens by default",
        f"{READ}: srt/server_args.py",
    ),
    "tracked_states": ReleaseChange(
        (0, 5, 15), "two more state slots per request follow it for the prefix cache, unless set otherwise",
        f"{READ}: srt/arg_groups/overrides.py",
    ),
    "prefill_graphs": ReleaseChange(
        (0, 5, 12), "the default fraction reserves memory for prefill graphs", f"{READ}: srt/server_args.py"
    ),
    "wider_small_gpus": ReleaseChange(
        (0, 5, 23), "chunks of 4,096 tokens and graphs of 48 or 160 sequences below 35 GiB; before, 2,048 and 24 or 80",
        f"{READ}: memory_hook.py",
    ),
    "graphs_by_requests": ReleaseChange(
        (0, 5, 23), "--max-running-requests bounds the largest graph that is not set explicitly", f"{READ}: "
        "memory_hook.py"
    ),
    "image_reservation": ReleaseChange(
        (0, 5, 23), "memory for images is reserved before the pool is sized", f"{READ}: kv_cache_configurator.py"
    ),
    "request_windows": ReleaseChange(
        (0, 5, 23), "without the prefix cache, --max-running-requests sizes the windows' pool",
        f"{READ}: pool_configurator.py",
    ),
    "decode_graph_flag": ReleaseChange(
        (0, 5, 15), "--cuda-graph-max-bs-decode; before, --cuda-graph-max-bs", f"{READ}: srt/server_args.py"
    ),
    "padded_host_pools": ReleaseChange(
        (0, 5, 9), "the host's pool of the hierarchical cache has one page more than requested",
        "sglang mem_cache/pool_host (HostKVCache)", "0.4.9, 0.5.2, 0.5.9, 0.5.23",
    ),
    "adapter_pools": ReleaseChange(
        (0, 5, 2), "adapters have a pool of slots, made before the KV pool, for the modules that are stated",
        "sglang 0.5.2, 0.5.9 and 0.5.23 srt/lora/mem_pool.py",
    ),
    "halves": ReleaseChange(
        (0, 5, 23), "a server that only prefills or decodes reserves less", "sglang 0.5.23 arg_groups/memory_hook.py"
    ),
    "whole_towers": ReleaseChange(
        (0, 5, 23), "--mm-enable-dp-encoder puts the whole encoder on each rank", "sglang 0.5.23 srt/models"
    ),
    "own_stages": ReleaseChange(
        (0, 5, 23), "ranks and stages hold of towers, embeddings and heads what SGLang's own classes put there",
        "sglang 0.5.23 srt/models",
    ),
    "fp4_before_blackwell": ReleaseChange(
        (0, 5, 15), "NVFP4 runs on compute capability 8.0 to 9.x, by Marlin's kernels; ModelOpt's experts then keep a "
        "second copy of their block scales", "sglang 0.5.10, 0.5.12, 0.5.15, 0.5.19 and 0.5.23 modelopt_quant.py",
    ),
    "weights_on_host": ReleaseChange(
        (0, 5, 23), "--cpu-offload-gb and --offload-group-size leave weights that the model reads elsewhere on the GPU",
        "sglang 0.5.2, 0.5.9 and 0.5.23 srt/utils/offloader.py (_get_resident_parameter_ids)",
    ),
    "expert_adapters": ReleaseChange(
        (0, 5, 23), "adapters change experts and latent attention, too", "sglang 0.5.9 and 0.5.23 srt/lora/mem_pool.py"
    ),
    "drafts": ReleaseChange(
        (0, 5, 23), "a draft's layers are counted in its target's pool, its weights before the pool is sized",
        f"{READ}: pool_configurator.py and kv_cache_configurator.py",
    ),
    "named_backends": ReleaseChange(
        (0, 5, 23), "attention backends that its parser lists; cutlass_mla is no longer one",
        "sglang 0.5.23 srt/arg_groups/choices.py", "0.5.23",
    ),
    "drafts_of_gemma": ReleaseChange(
        (0, 5, 23), "Gemma 4's assistants draft, and each of their layers counts as one of the target's full layers",
        "sglang 0.5.23 srt/models/gemma4_mtp.py and pool_configurator.py",
    ),
}  # fmt: skip

# The releases compared, case by case: tests/oracles.py
RELEASES: Final = Releases(oldest=(0, 4), newest=(0, 5), compared=((0, 5), (0, 5, 23)), changes=CHANGES)
