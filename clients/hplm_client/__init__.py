"""A typed client for hPLMs served by Triton, over HTTP and gRPC, for threads and for asyncio."""

from hplm_client.aio import AsyncHplmClient as AsyncHplmClient
from hplm_client.answer import Answer as Answer
from hplm_client.answer import Row as Row
from hplm_client.client import HplmClient as HplmClient
from hplm_client.errors import Broken as Broken
from hplm_client.errors import ClientTimeout as ClientTimeout
from hplm_client.errors import ConnectionFailed as ConnectionFailed
from hplm_client.errors import ConnectionLost as ConnectionLost
from hplm_client.errors import Crashed as Crashed
from hplm_client.errors import DeadlineMissed as DeadlineMissed
from hplm_client.errors import Draining as Draining
from hplm_client.errors import Forbidden as Forbidden
from hplm_client.errors import HplmClientError as HplmClientError
from hplm_client.errors import Internal as Internal
from hplm_client.errors import InvalidInput as InvalidInput
from hplm_client.errors import NoBackbone as NoBackbone
from hplm_client.errors import NotConnected as NotConnected
from hplm_client.errors import NoTenant as NoTenant
from hplm_client.errors import NotTrusted as NotTrusted
from hplm_client.errors import OutOfCapacity as OutOfCapacity
from hplm_client.errors import Quarantined as Quarantined
from hplm_client.errors import QueueFull as QueueFull
from hplm_client.errors import QuotaExceeded as QuotaExceeded
from hplm_client.errors import SafeToRetry as SafeToRetry
from hplm_client.errors import ServerFault as ServerFault
from hplm_client.errors import Unavailable as Unavailable
from hplm_client.errors import UnexpectedAnswer as UnexpectedAnswer
from hplm_client.generation import Generated as Generated
from hplm_client.generation import Piece as Piece

__version__ = "0.1.0"
