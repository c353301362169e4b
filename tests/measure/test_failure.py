"""What a failed server's log says of its end; the logs are short ones in the servers' own words."""

from fractions import Fraction

from kvplan.measure.failure import Failure, read_failure

GIB = 1 << 30


def read(text: str) -> Failure:
    return read_failure(text.strip("\n").splitlines())


KV_TOO_SMALL = """
(EngineCore_DP0 pid=71) ERROR 02-11 10:00:00 [core.py:708] ValueError: To serve at least one request with the models's \
max seq len (131072), (16.00 GiB KV cache is needed, which is larger than the available KV cache memory (9.97 GiB). \
Based on the available memory, the estimated maximum model length is 81664. Try increasing `gpu_memory_utilization` or \
decreasing `max_model_len` when initializing the engine.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': 1}
"""


def test_a_context_above_the_pool_is_named_with_every_figure_of_its_line() -> None:
    failure = read(KV_TOO_SMALL)
    assert (failure.server, failure.outcome, failure.cause) == ("vllm", "failed", "kv_too_small_for_max_len")
    assert failure.memory_question is True
    assert [line.line for line in failure.evidence] == [1]
    figures = failure.figures
    assert (figures.context, figures.estimated_max_len) == (131072, 81664)
    assert figures.needed_bytes is not None
    assert figures.needed_bytes.bytes == 16 * GIB
    assert figures.available_bytes is not None
    # vLLM divides and rounds to two decimals: 9.965 to 9.975 GiB.
    assert Fraction(figures.available_bytes.low, GIB) >= Fraction("9.965")
    assert Fraction(figures.available_bytes.high, GIB) <= Fraction("9.975")


def test_a_line_that_a_terminal_wrapped_inside_a_word_is_read() -> None:
    wrapped = KV_TOO_SMALL.replace("KV cache is needed", "KV cac\nhe is needed").replace(
        "available KV", "avail\nable KV"
    )
    assert read(wrapped).figures == read(KV_TOO_SMALL).figures


def test_text_that_shows_nothing_has_no_cause_and_says_what_is_needed() -> None:
    failure = read("it does not work, please help")
    assert (failure.cause, failure.outcome, failure.memory_question) == (None, "unknown", None)
    assert failure.needs
