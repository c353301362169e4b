"""Where the published times lie that the repository carries."""

from pathlib import Path

FACTS = Path(__file__).parents[1] / "facts" / "time_cases.csv"
