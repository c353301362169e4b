"""Output for people and pipelines: the console, CSV and Markdown, all written from one document."""
