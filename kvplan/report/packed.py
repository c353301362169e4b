"""Shared parts of pages with a script: data as base64 of gzip, and the hash that allows only the page's script."""

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping


def packed_data(document: Mapping[str, object]) -> str:
    """A document as base64 of gzip; reproducible byte for byte."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def script_hash(script: str) -> str:
    """Hash for the page's Content-Security-Policy."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
