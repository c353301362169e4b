"""Chat templates give the text that transformers gives, and cannot leave their sandbox."""

from typing import Any

import pytest

from kvplan.core.errors import InvalidInputError
from kvplan.serve.chat import PLAIN, ChatTemplate, messages_of
from kvplan.serve.fields import ApiError

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": 'Ünïcode <&> "quotes" and\nlines'},
    {"role": "assistant", "content": "Yes. "},
    {"role": "user", "content": "More?"},
]
# Every construct that published templates lean on: loops with break and continue, trimmed blocks, namespaces, JSON,
# generation marks, slices, filters, tests.
TEMPLATES = [
    PLAIN,
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}[{{ m.role | upper }}] "
    "{{ m.content | trim }}{% if loop.last %}{% break %}{% endif %}\n{% endfor %}",
    "{%- set ns = namespace(n=0) -%}\n  {%- for m in messages[1:] %}\n    {%- set ns.n = ns.n + 1 %}\n"
    "  {{ ns.n }}:{{ m | tojson }}\n  {%- endfor %}\n{% if add_generation_prompt is defined %}GO{% endif %}",
    "{% for m in messages %}\n    {% if m.role == 'assistant' %}\n{% generation %}{{ m.content }}{% endgeneration %}\n"
    "    {% endif %}\n{% endfor %}\n{{ messages | map(attribute='role') | join(',') }} {{ [1, 2] | tojson(indent=2) }}",
]
# transformers 5.23's text of each, without its help.
TEXTS = [
    '<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nÜnïcode <&> "quotes" and\nlines<|im_end|>\n'
    "<|im_start|>assistant\nYes. <|im_end|>\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n",
    '<s>[USER] Ünïcode <&> "quotes" and\nlines[ASSISTANT] Yes.[USER] More?',  # trimmed
]


@pytest.mark.parametrize(("template", "text"), list(zip(TEMPLATES, TEXTS, strict=False)))
def test_a_template_is_rendered(template: str, text: str) -> None:
    assert ChatTemplate(template, {"bos_token": "<s>"}).prompt(TALK, {"add_generation_prompt": True}) == text


@pytest.mark.full
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_text_is_transformers(template: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    ours = ChatTemplate(template, {"bos_token": "<s>"}).prompt(TALK, {"add_generation_prompt": True})
    theirs, _ = render_jinja_template([TALK], chat_template=template, add_generation_prompt=True, bos_token="<s>")
    assert ours == theirs[0]


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ raise_exception('no system role') }}",
        "{{ 1 / 0 }}",
        "{% include 'a' %}",
    ],
)
def test_what_a_template_may_not_do_is_the_clients_error(template: str) -> None:
    with pytest.raises(ApiError) as refused:
        ChatTemplate(template).prompt(TALK, {})
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_a_template_that_is_none_is_refused_at_the_start() -> None:
    with pytest.raises(InvalidInputError, match="cannot be used"):
        ChatTemplate("{% if %}")


def test_parts_of_text_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert messages_of([{"role": "user", "content": parts}, {"role": "assistant"}]) == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
    ]


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set ns = namespace(x=['a']) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}"


@pytest.mark.parametrize(
    "template",
    [
        LOOPS, DOUBLED, "{{ 'a' * 10**9 }}", "{{ 'a' * 10**13 }}", "{{ '%9999999999d' % 1 }}", "{{ 10 ** (10 ** 9) }}",
        "{{ messages | tojson(indent=10**10) }}", "{{ 'a' * (2**24 + 1) }}", "{{ (range(99999) | list) * 99999 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% macro f() %}{{ f() ~ f() }}{% endmacro %}{{ f() }}",
    ],
)  # fmt: skip
def test_a_template_has_a_budget_and_the_next_prompt_its_own(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvplan.serve.rendering.SECONDS", 0.2)
    with pytest.raises((ApiError, InvalidInputError), match="chat template"):  # as it renders, or compiles
        ChatTemplate(template).prompt(TALK, {})
    assert ChatTemplate("{{ messages | length }}").prompt(TALK, {}) == "4"


def test_a_template_that_cannot_be_compiled_ends_nothing() -> None:
    with pytest.raises(InvalidInputError, match="chat template"):
        ChatTemplate("{{ " + "(" * 100_000 + ")" * 100_000 + " }}")
    assert ChatTemplate("{{ messages | length }}").prompt(TALK, {}) == "4"


def test_options_of_a_template_win_over_its_special_tokens() -> None:  # transformers: template_kwargs, too
    template = ChatTemplate("{{ bos_token }}{{ mode }}", {"bos_token": "<s>"})
    assert template.prompt(TALK, {"mode": "a"}) == "<s>a"
    assert template.prompt(TALK, {"bos_token": "b"}) == "b"
