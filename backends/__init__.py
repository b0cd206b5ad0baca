"""Triton glue only: one folder a backend, one thin model.py each; no mathematics and no policy."""
