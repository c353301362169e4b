"""Quantities are read as written, or refused with the flag, the value and the accepted forms."""

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.core.errors import KvplanError, UsageError
from kvplan.core.units import (
    AUTO,
    DTYPE_BITS,
    MAX_BYTES,
    MAX_TOKENS,
    format_apart,
    format_bytes,
    format_count,
    format_gib,
    format_size,
    parse_context,
    parse_contexts,
    parse_count,
    parse_fraction,
    parse_int_vllm,
    parse_size,
    parse_tokens,
    parse_tokens_vllm,
    plural,
    split_list,
)

READERS: list[Callable[[str, str], object]] = [
    parse_count,
    parse_tokens,
    parse_tokens_vllm,
    parse_int_vllm,
    parse_context,
    parse_contexts,
    parse_size,
    parse_fraction,
]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("1", 1),
        ("4096", 4_096),
        ("32k", 32_768),  # 32 * 1024
        ("32K", 32_768),
        ("32Ki", 32_768),
        ("2.4k", 2_457),  # 2.4 * 1024 = 2457.6
        ("128k", 131_072),  # Llama 3.1's max_position_embeddings
        ("1M", 1_048_576),
        ("10Mi", 10_485_760),  # Llama 4 Scout's max_position_embeddings
        ("2147483647", 2_147_483_647),
    ],
)
def test_token_counts_are_binary(text: str, tokens: int) -> None:
    assert parse_tokens(text, "--ctx") == tokens


@pytest.mark.parametrize(
    ("text", "number"),
    [
        # The examples of the vLLM CLI guide, "Human-readable integer arguments".
        ("1k", 1_000),
        ("1K", 1_024),
        ("1m", 1_000_000),
        ("1M", 1_048_576),
        ("25.6k", 25_600),
        ("32K", 32_768),
        ("32k", 32_000),
        ("1.5k", 1_500),
        ("32768", 32_768),
    ],
)
def test_a_pasted_command_is_read_as_the_server_reads_it(text: str, number: int) -> None:
    assert parse_tokens_vllm(text, "--max-model-len") == number
    assert parse_int_vllm(text, "--kv-cache-memory-bytes") == number


@pytest.mark.parametrize(("text", "number"), [("1g", 10**9), ("1G", 2**30), ("1t", 10**12), ("1T", 2**40)])
def test_a_pasted_command_has_large_suffixes_for_bytes(text: str, number: int) -> None:
    assert parse_int_vllm(text, "--kv-cache-memory-bytes") == number


FULL_WIDTH = "\uff13\uff12\uff17\uff16\uff18"  # 32768 in full-width digits, which int() would accept


@pytest.mark.parametrize(
    "text", ["", "32kb", "-2", "0", "0k", "1.5", "1.", ".5k", FULL_WIDTH, "1_000", "nan", "inf", "32 k", " 32k", "+5"]
)
def test_unreadable_token_counts_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as refusal:
        parse_context(text, "--ctx")
    message = str(refusal.value)
    assert message.startswith(("--ctx: ", "--ctx must be at least 1"))
    assert f"({text!r})" in message
    assert "32768, 32k (32,768) or 1M (1,048,576), or auto" in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["1.5K", "32kb", "-5", "0", "0.5", "k", "nan", "\u0663k"])
def test_a_pasted_number_the_server_would_refuse_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--max-model-len(:| is| must) "):
        parse_tokens_vllm(text, "--max-model-len")


def test_a_count_past_the_bound_is_refused_with_the_bound() -> None:
    with pytest.raises(UsageError, match=r"--ctx must be at most 2,147,483,647 \('2048M'\)"):
        parse_tokens("2048M", "--ctx")
    with pytest.raises(UsageError, match=r"--gpu-memory must be at most 9,223,372,036,854,775,807"):
        parse_size("8388608TiB", "--gpu-memory")  # 2^23 * 2^40 = 2^63


