"""What pages with a script share: data as base64 of gzip, and the hash by which the page runs its own script only."""

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping


def packed_data(document: Mapping[str, object]) -> str:
    """A document as base64 of gzip; the same bytes each time."""
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def script_hash(script: str) -> str:
    """For the page's Content-Security-Policy."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
