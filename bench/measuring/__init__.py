"""What the benchmarks measure, and how: a file a benchmark, each called by the command of the same name."""
