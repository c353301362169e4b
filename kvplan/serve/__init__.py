"""OpenAI-compatible server: one HTTP API over the bundled engine or over a simulated backend (the twin)."""
