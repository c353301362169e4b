"""Texts as people paste them: scripts, prompts, other shells, and values that stand elsewhere in the text."""

import subprocess
from pathlib import Path

import pytest

import kvplan
from benchmarks.pasted import NO_MODEL, outcome, parts, rows
from kvplan.asked.pasted import read_command
from kvplan.core.errors import UsageError
from kvplan.servers.words.shell import integer, split
from tests.support.readme_blocks import ROOT

PLAIN = ["vllm", "serve", "org/a", "--tensor-parallel-size", "2"]


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve org/a --tensor-parallel-size 2 \\",
        "vllm serve org/a \\\n  --tensor-parallel-size 2 \\\n",
        "vllm serve org/a \\ \n  --tensor-parallel-size 2",
        "vllm serve org/a\n  --tensor-parallel-size 2",
        "vllm serve\n    org/a\n    --tensor-parallel-size 2",
        "$ vllm serve org/a \\\n> --tensor-parallel-size 2",
        "(venv) ann@gpu-1:~/llm$ vllm serve org/a --tensor-parallel-size 2",
        "root@gpu-1:/# vllm serve org/a --tensor-parallel-size 2",
        "# vllm serve org/a --tensor-parallel-size 2",
        "PS C:\\llm> vllm serve org/a `\n  --tensor-parallel-size 2",
        "vllm serve org/a ^\r\n  --tensor-parallel-size 2\r\n",
        "!vllm serve org/a --tensor-parallel-size 2",
        "vllm serve org/a \u2014tensor-parallel-size 2",
        "vllm serve \u201corg/a\u201d --tensor-parallel-size 2",
        "vllm serve org/a \\\n  # --enforce-eager \\\n  --tensor-parallel-size 2",
        "vllm serve org/a > server.log --tensor-parallel-size 2 2>&1 &",
        "MODEL=org/a\nvllm serve $MODEL --tensor-parallel-size ${TP:-2}",
        'export MODEL="org/a" TP=2\nvllm serve "${MODEL}" --tensor-parallel-size "$TP"',
        ': "${MODEL:=org/a}"\nvllm serve "$MODEL" --tensor-parallel-size 2',
        "MODEL=${1:-org/a}; vllm serve $MODEL --tensor-parallel-size 2",
        'ARGS=(--tensor-parallel-size 2)\nvllm serve org/a "${ARGS[@]}"',
        "ARGS=()\nARGS+=(--tensor-parallel-size)\nARGS+=(2)\nvllm serve org/a ${ARGS[@]}",
        'EXTRA="--tensor-parallel-size 2"\nvllm serve org/a $EXTRA',
        "cat > notes.txt <<EOF\ndon't read this\nEOF\nvllm serve org/a --tensor-parallel-size 2",
        "vllm serve org/a --tensor-parallel-size 2\necho \"it's up",
        "set MODEL=org/a\nvllm serve %MODEL% ^\n--tensor-parallel-size 2",
        '$model = "org/a"\nvllm serve $model --tensor-parallel-size 2',
        "bash -c -i 'vllm serve org/a --tensor-parallel-size 2'",
        'run() {\n  local model=org/a\n  vllm serve "$model" --tensor-parallel-size 2\n}',
        'if [ -n "$X" ]; then\n  echo x\nfi\nvllm serve org/a --tensor-parallel-size 2',
    ],
)
def test_a_text_is_read_as_it_is_found(text: str) -> None:
    assert PLAIN in split(text)


def test_quotes_lost_around_json_are_put_back() -> None:
    words = split('vllm serve org/a --speculative-config {"method": "mtp", "num_speculative_tokens": 3} -tp 2')[0]
    assert words[3:] == ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}', "-tp", "2"]


@pytest.mark.parametrize(
    "script",
    [
        "if [ $1 = big ]; then TP=8; else TP=4; fi\nvllm serve org/a -tp $TP",
        "case $1 in\n  a) TP=8 ;;\n  b) TP=4 ;;\nesac\nvllm serve org/a -tp $TP",
        "TP=$(nvidia-smi -L | wc -l)\nvllm serve org/a -tp $TP",
        "for TP in 1 2 4; do vllm serve org/a -tp $TP; done",
        'TP=4\n[ -n "$BIG" ] && TP=8\nvllm serve org/a -tp $TP',
    ],
)
def test_a_value_that_depends_on_the_run_is_left_open(script: str) -> None:
    with pytest.raises(UsageError, match=r"no value in the text for \$TP \(--tp\)"):
        read_command(script)
    assert read_command(script, {"tensor_parallel_size"}).model == "org/a"


def test_all_open_values_stand_in_one_line_with_their_options() -> None:
    text = 'vllm serve "$MODEL" --max-model-len "$LEN" -tp $TP --gpu-memory-utilization $U --port $PORT'
    with pytest.raises(UsageError) as caught:
        read_command(text)
    assert str(caught.value) == (
        "--from-command: no value in the text for $MODEL (MODEL), $LEN (--ctx), $TP (--tp), "
        "$U (--gpu-memory-utilization); state what stands in parentheses as an option, "
        "or paste the lines that assign it"
    )
    assert caught.value.all == (caught.value,)


