"""llama-server's flags that are not in kvplan's table of arguments: their effect on memory.

Source: llama.cpp 0c1e57098 common/arg.cpp, of the examples that are the server's.
"""

from collections.abc import Mapping
from typing import Final

from kvplan.servers.words.command import Other
from kvplan.servers.words.standing import others

READ: Final = {  # by kvplan.servers.llamacpp.command
    "the file that is sized": "model hf_repo hf_file",
    "the draft that is sized": "model_draft spec_draft_model hf_repo_draft spec_draft_hf",
    "a file that is sized": "lora_scaled",
    "how many GPUs are used": "device",
    "where the tower is": "no_mmproj_offload",
    "how drafts are found; those of a model": "spec_type",
}
NO_EFFECT: Final = {
    "the HTTP server": """
        host port reuse_port path cors_origins cors_methods cors_headers cors_credentials! no_cors_credentials!
        api_prefix ui_config webui_config ui_config_file webui_config_file ui_mcp_proxy! webui_mcp_proxy!
        no_ui_mcp_proxy! no_webui_mcp_proxy! tools tools_runtime mcp_servers_config mcp_servers_json agent! no_agent!
        ui! webui! no_ui! no_webui! api_key api_key_file ssl_key_file ssl_cert_file timeout sse_ping_interval
        threads_http metrics! props! slots! no_slots! slot_save_path media_path server_base sleep_idle_seconds
    """,
    "threads of the CPU": """
        threads threads_batch cpu_mask cpu_range cpu_strict prio poll cpu_mask_batch cpu_range_batch cpu_strict_batch
        prio_batch poll_batch numa
    """,
    "sampling and the length of an answer": """
        samplers seed sampler_seq sampling_seq ignore_eos! temp temperature top_k top_p min_p top_nsigma top_n_sigma
        xtc_probability xtc_threshold typical typical_p repeat_last_n repeat_penalty presence_penalty frequency_penalty
        dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breaker adaptive_target
        adaptive_decay dynatemp_range dynatemp_exp mirostat mirostat_lr mirostat_ent logit_bias grammar grammar_file
        json_schema json_schema_file backend_sampling! predict n_predict keep
    """,
    "templates and what is made of an answer": """
        jinja! no_jinja! reasoning_format reasoning reasoning_effort reasoning_budget reasoning_budget_message
        reasoning_preserve! no_reasoning_preserve! chat_template chat_template_file chat_template_kwargs
        skip_chat_parsing! no_skip_chat_parsing! prefill_assistant! no_prefill_assistant! special! reverse_prompt
        escape! no_escape! spm_infill! embd_normalize
    """,
    "positions; the cache has the size that --ctx-size says": """
        rope_scaling rope_scale rope_freq_base rope_freq_scale yarn_orig_ctx yarn_ext_factor yarn_attn_factor
        yarn_beta_slow yarn_beta_fast
    """,
    "which part of the cache is kept; it is allocated whole at the start": """
        context_shift! no_context_shift! cache_prompt! no_cache_prompt! cache_reuse cache_idle_slots!
        no_cache_idle_slots! slot_prompt_similarity defrag_thold cont_batching! no_cont_batching! checkpoint_min_step
        lookup_cache_static lookup_cache_dynamic
    """,
    "copies of finished prompts in the host's memory, up to this many MiB": "cache_ram",
    "copies of windows and states in the host's memory": "ctx_checkpoints swa_checkpoints",
    "how the weights of the host are read, not how many there are": """
        load_mode lazy_mode mlock! no_mmap! mmap! direct_io! no_direct_io! repack! no_repack! check_tensors! warmup!
        no_warmup! perf! no_perf! show_timings! no_show_timings! offline! no_host!
    """,
    "names, logs and files of the model": """
        no_mmproj! no_mmproj_auto! mmproj_auto!
        alias tags hf_token log_disable! log_file log_jsonl! no_log_jsonl! log_prompts_dir log_colors verbose!
        log_verbose! verbosity log_verbosity log_prefix! no_log_prefix! log_timestamps! no_log_timestamps! simple_io!
        verbose_prompt! color image_min_tokens image_max_tokens parallel_tool_calls! mtmd_batch_max_tokens video_fps
        video_timestamp_interval video_ffmpeg_dir lora_init_without_apply! control_vector_layer_range models_autoload!
        no_models_autoload! completion_bash! cache_list! list_devices! version! help! usage!
    """,
    "how drafts are found": """
        spec_ngram_mod_n_min spec_ngram_mod_n_max spec_ngram_mod_n_match spec_ngram_simple_size_n
        spec_ngram_simple_size_m spec_ngram_simple_min_hits draft draft_n draft_max draft_min draft_n_min
        spec_ngram_map_k_size_n spec_ngram_map_k_size_m spec_ngram_map_k_min_hits spec_ngram_map_k4v_size_n
        spec_ngram_map_k4v_size_m spec_ngram_map_k4v_min_hits spec_ngram_size_n spec_ngram_size_m
        spec_ngram_min_hits spec_draft_cpu_mask cpu_mask_draft spec_draft_cpu_range cpu_range_draft
        spec_draft_cpu_strict cpu_strict_draft spec_draft_prio prio_draft spec_draft_poll poll_draft
        spec_draft_cpu_mask_batch cpu_mask_batch_draft spec_draft_cpu_strict_batch cpu_strict_batch_draft
        spec_draft_prio_batch prio_batch_draft spec_draft_poll_batch poll_batch_draft threads_batch_draft
        spec_synth_len spec_synth_rates spec_draft_backend_sampling!
        no_spec_draft_backend_sampling! spec_draft_threads threads_draft spec_draft_threads_batch spec_draft_n_min
        spec_draft_p_split draft_p_split spec_draft_p_min draft_p_min
    """,
}
REFUSED: Final = {
    "it is not on this machine; name its file with --mmproj": "mmproj_url",
    "kvplan does not size control vectors; remove it": "control_vector control_vector_scaled",
    "it stands for several flags; write them": "spec_default!",
    "kvplan sizes a draft of whole layers in one cache of f16; remove it": """
        spec_draft_override_tensor override_tensor_draft spec_draft_cpu_moe! cpu_moe_draft! spec_draft_n_cpu_moe
        spec_draft_ncmoe n_cpu_moe_draft spec_draft_type_k=f16 cache_type_k_draft=f16 spec_draft_type_v=f16
        cache_type_v_draft=f16 spec_draft_device device_draft
    """,
    "kvplan sizes the GPUs of one machine; remove it": "rpc",
    "kvplan sizes text generation; remove it": "embedding! embeddings! rerank! reranking! pooling=none",
    "kvplan does not change the file's metadata; remove it": "override_kv",
    "several models share the memory; paste one": "models_dir models_preset models_max",
    "kvplan sizes experts only (--n-cpu-moe); remove it": "n_cpu_ffn",
    "it sizes the cache by slots; write --ctx-size": "kv_unified_per_slot",
    "it stands for a model and several flags; write them": """
        embd_gemma_default! fim_qwen_1.5b_default! fim_qwen_3b_default! fim_qwen_7b_default! fim_qwen_7b_spec!
        fim_qwen_14b_spec! fim_qwen_30b_default! gpt_oss_20b_default! gpt_oss_120b_default! vision_gemma_4b_default!
        vision_gemma_12b_default! model_url docker_repo
    """,
}
OMITTED: Final = """
    api_key api_key_file hf_token ssl_key_file server_base mlock no_mmap mmap direct_io no_direct_io show_timings
    no_show_timings simple_io verbose_prompt color parallel_tool_calls defrag_thold help usage version list_devices
    cache_list completion_bash
"""  # secrets, what 0.5.0 no longer takes, and what ends the server

