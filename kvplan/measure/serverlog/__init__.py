"""What a server logged when it started, beside its plan."""
