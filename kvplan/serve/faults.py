"""Faults of a simulated server: a share of its requests gets an error in place of an answer."""

import re
from collections.abc import Mapping
from random import Random
from typing import Any, Final

from kvplan.core.errors import UsageError
from kvplan.core.files import printable
from kvplan.serve.fields import ApiError

KINDS: Final = {
    "rate_limit": (429, "RateLimitError"),
    "server_error": (500, "InternalServerError"),
    "overloaded": (503, "ServiceUnavailableError"),
    "timeout": (504, "GatewayTimeoutError"),
}


class Faults:
    """Shares of requests that fail, by kind; the same requests in the same order fail alike."""

    def __init__(self, rates: Mapping[str, float] | None = None) -> None:
        self.rates = dict(rates or {})
        self._luck = Random(0)

    def change(self, rates: Mapping[str, Any]) -> None:
        """Replace the shares; raise ApiError if they are wrong."""
        for name, rate in rates.items():
            if name not in KINDS:
                raise ApiError(f"{name[:40]}: not one of {', '.join(KINDS)}", param=name[:40])
            if not isinstance(rate, int | float) or isinstance(rate, bool) or not 0 <= rate <= 1:
                raise ApiError(f"{name} must be from 0 to 1", param=name)
        if sum(rates.values()) > 1:
            raise ApiError("the shares add up to more than 1")
        self.rates = dict(rates)

    def strike(self) -> None:
        """Raise ApiError for a request that fails."""
        left = self._luck.random()
        for kind, rate in self.rates.items():
            left -= rate
            if left < 0:
                status, name = KINDS[kind]
                raise ApiError(f"injected fault: {kind}", status=status, kind=name)


def faults_of(text: str | None) -> Faults:
    """Parse --faults: rate_limit=5%,server_error=0.01."""
    rates = {}
    for part in (text or "").split(",") if text else ():
        match = re.fullmatch(r"\s*(\w+)=([0-9]{1,3}(?:\.[0-9]{1,6})?)(%?)\s*", part)
        if match is None:
            raise UsageError("--faults", f"is wrong ({printable(part, 40)!r})", "write rate_limit=5%,server_error=1%")
        rates[match[1]] = float(match[2]) / (100 if match[3] else 1)
    faults = Faults()
    try:
        faults.change(rates)
    except ApiError as error:
        raise UsageError("--faults", error.message, "correct it") from error
    return faults
