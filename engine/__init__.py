"""The bundled inference engine: it runs a model and measures itself, independent of kvplan's arithmetic."""
