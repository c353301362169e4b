"""Start-up messages of SGLang servers: one table, each row with its releases and source.

Every pattern uses bounded repetition. "GB" in these lines is 2^30 bytes. Sources: `sglang#N` is an issue of
github.com/sgl-project/sglang that quotes the line; a file is the server's own, in the named release.
"""

from typing import Final

from kvplan.servers.logs.log import Wording

WORDINGS: Final[tuple[Wording, ...]] = (
    Wording(
        "sglang", "lmsysorg/sglang:v", "lmsysorg/sglang:v<version>", "0.2-0.5",
        "hub.docker.com/r/lmsysorg/sglang (the tags of its images)",
    ),
    Wording("sglang", "sglang: 0.", r"\bsglang: <version>\s{0,40}$", "0.2-0.5", "sglang 0.4 check_env.py"),
    Wording(
        "sglang", "Load weight begin. avail mem=", "Load weight begin. avail mem=<free_before_load> GB", "0.1-0.5",
        "sglang 0.4 srt/model_executor/model_runner.py",
    ),
    Wording(
        "sglang", "Load weight end.",
        "Load weight end\\..{0,300}?avail mem=<free_after_load> GB(?:, mem usage=<weights> GB)?", "0.1-0.5",
        "sglang#565; sglang#5668",
    ),
    Wording(
        "sglang", "KV Cache is allocated.",
        r"KV Cache is allocated\.(?: dtype: [\w.]{1,40},)?(?: #tokens: <pool_tokens>,)? K size: <key_size> GB, "
        "V size: <value_size> GB", "0.4-0.5", "sglang#4351; sglang#5668",
    ),
    Wording(
        "sglang", "KV Cache is allocated.",
        r"KV Cache is allocated\.(?: dtype: [\w.]{1,40},)?(?: #tokens: <pool_tokens>,)? KV size: <key_size> GB",
        "0.4-0.5", "sglang 0.4 srt/mem_cache/memory_pool.py (latent attention)",
    ),
    Wording(
        "sglang", "liding window memory pool.",
        r"liding window memory pool\. full_layer_tokens=<full_tokens>(?![0-9])", "0.5",
        "sglang 0.5 srt/mem_cache/kv_cache_configurator.py",
    ),
    Wording(
        "sglang", "Mamba Cache is allocated.",
        r"Mamba Cache is allocated\..{0,120}?conv_state size: <conv_state> ?GB,? ssm_state size: <ssm_state> ?GB",
        "0.5", "sglang 0.5 srt/mem_cache/memory_pool.py",
    ),
    Wording(
        "sglang", "Memory pool end. avail mem=", "Memory pool end. avail mem=<free_after_pool> GB", "0.1-0.5",
        "sglang#565",
    ),
    Wording(
        "sglang", "raph end. ", r"raph end\. .{0,80}?mem usage=<cuda_graphs> GB[.,]{1,2} avail mem=<free_at_end> GB",
        "0.4.4-0.5", "sglang#6753",
    ),
    Wording(
        "sglang", "raph end. ", r"raph end\. .{0,80}?avail mem=<free_at_end> GB[.,]{1,2} mem usage=<cuda_graphs> GB",
        "0.4.3", "sglang#4257",
    ),
    Wording(
        "sglang", "max_total_num_tokens=",
        "max_total_num_tokens=<kv_tokens>(?:, (?!max_running|context)[a-z_]{1,40}=[0-9]{1,12}){0,6}"
        "(?:, max_running_requests=<max_running>)?, context_len=<context>", "0.1-0.5", "sglang#565; sglang#4257",
    ),
)  # fmt: skip
