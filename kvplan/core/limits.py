"""Error limits of a comparison: one fraction for all rows, or one for each named row."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.core.units import parse_fraction


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest relative errors: `named` by row, `every` for all other rows (None: no limit)."""

    every: float | None
    named: dict[str, float] = field(default_factory=dict)

    def of(self, name: str) -> float | None:
        return self.named.get(name, self.every)

    def check(self, compared: Iterable[str], option: str) -> None:
        """Refuse a limit for a row that is not compared: it could never be exceeded."""
        rows = tuple(dict.fromkeys(compared))
        for name in self.named:
            if name not in rows:
                known = ", ".join(rows) or "there are none"
                raise UsageError(
                    option, f"{printable(name, 40)!r} is not a row of this comparison", f"these are: {known}"
                )


def read(texts: Sequence[str], option: str) -> Limits:
    """Parse `2%` for every row, `weights=0.1%` for one, `weights=0` for an exact match; duplicates are rejected."""
    every: float | None = None
    named: dict[str, float] = {}
    for part in (part.strip() for text in texts for part in text.split(",")):
        name, separator, share = (piece.strip() for piece in part.rpartition("="))
        if separator and not name:
            raise UsageError(option, f"{printable(part, 60)!r} does not name a row", "write total=1%")
        if not any(digit in share for digit in "0123456789"):
            raise UsageError(option, f"{printable(part, 60)!r} has no percentage", "write 2%, or ROW=SHARE: total=1%")
        is_exact = bool(separator) and share in ("0", "0%")
        value = 0.0 if is_exact else parse_fraction(share, option)
        if name in named or (not separator and every is not None):
            raise UsageError(option, f"says {name or 'the share of every row'} twice", "set it once")
        if separator:
            named[name] = value
        else:
            every = value
    return Limits(every, named)
