"""Finds, prepares, starts and watches a tritonserver. It knows nothing of hPLMs, and serves a repository of any models."""

from hplm.server.triton import TritonServer

__all__ = ["TritonServer"]
