"""A typed client for hPLMs served by Triton, over HTTP and gRPC, for threads and for asyncio."""

from hplm_client.aio import AsyncHplmClient
from hplm_client.answer import Answer, Row, Tenant
from hplm_client.client import HplmClient
from hplm_client.errors import (
    Broken,
    ClientTimeout,
    ConnectionFailed,
    ConnectionLost,
    Crashed,
    DeadlineMissed,
    Draining,
    Forbidden,
    HplmClientError,
    Internal,
    InvalidInput,
    LateAnswer,
    NoBackbone,
    NotConnected,
    NoTenant,
    NotTrusted,
    OutOfCapacity,
    Quarantined,
    QueueFull,
    QuotaExceeded,
    SafeToRetry,
    ServerFault,
    Unavailable,
    UnexpectedAnswer,
)  # fmt: skip
from hplm_client.generation import Generated, Piece

__version__ = "0.1.0"
__all__ = [
    "Answer", "AsyncHplmClient", "Broken", "ClientTimeout", "ConnectionFailed", "ConnectionLost", "Crashed",
    "DeadlineMissed", "Draining", "Forbidden", "Generated", "HplmClient", "HplmClientError", "Internal", "InvalidInput",
    "LateAnswer", "NoBackbone", "NoTenant", "NotConnected", "NotTrusted", "OutOfCapacity", "Piece", "Quarantined", "QueueFull",
    "QuotaExceeded", "Row", "SafeToRetry", "ServerFault", "Tenant", "Unavailable", "UnexpectedAnswer",
]  # fmt: skip
