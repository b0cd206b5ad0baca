"""A simulator: the scheduler that serves, on a virtual clock, with arrivals and costs in place of computing."""
