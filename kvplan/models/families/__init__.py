"""One reader per model family: a config's facts, layer by layer."""
