"""Keeps a server serving: asks its models once a second, and starts again what has ended.

A model whose process is dead is loaded again while the others serve. But Triton never answers what the dead process held. If it
held any requests, the whole server is started again: closed connections are an answer too.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from hplm.clock import Clock
from hplm.errors import HplmError
from hplm.server import process_group
from hplm.server.held import Holder, holders
from hplm.server.probing import ModelState, Probe
from hplm.server.process import SOON_SECONDS, longer, restarting
from hplm.server.stubs import make_private, regions, stubs
from hplm.server.triton import TritonServer

LOOK_SECONDS = 1.0  # between two looks
PROBE_SECONDS = 5.0  # for an answer: a busy machine may take long
SILENT_SECONDS = 15.0  # a model that says nothing, or that it is broken, for so long does not recover


@dataclass(eq=False)
class Supervisor:
    """Supervises a server that has started."""

    server: TritonServer
    say: Callable[[str], None]
    look_s: float = LOOK_SECONDS
    probe_s: float = PROBE_SECONDS
    clock: Clock = time

    def __post_init__(self) -> None:
        self._pause = 0.0
        self._begin()

    def look(self) -> None:
        """Looks at the server once, and mends what it finds. Takes a second if the server is well."""
        code = self.server.wait(self.look_s)
        if code is not None:
            self._restart(f"tritonserver ended with {process_group.reason(code)}")
            return
        for holder in self._gone():  # Triton answers probes of a dead model late, behind the requests that it fails one by one
            if holder.may_have_lost:
                self._restart(_lost(holder))
                return
        make_private(self.server.id)  # also those of models that were loaded meanwhile
        self._take_models()
        if not self._models and self.clock.monotonic() - self._since > SILENT_SECONDS:
            self._restart(f"the server has not said for {SILENT_SECONDS:g} s which models it has")
            return
        for model, probe in list(self._probes.items()):
            why = self._ask(model, probe)
            if why is not None:
                self._restart(why)
                return
            if self.server.wait(0) is not None:
                return

    def _ask(self, model: str, probe: Probe) -> str | None:
        """Asks a model, and loads it again if its process has ended. Returns why the server must be started again instead."""
        health = self._control.probe(model, probe, self.probe_s)
        if health.state not in (ModelState.SILENT, ModelState.BROKEN):
            self._heard[model] = self.clock.monotonic()
        if health.state is ModelState.WORKS and health.reason:  # an error: it may have been loaded again with other inputs
            self._models.discard(model)
        is_gone = health.state is ModelState.SILENT and model in (holder.model for holder in self._gone())
        if health.state is ModelState.DEAD or is_gone:
            return self._revive(model, health.reason)
        if self.clock.monotonic() - self._heard[model] > SILENT_SECONDS:
            return f"model {model!r} has not worked for {SILENT_SECONDS:g} s ({health.reason})"
        return None

    def _begin(self) -> None:
        """Takes the models of a server that has just started."""
        self._since = self.clock.monotonic()
        self._control = self.server.control()
        self._models: set[str] = set()
        self._probes: dict[str, Probe] = {}
        self._heard: dict[str, float] = {}
        self._take_models()

    def _take_models(self) -> None:
        """Asks all loaded models from now on. Some are loaded while the server serves."""
        for model in sorted(self._control.loaded() - self._models):
            with suppress(HplmError, OSError, http.client.HTTPException):  # just unloaded, or the server is busy
                probes = self._control.probes([model])
                self._models.add(model)
                self._probes.update(probes)
                self._heard.update(dict.fromkeys(probes, self.clock.monotonic()))

    def _revive(self, model: str, why: str) -> str | None:
        """Loads a model again whose process has ended. Returns why the server must be started again instead."""
        for stub in stubs(self.server.group):
            if stub.model == model:  # so that it holds no requests which Triton has given up: it may only have been stopped
                process_group.kill_one(stub.pid)
        gone = [holder for holder in self._gone() if holder.model == model]
        lost = [holder for holder in gone if holder.may_have_lost]
        for region in set(regions(self.server.id)) - {stub.region for stub in stubs(self.server.group)}:
            region.unlink(missing_ok=True)  # of dead processes
        if lost:
            return _lost(lost[0])
        for holder in gone:
            holder.path.unlink(missing_ok=True)
        if not self._load(model):
            return f"model {model!r} ended and cannot be loaded again ({why})"
        self.say(f"loaded        {model} again, because its process had ended ({why})")
        return None

    def _load(self, model: str) -> bool:
        """Replaces the process of a model. Returns whether it works."""
        loaded = self._control.revive(model)
        self._heard[model] = self.clock.monotonic()
        return loaded

    def _gone(self) -> list[Holder]:
        """Returns what is known of model processes that have ended without being told to."""
        alive = process_group.members(self.server.group)
        return [holder for holder in holders(self.server.id) if holder.pid not in alive]

    def _restart(self, why: str) -> None:
        """Starts the server again, as often as it takes."""
        began = self.clock.monotonic()
        self._pause = longer(self._pause) if began - self._since < SOON_SECONDS else 0.0
        while True:
            self.say(restarting(why, self._pause))
            self.clock.sleep(self._pause)
            try:
                self.server.start_again()
                self._begin()
                break
            except (HplmError, OSError, http.client.HTTPException) as error:
                why, self._pause = str(error), longer(self._pause)
        self.say(f"Ready again after {self.clock.monotonic() - began:.1f} s (restart {self.server.restarts}).")


def _lost(holder: Holder) -> str:
    when = f"while it held {holder.held} requests" if holder.held else "just after an answer, which may be lost"
    return f"model {holder.model!r} ended {when}"
