"""The measuring code of the benchmarks. The command of the same name calls each file."""
