"""Triton backends of the baselines: one folder a backend."""