def test_auto_and_minus_one_ask_for_the_longest_context_that_fits() -> None:
    assert parse_context("auto", "--ctx") is AUTO
    assert parse_context("-1", "--ctx") is AUTO
    assert parse_context("32k", "--ctx") == 32_768
    assert parse_context("32k", "--max-model-len", vllm=True) == 32_000


def test_several_contexts_keep_their_order() -> None:
    assert parse_contexts("64k,4k,auto", "--ctx") == (65_536, 4_096, AUTO)
    with pytest.raises(UsageError, match="--ctx"):
        parse_contexts("4k,,8k", "--ctx")


@given(st.integers(1_000, MAX_TOKENS), st.sampled_from(["{}", "4k,{}", "{},4k", "4k, {}", " {} "]))
def test_a_number_as_kvplan_prints_it_is_never_several(number: int, place: str) -> None:
    with pytest.raises(UsageError, match=f"{number:,} may be one number; write {number}"):
        split_list(place.format(format_count(number)), "--ctx")


@pytest.mark.parametrize("text", ["8, 192", "8192,4k", "512,16", "16,8192", "0,500", "128,256,512,768", "0.9,0.95"])
def test_several_numbers_are_several(text: str) -> None:
    assert split_list(text, "--ctx") == text.replace(",", " ").split()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 25_769_803_776),  # 24 * 1024^3
        ("24 GiB", 25_769_803_776),
        ("24gib", 25_769_803_776),
        ("80GB", 80_000_000_000),
        ("79.25GiB", 85_094_039_552),  # 79.25 * 1073741824, exact
        ("512MiB", 536_870_912),
        ("100MB", 100_000_000),
        ("2TiB", 2_199_023_255_552),
        ("0.1kB", 100),
        ("25769803776", 25_769_803_776),
        ("7B", 7),
    ],
)
def test_sizes_are_integer_bytes(text: str, size: int) -> None:
    assert parse_size(text, "--gpu-memory") == size


@pytest.mark.parametrize(
    "text", ["", "24G", "24Gb", "5 potatoes", "-1GiB", "0", "0GiB", "1.5", "nan", "1_000", "1e9", "GiB"]
)
def test_unreadable_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--gpu-memory.*24GiB, 512MiB, 80GB or") as refusal:
        parse_size(text, "--gpu-memory")
    assert f"({text!r})" in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.92", 0.92),
        (".5", 0.5),
        ("1", 1.0),
        ("1.0", 1.0),
        ("1%", 0.01),
        ("92%", 0.92),
        ("99.9%", 0.999),
        ("1e-3", 0.001),
    ],
)
def test_fractions_and_percentages(text: str, value: float) -> None:
    assert parse_fraction(text, "--overflow") == value


@pytest.mark.parametrize(
    "text", ["1.2", "0", "nan", "", "-0.5", "inf", "101%", "0%", "0,9", "%", ".", "e5", "\uff11", "1e-9999"]
)
def test_fractions_outside_the_range_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--gpu-memory-utilization.*; write a fraction or a percentage") as refusal:
        parse_fraction(text, "--gpu-memory-utilization")
    assert f"({text!r})" in str(refusal.value)


@pytest.mark.parametrize("text", ["0", "-1", "2.0", "1_0", "", "two", "\uff12", "99999999999999999999999"])
def test_counts_are_plain_digits(text: str) -> None:
    assert parse_count("8", "--tp") == 8
    with pytest.raises(UsageError, match=r"^--tp(: not a whole number| must be at least 1) "):
        parse_count(text, "--tp")


