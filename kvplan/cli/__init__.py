"""The command line: parse options, call one function, pass the result to a report, set the exit code."""
