"""Turns checkpoints, corpora and labels into tables and tenants, and exports them as Triton model folders."""
