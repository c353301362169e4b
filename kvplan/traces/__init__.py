"""Requests as they came, or as a published workload has them: reading, figures, samples, profiles by name."""
