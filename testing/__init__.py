"""Shared by tests, benchmarks and research: the slow reference, random stores, a toy. The product never imports it."""
