"""Finds, prepares, starts, supervises and stops a tritonserver.

It knows nothing of hPLMs, and serves a repository of any models.
"""

from hplm.server.supervisor import Supervisor
from hplm.server.triton import TritonServer

__all__ = ["Supervisor", "TritonServer"]
