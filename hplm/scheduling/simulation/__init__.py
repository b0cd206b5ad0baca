"""The scheduler that serves, on a virtual clock: drawn or recorded arrivals, an engine that only takes its time."""
