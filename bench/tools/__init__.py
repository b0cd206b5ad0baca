"""Tools of several benchmarks: clocks, the memory of processes, a description of the machine, timelines of threads."""
