"""Finds, prepares, starts, supervises and stops a tritonserver, and the gateway beside it.

It knows nothing of hPLMs, and serves a repository of any models.
"""

from hplm.server.gateway import GatewayProcess
from hplm.server.supervisor import Supervisor
from hplm.server.triton import TritonServer

__all__ = ["GatewayProcess", "Supervisor", "TritonServer"]
