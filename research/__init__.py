"""Reproduces the papers' tables and figures: hPLMs beside the models that they are compared with."""
