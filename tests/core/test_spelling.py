"""Texts are spelled as the flags are, in American English: utilization, quantized, modeled."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BRITISH = re.compile(
    r"\w*(?:utilis|quantis|modelled|behaviour|colour|neighbour|organis|normalis|initialis|honour|judgement|labelled)\w*",
    re.IGNORECASE,
)


def test_no_word_is_spelled_the_british_way() -> None:
    """In texts, names, docstrings and comments alike."""
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {word}"
        for room in ("kvplan", "engine")
        for path in sorted((ROOT / room).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for word in BRITISH.findall(line)
    ]
    assert not wrong, wrong
