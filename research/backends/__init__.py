"""Triton backends of the baselines, one folder for each."""
