"""Finds, lays out, starts and watches a tritonserver. Knows nothing of hPLMs: a repository of any models will do."""

from hplm.server.triton import TritonServer

__all__ = ["TritonServer"]
