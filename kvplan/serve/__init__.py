"""The OpenAI-compatible server: one face over the bundled engine, or over its twin that computes nothing."""
