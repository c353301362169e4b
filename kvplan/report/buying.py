"""What a buyer reads on a recommendation's page: the choice and two others by the month, and a curve of cost."""

from collections.abc import Iterable, Sequence
from math import ceil, floor, log10
from typing import Final

from kvplan.core.records import dataclass
from kvplan.core.table import Table
from kvplan.core.units import plural
from kvplan.report.drawing import Svg
from kvplan.report.page import Block, html_text

HOURS_A_MONTH: Final = 730  # 8,760 hours a year, by 12
MONTH: Final = (
    f"A month is {HOURS_A_MONTH} hours of every GPU, busy or not. "
    "Storage, network, staff and discounts are not included."
)
NO_PRICES: Final = "No prices were given: --prices h200=3.80,b200=6 (dollars per GPU-hour) adds $/month."
MOST_OFFERS: Final = 3
NOT_CHECKED: Final = "not checked"


@dataclass(frozen=True, slots=True)
class Offer:
    """GPUs to buy or rent.

    amount    of the load that one server takes: users, or requests per second
    gpus      of one server; price: of one of its GPUs, in dollars per hour
    spare     servers that serve nothing
    """

    name: str
    servers: str
    latency: str
    amount: float
    gpus: int
    price: float | None
    count: int
    spare: int = 0

    def cost(self, amount: float) -> float:
        """Dollars per month for so much load; without a price, GPUs."""
        gpus = (ceil(round(amount / self.amount, 9)) + self.spare) * self.gpus
        return gpus * (1.0 if self.price is None else self.price * HOURS_A_MONTH)

    @property
    def dollars(self) -> float | None:
        return None if self.price is None else self.price * self.gpus * self.count


def nearest(offers: Iterable[Offer]) -> list[Offer]:
    """The first one, which is the choice, and the cheapest others."""
    first, *others = offers
    others.sort(key=lambda offer: (offer.dollars is None, offer.dollars or 0.0, offer.gpus * offer.count))
    return [first, *others[: MOST_OFFERS - 1]]


def offers_table(offers: Sequence[Offer]) -> Table:
    priced = any(offer.price is not None for offer in offers)
    rows = [
        [
            "choice" if number == 0 else "or",
            offer.name,
            *(["-" if offer.dollars is None else f"${offer.dollars * HOURS_A_MONTH:,.0f}"] if priced else []),
            *(["-" if offer.dollars is None else f"${offer.dollars:,.2f}"] if priced else []),
            offer.latency,
            offer.servers,
        ]
        for number, offer in enumerate(offers)
    ]
    money = ("$/month", "$/hour") if priced else ()
    words = 2 + len(money)
    return Table.of(("", "GPUs", *money, "latency", "servers"), rows, left=(0, 1, words, words + 1))


def summary(offers: Sequence[Offer], prices: str | None) -> list[Block]:
    """The table of offers and what it rests on."""
    return [offers_table(offers), f"Prices: {prices}, in $ per GPU-hour. {MONTH}" if prices else NO_PRICES]


# --- the curve --------------------------------------------------------------------------------------------------------

LINES: Final = ("var(--accent)", "var(--c-kv_cache)", "var(--c-rest)")
DASHES: Final = ("", "7 4", "2 4")
MOST_STEPS: Final = 120
TEXT: Final = 13


def curve(offers: Sequence[Offer], amount: float, unit: str) -> list[Svg]:
    """Cost of each offer's kind of server over the load, up to twice the load; `unit` of the load: "users"."""
    known = [offer for offer in offers if (offer.price is None) == (offers[0].price is None)]
    what = "GPUs" if offers[0].price is None else "Dollars per month"
    sheets = [(name, drawing(known, amount, unit, width)) for name, width in (("wide", 960), ("narrow", 350))]
    return [Svg(f"{what} by {unit}, at most", tuple(sheets))]


def drawing(offers: Sequence[Offer], amount: float, unit: str, width: int) -> str:
    head, left, height = 20 * len(offers) + 24, 62, 210
    high = max(offer.cost(2 * amount) for offer in offers)
    right, bottom = width - 14, head + height

    def x_of(value: float) -> float:
        return left + (right - left) * value / (2 * amount)

    def y_of(cost: float) -> float:
        return bottom - height * cost / high

    sign = "" if offers[0].price is None else "$"
    parts = [
        f'<line x1="{left}" x2="{right}" y1="{y_of(cost):.1f}" y2="{y_of(cost):.1f}" stroke="var(--grid)"/>'
        f'<text x="{left - 8}" y="{y_of(cost) + 4:.1f}" text-anchor="end">{sign}{short(cost)}</text>'
        for cost in ticks(high)
    ]
    parts += [
        f'<text x="{x_of(value):.1f}" y="{bottom + 20}" text-anchor="middle">{short(value)}</text>'
        for value in ticks(2 * amount, 4 if width > 500 else 3)
    ]
    parts.append(f'<text x="{right}" y="{bottom + 40}" text-anchor="end">{unit}</text>')
    parts.append(
        f'<line x1="{x_of(amount):.1f}" x2="{x_of(amount):.1f}" y1="{head}" y2="{bottom}" stroke="var(--muted)" '
        f'stroke-dasharray="3 3"/>'
        f'<text x="{x_of(amount):.1f}" y="{head - 4}" text-anchor="middle">{amount:,g} {unit}</text>'
    )
    for number, offer in reversed([*enumerate(offers)]):
        style = f'fill="none" stroke="{LINES[number]}" stroke-width="2.5" stroke-dasharray="{DASHES[number]}"'
        points = " ".join(f"{x_of(value):.1f},{y_of(cost):.1f}" for value, cost in steps(offer, 2 * amount))
        row = 20 * number + 10
        parts.append(f'<polyline {style} points="{points}"/><line {style} x1="0" x2="30" y1="{row}" y2="{row}"/>')
        parts.append(f'<text x="38" y="{row + 4}" style="fill: var(--ink)">{html_text(offer.name)}</text>')
    label = html_text(f"{offers[0].name}: {sign}{short(offers[0].cost(amount))} at {amount:g} {unit}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}" viewBox="0 0 {width} {bottom + 46}" '
        f'style="font: {TEXT}px var(--font)" fill="var(--muted)">{"".join(parts)}</svg>'
    )


def steps(offer: Offer, end: float) -> list[tuple[float, float]]:
    """Corners of the stairs up to `end`; of very many, as many points as can be seen."""
    if end / offer.amount > MOST_STEPS:
        marks = [end * number / MOST_STEPS for number in range(1, MOST_STEPS + 1)]
        return [(value, offer.cost(value)) for value in marks]
    corners, before = list[tuple[float, float]](), 0.0
    while before < end:
        after = min(end, before + offer.amount)
        corners += [(before, offer.cost(after)), (after, offer.cost(after))]
        before = after
    return corners


def ticks(high: float, count: int = 4) -> list[float]:
    """Round values from 0 up to `high`, about `count` of them."""
    rough = high / count
    unit = 10.0 ** floor(log10(rough))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= rough * 0.999)
    return [step * number for number in range(int(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    """ "12k", "1.5M"; below 10,000 all digits."""
    for size, sign in ((1e6, "M"), (1e3, "k")):
        if value >= 10 * size or (value >= size and size > 1e3):
            return f"{value / size:,.4g}{sign}"
    return f"{value:,.4g}" if value < 1 else f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def servers_text(count: int, spare: int, split: str) -> str:
    """ "3 servers of TP 2", "4 servers of TP 1, 1 of them spare"."""
    return f"{plural(count, 'server')} of {split}" + (f", {spare} of them spare" if spare else "")
