"""`hplm watch`: asks the models of a running server whether they work, and loads dead ones again."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hplm.clock import Clock
from hplm.errors import HplmError

if TYPE_CHECKING:
    from hplm.server.control import Control
    from hplm.server.probing import Probe


def register(commands) -> None:
    watch = commands.add_parser(
        "watch",
        help="ask the models of a server that somebody else has started whether they work",
        description="Ask every model of a running server for an answer, each second, because Triton calls a model ready whose "
        "process is dead. Such a model is loaded again, which needs the secret of Triton's restricted APIs in HPLM_ADMIN. The "
        "command ends with an error when that fails, and when the server does not answer. `hplm serve` does all this itself, "
        "and restarts the server where requests were lost.",
    )
    watch.add_argument("--url", default="127.0.0.1:8000", metavar="HOST:PORT", help="HTTP address (default: %(default)s)")
    watch.add_argument("--models", nargs="+", metavar="MODEL", help="the models to ask (default: all; that needs HPLM_ADMIN)")
    once = watch.add_mutually_exclusive_group()
    once.add_argument("--once", action="store_true", help="ask once, and fail unless every model answers: a readiness probe")
    once.add_argument("--alive", action="store_true", help="ask once, and fail only if a restart may help: a liveness probe")
    watch.add_argument("--timeout", type=float, default=15.0, metavar="SECONDS", help="for an answer (default: %(default)g)")
    watch.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from hplm.server.control import Control
    from hplm.server.flags import SECRET_HEADER

    host, _, port = args.url.rpartition(":")
    if not host or not port.isdigit():
        raise HplmError(f"--url {args.url} is not an address: give HOST:PORT, such as 127.0.0.1:8000")
    secret = os.environ.get("HPLM_ADMIN")
    watch(Control(host, int(port), admin={SECRET_HEADER: secret} if secret else {}), args)


def watch(control: Control, args: argparse.Namespace, clock: Clock = time) -> None:
    """Asks the models of a server once, or until one of them does not work."""
    from hplm.server.probing import ALIVE, READY, State

    loaded = sorted(control.loaded()) if args.alive else []
    probes = _probes(control, args.url, args.models or loaded)
    if args.once or args.alive:
        for model, probe in probes.items():
            health = control.probe(model, probe, args.timeout)
            if health.state not in (ALIVE if args.alive else READY):
                help = "wait for it" if health.state in ALIVE else "restart the server"
                raise HplmError(f"model {model!r} does not work ({health.said}): {help}")
        print(f"{len(probes)} models {'are alive' if args.alive else 'work'}", file=sys.stdout)
        return
    worked = dict.fromkeys(probes, clock.monotonic())
    while True:
        for model, probe in probes.items():
            health = control.probe(model, probe, args.timeout)
            if health.state is State.SILENT:
                raise HplmError(f"model {model!r} gives {health.said} within {args.timeout:g} s: restart the server")
            if health.state is not State.BROKEN:
                worked[model] = clock.monotonic()
            elif clock.monotonic() - worked[model] > args.timeout:
                raise HplmError(f"model {model!r} does not work ({health.said}): restart the server")
            if health.state is State.UNLOADED:
                raise HplmError(f"model {model!r} does not work ({health.said}): restart the server")
            if health.state is State.DEAD:
                if not control.revive(model):
                    raise HplmError(f"model {model!r} is dead ({health.said}) and cannot be loaded again: restart the server")
                print(f"loaded {model} again, because its process had ended ({health.said})", file=sys.stdout, flush=True)
            if health.state is State.WORKS and health.said:  # an error: it may have been loaded again with other inputs
                probes.update(_probes(control, args.url, [model]))
        clock.sleep(1)


def _probes(control: Control, url: str, models: Sequence[str]) -> dict[str, Probe]:
    """Returns the probes of these models; without any, of all."""
    from http.client import HTTPException

    try:
        return control.probes(models or control.models())
    except (OSError, HTTPException) as error:
        raise HplmError(f"no server answers at {url} ({type(error).__name__}): start it, or name another with --url") from None
