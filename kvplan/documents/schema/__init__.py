"""The JSON Schemas of what kvplan prints: every key named, none beyond them."""
