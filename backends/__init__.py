"""Triton's side of hPLM: one folder with a thin model.py for each backend. No mathematics and no policies."""