def test_an_option_replaces_an_open_value() -> None:
    text = "vllm serve $MODEL --max-model-len $LEN --max-num-seqs 8"
    answer = kvplan.estimate("qwen3-8b", gpu="h100", command=text, max_model_len=8192)
    args = answer.plan.request.args
    assert (answer.plan.request.spec.name, args.max_model_len, args.max_num_seqs) == ("qwen3-8b", 8192, 8)


def test_an_option_replaces_a_name_of_python() -> None:
    text = "LLM(model=MODEL_NAME, max_model_len=args.length, tensor_parallel_size=2)"
    args = kvplan.estimate("qwen3-8b", gpu="h100", command=text, max_model_len=8192).plan.request.args
    assert (args.max_model_len, args.tensor_parallel_size) == (8192, 2)


def test_values_of_the_text_are_noted_but_no_secret() -> None:
    text = "MODEL=qwen3-8b\nKEY=sk-secret\nvllm serve $MODEL --api-key $KEY"
    notes = kvplan.estimate(gpu="h100", command=text).notes
    assert "--from-command: by assignments of the text, MODEL is qwen3-8b" in notes
    assert "sk-secret" not in " ".join(notes)


def test_words_that_may_be_any_arguments_are_left_out_with_a_warning() -> None:
    answer = kvplan.estimate(gpu="h100", command='vllm serve qwen3-8b --port $PORT $EXTRA_ARGS "$@"')
    assert answer.warnings == ("--from-command: unknown to kvplan and ignored: $EXTRA_ARGS, $@",)
    with pytest.raises(UsageError, match="the model may be in"):
        read_command('vllm serve "${ARGS[@]}"')


def test_an_open_revision_moves_no_memory() -> None:
    command = read_command('vllm serve qwen3-8b --revision "$REV" --max-num-seqs 8')
    assert (command.revision, [note.flag for note in command.notes]) == (None, ["--revision"])


def test_servers_of_two_models_are_not_chosen_between() -> None:
    with pytest.raises(UsageError, match=r"two models \(qwen3-8b and qwen3-4b\)"):
        read_command("vllm serve qwen3-8b &\nvllm serve qwen3-4b --port 8001 &")


# --- nothing is run, and nothing grows --------------------------------------------------------------------------------


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    read_command(f"X=$(touch {mark})\n`touch {mark}`\nvllm serve org/a --port $(touch {mark}; echo 1)")
    assert not mark.exists()


@pytest.mark.parametrize(
    "text",
    [
        "A0=aaaaaaaaaa\n" + "\n".join(f"A{n + 1}=$A{n}$A{n}$A{n}$A{n}" for n in range(40)) + "\nvllm serve $A40",
        "A=(a a a a a a a a)\n" + "\n".join('A+=("${A[@]}")' for _ in range(40)) + '\nvllm serve "${A[@]}"',
    ],
)
def test_values_do_not_multiply(text: str) -> None:
    with pytest.raises(UsageError, match="its variables expand to too much text"):
        read_command(text)


@pytest.mark.parametrize("piece", ["$(", "${", "`", "${A:-", '"$', "\\", "A=(", "<<E\n", '{"', "$((", "|", "<a", "'"])
def test_reading_a_long_text_ends(piece: str) -> None:
    text = "vllm serve org/a " + piece * (60_000 // len(piece))
    try:
        reply = " ".join(split(text)[0][:2])
    except UsageError as error:
        reply = str(error)
    assert "\n" not in reply  # the words, or an error in one line


# --- files that start a server in other words -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        'FROM vllm/vllm-openai:v0.11.0\nENV MODEL=org/a\nCMD ["--model", "org/a", "--max-model-len", "8192"]',
        'FROM vllm/vllm-openai:v0.11.0\nENTRYPOINT ["vllm", "serve"]\nCMD ["org/a", \\\n  "--max-model-len", "8192"]',
        "FROM vllm/vllm-openai:v0.11.0\nARG MODEL=org/a\nENTRYPOINT vllm serve $MODEL --max-model-len 8192",
    ],
)
def test_a_dockerfile_starts_its_image(text: str) -> None:
    command = read_command(text)
    assert (command.model, command.args, command.engine) == ("org/a", {"max_model_len": 8192}, "vllm@0.11.0")


def test_a_unit_of_systemd_is_read() -> None:
    command = read_command(
        '[Service]\nUser=llm\nEnvironment="MODEL=org/a" VLLM_USE_V1=1\n'
        "ExecStart=/opt/llm/bin/vllm serve $MODEL \\\n  --max-model-len 8192\nRestart=always\n"
    )
    assert (command.model, command.args) == ("org/a", {"max_model_len": 8192})


def test_a_part_of_a_server_without_a_gpu_is_named() -> None:
    text = "docker run --entrypoint vllm vllm/vllm-openai-cpu:v0.21.0 launch render org/a --port=8082"
    with pytest.raises(UsageError, match="`vllm launch render` loads no model on a GPU"):
        read_command(text)


