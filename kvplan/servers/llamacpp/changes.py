"""Releases of llama.cpp: one was compared. It numbers builds (b6123), and calls the compared one 0.5.0."""

from typing import Final

from kvplan.servers.releases import Releases

SOURCE: Final = "llama.cpp 0.5.0 (commit 0c1e57098)"
RELEASES: Final = Releases(
    oldest=(0, 5), newest=(0, 5), compared=((0, 5), (0, 5, 0)), changes={}, called="llama.cpp"
)
# File types by size, as people choose among them.
TYPES: Final = (
    "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q4_K_M", "Q4_K_S", "IQ4_XS", "Q3_K_L", "Q3_K_M", "IQ3_M", "Q3_K_S", "IQ3_XXS",
    "Q2_K", "IQ2_M", "IQ2_XXS",
)  # fmt: skip
