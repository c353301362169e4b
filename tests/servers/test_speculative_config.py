"""--speculative-config as an option: what a pasted command says, and an error for what vLLM would refuse."""

import json
from pathlib import Path

import pytest

import kvplan
from kvplan.core.errors import KvplanError
from kvplan.servers.words.arguments import LEFT_OUT
from kvplan.servers.words.speculative_config import parse_config
from tests.support.cli import Run, refused
from tests.support.cli import run as run  # the fixture

# Keys of SpeculativeConfig that a user may set: vLLM 0.33 config/speculative.py. The engine sets four others.
KEYS = """
    enforce_eager num_speculative_tokens model method draft_tensor_parallel_size tensor_parallel_size quantization
    moe_backend attention_backend kv_cache_dtype max_model_len revision code_revision index_share_for_mtp_iteration
    disable_padded_drafter_batch disable_eagle_block_drop disable_lookahead_block_hashes draft_lm_head_quantization
    use_local_argmax_reduction use_heterogeneous_vocab prompt_lookup_max prompt_lookup_min parallel_drafting
    num_speculative_tokens_per_batch_size suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests
    suffix_decoding_max_spec_factor suffix_decoding_min_token_prob draft_load_config rejection_sample_method
    synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification draft_sample_method
    dspark_draft_topk xpress_topc fly_window_size fly_entropy_threshold fly_entropy_top_k
""".split()  # noqa: SIM905 -- as many names in a list would fill a page
REJECTED = "tensor_parallel_size"  # vLLM itself refuses it: "Please pass 'draft_tensor_parallel_size'"
HERE = ("--gpu", "h100-80g", "--ctx", "8k", "-q", "--format", "json")
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4}'


@pytest.mark.parametrize("key", [key for key in KEYS if key != REJECTED])
def test_every_key_that_vllm_takes_is_known(key: str) -> None:
    assert parse_config({key: None}, "--speculative-config").tokens is None


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("llama-3.1-8b", NGRAM),
        ("llama-3.1-8b", '{"model": "llama-3.2-1b", "num-speculative-tokens": 4, "draft_tensor_parallel_size": 1}'),
        ("qwen3.5-27b", '{"method": "qwen3_next_mtp", "num_speculative_tokens": 2}'),
        ("qwen3.5-27b", '{"method": "mtp"}'),
    ],
)
def test_an_option_says_what_a_pasted_command_says(run: Run, model: str, config: str) -> None:
    typed = run("estimate", model, "--speculative-config", config, *HERE).json
    pasted = run("estimate", "--from-command", f"vllm serve {model} --speculative-config '{config}'", *HERE).json
    plain = run("estimate", model, *HERE).json
    typed["inputs"]["args"] |= LEFT_OUT  # which a command states by leaving them out
    assert {**typed, "notes": []} == {**pasted, "notes": []}
    assert typed["kv"] != plain["kv"] or typed["memory"] != plain["memory"]


def test_an_option_replaces_the_drafts_of_a_pasted_command(run: Run) -> None:
    draft = '{"model": "llama-3.2-1b", "num_speculative_tokens": 5}'
    pasted = f"vllm serve llama-3.1-8b --speculative-config '{draft}'"
    got = run("estimate", "--from-command", pasted, "--speculative-config", NGRAM, *HERE).json
    assert got["flags"] == run("estimate", "llama-3.1-8b", "--speculative-config", NGRAM, *HERE).json["flags"]
    assert "llama-3.2" not in got["flags"]["command"]


