"""Turns checkpoints, corpora and labels into knowledge, and exports it as Triton model folders."""
