"""Attacks on what reads from strangers: each prints what it tried, what was refused, what broke (docs/attacks.md)."""