@pytest.mark.parametrize(
    ("config", "more", "fault"),
    [
        ("[1]", (), "is not a JSON object ('[1]')"),
        ("method=ngram", (), "is not a JSON object"),
        ("{}", (), "has neither a method nor a model"),
        ('{"num_speculative_tokens": 3}', (), "has neither a method nor a model"),
        (
            '{"method": "mtp", "num_spec_token": 1}',
            (),
            "'num_spec_token'; did you mean num_speculative_tokens",
        ),
        ('{"method": "ngram", "tensor_parallel_size": 1}', (), "did you mean draft_tensor_parallel_size"),
        ('{"method": "medusa"}', (), "'medusa' is not modeled"),
        ('{"method": "ngrm"}', (), "'ngrm' is not modeled; did you mean ngram?"),
        ('{"method": 3}', (), "method is not a name"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', (), "num_speculative_tokens must be at least 1"),
        ('{"model": "llama-3.2-1b", "quantization": "fp8"}', (), "may quantize the draft"),
        ('{"model": "llama-3.2-1b", "draft_tensor_parallel_size": 2}', (), "draft_tensor_parallel_size 2 is refused"),
        (NGRAM, ("--num-speculative-tokens", "3"), "--num-speculative-tokens 3 contradicts --speculative-config (4)"),
        (NGRAM, ("--speculative-method", "suffix"), "suffix contradicts --speculative-config (ngram)"),
        (NGRAM, ("--engine-arg", "num_speculative_tokens=3"), "contradict each other"),
    ],
)
def test_what_vllm_would_refuse_is_one_line(run: Run, config: str, more: tuple[str, ...], fault: str) -> None:
    ran = run("estimate", "llama-3.1-8b", "--speculative-config", config, *more, *HERE)
    assert fault in refused(ran)
    assert len(ran.errors) == 1


def test_keys_that_move_no_memory_are_repeated_in_printed_commands(run: Run) -> None:
    config = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": null}'
    for words in (
        ("llama-3.1-8b", "--speculative-config", config),
        ("--from-command", f"vllm serve llama-3.1-8b --speculative-config '{config}'"),
    ):
        command = run("estimate", *words, "--gpu", "h100-80g", "--ctx", "8k", "--format", "json").json["flags"]["argv"]
        assert json.loads(command[-1]) == {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}


def test_a_list_of_draft_tokens_needs_a_config_without_them(run: Run) -> None:
    swept = ("sweep", "deepseek-v3", "--gpu", "h200", "--tp", "8", "--num-speculative-tokens", "1,3", "--ctx", "8k")
    fault = refused(run(*swept, "--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}'))
    assert "; omit num_speculative_tokens from --speculative-config" in fault
    ran = run(*swept, "--speculative-config", '{"method": "mtp"}', "--format", "json", "-q")
    assert [row["num_speculative_tokens"] for row in ran.json["rows"]] == [1, 3]


def test_a_sweep_takes_it_with_every_number_of_ranks(run: Run) -> None:
    config = '{"model": "llama-3.2-1b", "num_speculative_tokens": 4, "draft_tensor_parallel_size": 2}'
    swept = ("sweep", "llama-3.1-8b", "--speculative-config", config, *HERE)
    (row,) = run(*swept, "--tp", "2").json["rows"]
    planned = run("estimate", *swept[1:], "--tp", "2").json
    assert row["weights"] == planned["memory"]["weights"]
    assert "draft_tensor_parallel_size 2 is refused by vLLM with 1" in refused(run(*swept, "--tp", "1,2"))


def test_a_policys_draft_lies_beside_the_policy(run: Run, tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "vocab_size": 128256,
              "intermediate_size": 8192, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8,
              "torch_dtype": "bfloat16", "max_position_embeddings": 8192}  # fmt: skip
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    policy = tmp_path / "kvplan.policy.yaml"
    policy.write_text(
        "version: 1\ntargets:\n  - id: chat\n    model: llama-3.1-8b\n    gpu: h100-80g\n    max_model_len: 8k\n"
        '    speculative_config: \'{"model": "./draft", "num_speculative_tokens": 3}\'\n    rules:\n      fits: true\n'
    )
    ran = run("check", policy)
    assert ran.code == 0, ran


def test_python_takes_a_dict() -> None:
    answer = kvplan.estimate("llama-3.1-8b", gpu="h100-80g", speculative_config=json.loads(NGRAM))
    assert answer.plan.request.args.num_speculative_tokens == 4
    with pytest.raises(KvplanError, match="neither a method nor a model"):
        kvplan.estimate("llama-3.1-8b", gpu="h100-80g", speculative_config={})
