"""What several benchmarks use: clocks, the memory of processes, a description of the machine, timelines of threads."""
