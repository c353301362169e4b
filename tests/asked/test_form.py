"""A form: the same keys from every source, all faults at once, and values that a log completes."""

from typing import Any

import pytest

from kvplan.asked.call import form_of
from kvplan.asked.form import LENGTH_KEYS, PLAN_KEYS, Form, Origin, read_form
from kvplan.asked.question import requests
from kvplan.cli import options
from kvplan.core.errors import KvplanError, UsageError

PLAIN: dict[str, Any] = {"model": "llama-3.1-8b", "gpu": ["l40s"], "max_model_len": ["8k"]}


def test_every_key_is_an_option_of_a_plan_and_its_lengths() -> None:
    assert {*PLAN_KEYS, *LENGTH_KEYS} <= set(options.WorkloadOptions.__annotations__) | set(
        options.PlanOptions.__annotations__
    )


def test_a_command_line_a_call_and_a_form_ask_the_same() -> None:
    typed = options.form_of(options.EstimateOptions(**PLAIN))
    called = form_of({"max_model_len": "8k"}, model="llama-3.1-8b", gpu="l40s")
    assert typed.values == called.values == PLAIN
    (request,) = requests(read_form(typed)).requests
    assert (request.gpu.name, request.args.max_model_len) == ("l40s", 8192)  # 8k is 8 * 1024


def test_all_faults_of_a_form_are_one_error() -> None:
    form = Form({"model": "nosuch", "gpu": ["foo"], "max_model_len": ["5z"], "max_num_seqs": "0", "dtype": "int3"})
    with pytest.raises(KvplanError) as caught:
        read_form(form)
    assert {wrong.subject.split()[0] for wrong in caught.value.all} == {
        "model", "gpu", "--ctx", "--max-num-seqs", "--dtype",
    }  # fmt: skip


def test_a_value_left_out_is_not_in_the_form() -> None:
    assert Form({"engine": "vllm", "revision": "main"}).changed(engine=None).values == {"revision": "main"}


def test_an_error_is_named_by_the_origin_of_its_value() -> None:
    form = Form({"max_model_len": ["9"]}, origins={"max_model_len": Origin("log: max_seq_len=9", "set it with --ctx")})
    error = form.named(UsageError("--ctx", "is too small", "write more"))
    assert (error.subject, error.problem, error.remedy) == ("log: max_seq_len=9", "is too small", "set it with --ctx")
    other = UsageError("--gpu", "is unknown")
    assert form.named(other) is other


def test_values_of_other_keys_are_refused_by_their_flag() -> None:
    with pytest.raises(UsageError, match="--ctx works only here; remove it"):
        Form(PLAIN).refuse_except(("model", "gpu"), "works only here", "remove it")
