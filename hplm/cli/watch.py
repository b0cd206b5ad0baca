"""`hplm watch` and `drain`, for servers that somebody else has started.

The one asks whether models work, and loads dead ones again. The other prepares a server for its end.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hplm.cli.options import NotNegative, Positive
from hplm.clock import Clock
from hplm.errors import HplmError, InvalidInput

if TYPE_CHECKING:
    from hplm.server.control import Control
    from hplm.server.probing import Probe


def watch(
    *, url: str = "127.0.0.1:8000", models: tuple[str, ...] = (), once: bool = False, alive: bool = False,
    timeout: Positive = 15.0,
) -> None:  # fmt: skip
    """Ask the models of a server that somebody else has started whether they work.

    Each second, because Triton calls a model ready whose process is dead. Such a model is loaded again, which needs the secret
    of Triton's restricted APIs in HPLM_ADMIN. The command ends with an error when that fails, and when the server does not
    answer. `hplm serve` does all this itself, and restarts the server where requests were lost.

    :param url: HOST:PORT of its HTTP
    :param models: the models to ask, such as `--models toy-lookup toy-upper`; an ensemble is asked by its parts (default: all;
        that needs HPLM_ADMIN)
    :param once: ask once, and fail unless every model answers: a readiness probe
    :param alive: ask once, and fail only if a restart may help: a liveness probe
    :param timeout: seconds for an answer
    """
    from hplm.server.control import Control
    from hplm.server.flags import SECRET_HEADER

    if once and alive:
        raise InvalidInput("give either --once or --alive")
    host, _, port = url.removeprefix("http://").rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise HplmError(f"--url {url} is not an address: give HOST:PORT, such as 127.0.0.1:8000")
    secret = os.environ.get("HPLM_ADMIN")
    control = Control(host, int(port), admin={SECRET_HEADER: secret} if secret else {})
    ask(control, url, models, once, alive, timeout)


def ask(
    control: Control, url: str, models: Sequence[str], once: bool, alive: bool, timeout: float, clock: Clock = time
) -> None:
    """Asks the models of a server once, or until one of them does not work."""
    from hplm.server.probing import ALIVE, READY, ModelState

    loaded = sorted(control.loaded()) if alive else []
    probes = _probes(control, url, models or loaded, parts=bool(models))
    if once or alive:
        for model, probe in probes.items():
            health = control.probe(model, probe, timeout)
            if health.state is ModelState.BUSY and alive:
                print(f"{model} is alive, and refuses requests: {health.reason}", file=sys.stdout)
            if health.state not in (ALIVE if alive else READY):
                help = "wait for it" if health.state in ALIVE else "restart the server"
                raise HplmError(f"model {model!r} does not work ({health.reason}): {help}")
        print(f"{len(probes)} models {'are alive' if alive else 'work'}", file=sys.stdout)
        return
    worked = dict.fromkeys(probes, clock.monotonic())
    while True:
        for model, probe in probes.items():
            health = control.probe(model, probe, timeout)
            if health.state is ModelState.SILENT:
                raise HplmError(f"model {model!r} gives {health.reason} within {timeout:g} s: restart the server")
            if health.state is not ModelState.BROKEN:
                worked[model] = clock.monotonic()
            if health.state is ModelState.UNLOADED or clock.monotonic() - worked[model] > timeout:
                raise HplmError(f"model {model!r} does not work ({health.reason}): restart the server")
            if health.state is ModelState.DEAD:
                if not control.revive(model):
                    raise HplmError(f"model {model!r} is dead ({health.reason}) and cannot be loaded again: restart the server")
                print(f"loaded {model} again, because its process had ended ({health.reason})", file=sys.stdout, flush=True)
            if health.state is ModelState.WORKS and health.reason:  # an error: it may have been loaded again with other inputs
                probes.update(_probes(control, url, [model]))
        clock.sleep(1)


def _probes(control: Control, url: str, models: Sequence[str], parts: bool = False) -> dict[str, Probe]:
    """Returns the probes of these models, with `parts` also of those that an ensemble consists of; without any, of all."""
    from http.client import HTTPException

    try:
        return control.probes(models or control.models(), parts)
    except (OSError, HTTPException) as error:
        raise HplmError(f"no server answers at {url} ({type(error).__name__}): start it, or name another with --url") from None


def drain(*, seconds: NotNegative = 25.0, notice: NotNegative = 5.0) -> None:
    """Prepare the server of this container for its end: nothing that it has taken is lost.

    First its probes fail, so that routers send no more requests. Then it refuses requests with [draining], and those that it
    holds are awaited.

    It is made for Kubernetes' preStop. Only a new server takes requests again. Where several servers run, HPLM_SERVER_ID names
    the one: set it to the same name for tritonserver and for this command.

    :param seconds: the most that answers may take
    :param notice: seconds for which only probes fail, so that routers notice
    """
    from hplm.server import inherited
    from hplm.server.held import running_servers, wait_until_idle

    server_id = inherited.given_id()
    servers = running_servers(server_id or "")
    if not servers:
        named = f" with HPLM_SERVER_ID {server_id!r}" if server_id else ""
        raise InvalidInput(f"no model of a server{named} runs here: run this in the server's container, as its user or as root")
    if len(servers) > 1:
        named = ", ".join(servers)
        raise InvalidInput(f"{len(servers)} servers run here ({named}): start each with an HPLM_SERVER_ID, and set it here too")
    inherited.start_to_leave(servers[0])
    time.sleep(notice)
    inherited.start_to_drain(servers[0])
    held = wait_until_idle(servers[0], time.monotonic() + seconds, by_all=os.geteuid() == 0)
    print(f"{held} requests are left" if held else "all requests are answered")
