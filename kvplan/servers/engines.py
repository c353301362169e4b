"""Which server's rules: `vllm`, `vllm@0.33`, `vllm@0.9+flashinfer`, `sglang@0.5`."""

from kvplan.core.errors import UsageError
from kvplan.servers.base import SERVERS, server_of, terms_of
from kvplan.servers.releases import Version

DEFAULT = "vllm"


def parse_engine(text: str) -> Version:
    """`vllm`, `vllm@0.33`, `vllm@0.11.0`, `vllm@0.9+flashinfer`, `sglang`, `sglang@0.4.3`."""
    engine, *words = text.split("+")
    name, _, number = engine.partition("@")
    if name not in SERVERS:
        *forms, last = [form for known in SERVERS for form in server_of(known).terms.engines]
        raise UsageError(
            f"--engine {text!r}", "is not a server that kvplan models", f"use {', '.join(forms)} or {last}"
        )
    server = server_of(name)
    if words and not server.terms.label_words:
        others = [terms.title for terms in map(terms_of, SERVERS) if terms.label_words]
        raise UsageError(f"--engine {text}", f"+{words[0]} is of {' and '.join(others)} alone", "leave it out")
    if not number:
        return server.release(None, words)
    fields = number.removeprefix("v").partition(".post")[0].split(".")
    if len(fields) not in (2, 3) or not all(field.isascii() and field.isdigit() and len(field) < 4 for field in fields):
        raise UsageError(f"--engine {text!r}", "is not a version", f"write {server.terms.example}")
    return server.release(tuple(int(field) for field in fields), words)
