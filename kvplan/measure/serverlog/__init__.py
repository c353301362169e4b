"""What a server logged when it started, compared with its plan."""
