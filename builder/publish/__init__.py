"""Publishes a store: model folders for Triton, and changes of a registry."""
