"""Releases of llama.cpp: one was compared. It numbers builds (b6123), and calls the compared one 0.5.0."""

from typing import Final

from kvplan.servers.releases import Releases

SOURCE: Final = "llama.cpp 0.5.0 (commit 0c1e57098)"
RELEASES: Final = Releases(
    oldest=(0, 5), newest=(0, 5), compared=((0, 5), (0, 5, 0)), changes={}, called="llama.cpp"
)