OTHERS: Final[Mapping[str, Other]] = others("llamacpp", NO_EFFECT, REFUSED, {}, OMITTED)

# One-dash forms of these flags.
SHORT: Final = {
    "t": "threads", "tb": "threads_batch", "C": "cpu_mask", "Cr": "cpu_range", "Cb": "cpu_mask_batch", "Crb":
    "cpu_range_batch", "lcs": "lookup_cache_static", "lcd": "lookup_cache_dynamic", "n": "predict", "ctxcp":
    "ctx_checkpoints", "cms": "checkpoint_min_step", "cram": "cache_ram", "e": "escape", "r": "reverse_prompt",
    "sp": "special", "s": "seed", "l": "logit_bias", "j": "json_schema", "jf": "json_schema_file", "bs":
    "backend_sampling", "gan": "grp_attn_n", "gaw": "grp_attn_w", "nr": "no_repack", "dt": "defrag_thold", "cb":
    "cont_batching", "nocb": "no_cont_batching", "mm": "mmproj", "mmu": "mmproj_url", "lm": "load_mode", "lzm":
    "lazy_mode", "dev": "device", "dr": "docker_repo", "ncffn": "n_cpu_ffn", "a": "alias", "m": "model", "hf":
    "hf_repo", "hfr": "hf_repo", "hff": "hf_file", "hft": "hf_token", "ag": "agent", "no_ag": "no_agent", "to":
    "timeout", "rea": "reasoning", "sps": "slot_prompt_similarity", "v": "verbose", "lv": "verbosity", "hfd":
    "hf_repo_draft", "hfrd": "hf_repo_draft", "md": "model_draft", "ngld": "spec_draft_ngl", "ctkd":
    "spec_draft_type_k", "ctvd": "spec_draft_type_v", "devd": "spec_draft_device", "td": "spec_draft_threads", "co":
    "color", "h": "help", "cl": "cache_list", "mu": "model_url", "tbd": "spec_draft_threads_batch", "Cd":
    "spec_draft_cpu_mask", "Crd": "spec_draft_cpu_range", "Cbd": "spec_draft_cpu_mask_batch", "otd":
    "spec_draft_override_tensor", "cmoed": "spec_draft_cpu_moe", "ncmoed": "spec_draft_n_cpu_moe",
}  # fmt: skip
