"""The command line: read, call one function, hand to a report, set the exit code."""
