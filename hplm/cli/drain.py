"""`hplm drain`: prepares a server for its end, before a container is stopped."""

from __future__ import annotations

import time

from hplm.errors import InvalidInput


def drain(*, seconds: float = 25.0, at_least: float = 5.0) -> None:
    """Make the server of this container refuse new requests with [draining], and wait for those that it holds.

    It is made for Kubernetes' preStop. Server and command find each other by the variable HPLM_SERVER_ID, which must be the
    same for both. Only a new server ends this: remove the files of /dev/shm whose names begin with the id before it starts.

    :param seconds: the most that answers may take
    :param at_least: seconds for which new requests are refused at least, so that a router notices
    """
    from hplm.server import inherited
    from hplm.server.held import holders, wait_until_idle

    server = inherited.server_id()
    if not server:
        raise InvalidInput("HPLM_SERVER_ID is not set: set it to the same name for tritonserver and for this command")
    if not holders(server):
        raise InvalidInput(f"no model of a server with HPLM_SERVER_ID {server!r} runs here: start tritonserver with it")
    begin = time.monotonic()
    inherited.start_to_drain(server)
    held = wait_until_idle(server, begin + seconds)
    time.sleep(max(0.0, begin + min(at_least, seconds) - time.monotonic()))
    print(f"{held} requests are left" if held else "all requests are answered")