# --- Python -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        'MODEL = "org/a"\nllm = LLM(model=MODEL, max_model_len=8192)',
        'p.add_argument("-m", "--model-name", default="org/a")\nargs = p.parse_args()\n'
        "LLM(args.model_name, max_model_len=8192)",
        'def load(model="org/a", length=8 * 1024):\n    return LLM(model=model, max_model_len=length)',
        'class A:\n    def __init__(self):\n        self.name = "org/a"\n        LLM(self.name, max_model_len=8192)',
        'import os\nLLM(os.environ.get("MODEL", "org/a"), max_model_len=int(os.getenv("LEN", "8192")))',
        'owner = "org"\nLLM(model=f"{owner}/a", max_model_len=8192)',
        'AsyncEngineArgs(model="org/a", max_model_len=8192)',
        'sglang.ServerArgs(model_path="org/a", context_length=8192)',
        'LLMConfig(model_loading_config=dict(model_id="a", model_source="org/a"), deployment_config=of(1),\n'
        '          engine_kwargs={"max_model_len": 8192})',
    ],
)
def test_literals_of_a_python_text_are_read(text: str) -> None:
    command = read_command(text)
    assert (command.model, command.args["max_model_len"]) == ("org/a", 8192)


def test_an_open_value_that_moves_no_memory_is_passed_over() -> None:
    command = read_command('LLM("org/a", download_dir=cache(), enforce_eager=True)')
    assert (command.model, command.args["enforce_eager"]) == ("org/a", True)


def test_all_open_values_of_a_call_stand_in_one_line() -> None:
    with pytest.raises(
        UsageError, match=r"no value in the text for path \(MODEL\), eager \(--enforce-eager\)"
    ) as caught:
        read_command("LLM(path, enforce_eager=eager)")
    assert caught.value.all == (caught.value,)


def test_a_name_with_two_values_is_left_open() -> None:
    with pytest.raises(UsageError, match=r"no value in the text for MODEL \(MODEL\)"):
        read_command('MODEL = "org/a"\nif small:\n    MODEL = "org/b"\nLLM(model=MODEL)')


# --- quantized on load ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--quantization bitsandbytes", "--load-format bitsandbytes"])
def test_bitsandbytes_on_load_takes_what_a_server_logged(flag: str) -> None:
    """vllm-project/vllm issue 5569: Llama 3 8B in float16, quantized on load, took 5.3128 GiB of weights."""
    command = f"vllm serve meta-llama/Meta-Llama-3-8B-Instruct --dtype half {flag}"
    answer = kvplan.estimate(gpu="t4", command=command, engine="vllm@0.6", max_model_len=8192)
    assert round(answer.memory.weights / 2**30, 2) == 5.31
    newest = kvplan.estimate(gpu="t4", command=command, engine="vllm@0.33", max_model_len=8192)
    assert not newest.fits


# --- what people publish ----------------------------------------------------------------------------------------------

DATA = ROOT.parent / "shared" / "data"


@pytest.mark.parametrize(
    ("name", "least", "of_named"),
    [
        ("corpus_commands.jsonl", 45, 0.85),  # 48 when this was written: the catalog may change
        ("corpus_manifests.jsonl", 30, 0.9),  # 32
    ],
)
def test_what_people_publish_is_planned(name: str, least: int, of_named: float) -> None:
    if not (DATA / name).is_file():
        pytest.skip("published commands are not at hand")
    outcomes = [outcome(part) for row in rows(DATA / name, "all") for part in parts(row["text"])]
    assert [result.message for result in outcomes if result.kind == "crash"] == []
    planned = [result for result in outcomes if result.kind == "planned"]
    named = [result for result in outcomes if result.kind == "planned" or result.reason not in NO_MODEL]
    assert len(planned) >= least
    assert len(planned) >= of_named * len(named)


ARITHMETIC = (
    "8*1024",
    " (8 + 8) * 1024 ",
    "7/2",
    "-7/2",
    "7%3",
    "-7%3",
    "7 % -3",
    "131072-1",
    "2*(3+4)*5",
    "-(-3)",
    "0",
    "9 - -2",
)


def test_arithmetic_of_whole_numbers_is_what_a_shell_computes() -> None:
    script = "\n".join(f"echo $(({text}))" for text in ARITHMETIC)
    computed = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert [str(integer(text)) for text in ARITHMETIC] == computed


@pytest.mark.parametrize("text", ["", "2**20", "1/0", "1%0", "RANDOM", "010", "0x10", "1<<3", "1;2", "(1", "1" * 101])
def test_other_arithmetic_is_left_alone(text: str) -> None:
    assert integer(text) is None


def test_arithmetic_in_a_script_is_computed_from_its_literals() -> None:
    text = 'K=1024\nCTX=$((8 * K))\nvllm serve org/a --max-model-len $CTX --max-num-seqs "$(( $CTX / 128 ))"'
    assert [*split(text)[-1]] == ["vllm", "serve", "org/a", "--max-model-len", "8192", "--max-num-seqs", "64"]
    assert "$((8 * $N))" in split("vllm serve org/a --max-model-len $((8 * $N))")[-1]