@pytest.mark.parametrize("name", DTYPE_BITS)
def test_dtype_bits_are_those_of_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, {"float8_e4m3": "float8_e4m3fn", "float8_e8m0": "float8_e8m0fnu"}.get(name, name), None)
    if dtype is None or name in ("int4", "uint4"):  # torch has only placeholders for these
        pytest.skip(f"torch has no tensor of {name}")
    assert DTYPE_BITS[name] == 8 * torch.empty(0, dtype=dtype).element_size()


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (59_034_324_992, "54.98 GiB"),  # 59034324992 / 1073741824 = 54.98
        (0, "0.00 GiB"),
        (-(2**30), "-1.00 GiB"),
        (2**40, "1,024.00 GiB"),
    ],
)
def test_gib_have_two_decimals(size: int, text: str) -> None:
    assert format_gib(size) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0.00 GiB"),
        (1, "1 B"),
        (-700, "-700 B"),
        (5 * 2**20, "5 MiB"),
        (5_368_709, "5.12 MiB"),  # 0.005 GiB are 5,368,709.12 bytes
        (5_368_710, "0.01 GiB"),
        (2**30, "1.00 GiB"),
    ],
)
def test_what_gib_would_show_as_nothing_has_a_smaller_unit(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (131_072, "128 KiB"),  # one token of Llama-3.1-8B: 32 layers * 8 heads * 128 * 2 * 2 bytes
        (536_870_912, "512 MiB"),
        (4_294_967_296, "4 GiB"),
        (1_610_612_736, "1.50 GiB"),
        (700, "700 B"),
        (0, "0 B"),
        (-1_024, "-1 KiB"),
        (2**20 - 1, "1.00 MiB"),
    ],
)
def test_sizes_are_printed_in_the_largest_unit_that_fits(size: int, text: str) -> None:
    assert format_size(size) == text


def test_counts_are_printed_with_thousands_apart() -> None:
    assert format_count(32_768) == "32,768"


@given(st.integers(1, MAX_TOKENS))
def test_a_plain_number_reads_the_same_everywhere(number: int) -> None:
    text = str(number)
    assert parse_count(text, "-n") == parse_tokens(text, "-n") == parse_tokens_vllm(text, "-n") == number
    assert parse_size(text, "-n") == number


@given(st.integers(1, MAX_BYTES // 2**30))
def test_whole_gib_read_back_as_printed(number: int) -> None:
    assert parse_size(f"{number}GiB", "-n") == number * 2**30
    assert format_gib(number * 2**30) == f"{number:,}.00 GiB"


@given(st.integers(1, 100_000), st.sampled_from(["KiB", "MiB", "GiB", "kB", "MB", "GB"]))
def test_hundredths_of_a_unit_are_cut_to_whole_bytes(hundredths: int, unit: str) -> None:
    unit_bytes = parse_size(f"1{unit}", "-n")
    read = parse_size(f"{hundredths // 100}.{hundredths % 100:02}{unit}", "-n")
    assert read * 100 <= hundredths * unit_bytes < (read + 1) * 100


@given(st.integers(1, 10_000))
def test_percentages_are_hundredths(hundredths: int) -> None:
    text = f"{hundredths // 100}.{hundredths % 100:02}%"
    assert parse_fraction(text, "-n") == pytest.approx(hundredths / 10_000, rel=1e-15)


@given(st.text() | st.from_regex(re.compile(r"[-+]?[0-9_.]{0,30}[kKmMgGtTiBbe%]{0,3}[0-9]{0,5}"), fullmatch=True))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    for read in READERS:
        message = _refusal(read, text)
        assert message is None or message.startswith(("--option: ", "--option is ", "--option must "))
        assert message is None or len(message.splitlines()) == 1


def _refusal(read: Callable[[str, str], object], text: str) -> str | None:
    try:
        read(text, "--option")
    except KvplanError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("count", "text"), [(0, "0 users"), (1, "1 user"), (2, "2 users"), (12_000, "12,000 users")])
def test_one_is_no_plural(count: int, text: str) -> None:
    assert plural(count, "user") == text


@pytest.mark.parametrize(
    ("sizes", "texts"),
    [
        ((5 * 2**30, 4 * 2**30), ("5.00 GiB", "4.00 GiB")),
        ((4098 * 2**20, 4096 * 2**20), ("4,098.00 MiB", "4,096.00 MiB")),  # both 4.00 GiB
        ((2**30 + 1, 2**30), ("1,073,741,825 B", "1,073,741,824 B")),
    ],
)
def test_two_sizes_that_differ_read_differently(sizes: tuple[int, int], texts: tuple[str, str]) -> None:
    assert format_apart(*sizes) == texts
