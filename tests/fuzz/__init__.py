"""Fuzzing: random bad input to a running server, to files and to data. One command: `python -m tests.fuzz`."""
