"""Metrics of serving: their names, counting in the models' processes, and publishing to Triton once a second."""
