"""Triton's side of management: takes a JSON command and returns a JSON answer. Every request needs the admin key."""

from __future__ import annotations

import os
import queue
import threading
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from backends import replies
from hplm.arrays import Array
from hplm.engine.threads import repeat
from hplm.errors import Draining, InvalidInput, NoTenant, QueueFull
from hplm.model.config import BackboneConfig
from hplm.server.held import Held
from hplm.tenants.commands import Commands
from hplm.tenants.keys import allows, key_of, presented_key
from hplm.tenants.manager import Manager

DOING = "the command"  # what has failed, for exceptions that nobody expected
WAITING = 64  # the most commands that wait for others


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        folder = Path(args["model_repository"]).parent / replies.model_parameters(args)["backbone"] / "1"
        state, secret = replies.given_state(), os.environ.get("HPLM_ADMIN_KEY", "").strip()
        if state is None or not secret:
            raise InvalidInput(
                f"model {args['model_name']!r} changes what is served, so it needs a state (hplm serve --state, HPLM_STATE) "
                "and a key (HPLM_ADMIN_KEY): set both, or remove its folder from the repository"
            )
        self._keys = (key_of(secret),)
        self._commands = Commands(Manager(folder, state), BackboneConfig.load(folder / "backbone.json"))
        self._held = Held(args["model_name"])
        self._refusals = replies.Refusals(DOING)
        self._waiting: queue.Queue[tuple[replies.Sender, str] | None] = queue.Queue(WAITING)
        self._closing = threading.Event()
        self._running = repeat(self._run_next, "commands")

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[None]:
        """Takes the requests and returns at once: a command may take minutes, and probes must not wait for it.

        Each is answered once, later, through its own sender.
        """
        for request in requests:
            sender = replies.Sender(request, self._held)
            try:
                self._take(request, sender)
            except Exception as error:
                self._refusals.put(sender, error)
        return [None] * len(requests)

    def _take(self, request: pb_utils.InferenceRequest, sender: replies.Sender) -> None:
        parameters = replies.taken(request, sender)
        if sender.is_probe:
            replies.send_outputs(sender, _outputs("{}"))
            return
        if not allows(self._keys, presented_key(parameters), time.time()):
            raise NoTenant(
                "the admin key is missing or wrong: send the header 'authorization: Bearer KEY', where KEY is the server's "
                "HPLM_ADMIN_KEY; a proxy may not forward it"
            )
        commands = replies.required(replies.inputs_of(request), "COMMAND").as_numpy().reshape(-1)
        if len(commands) != 1:
            raise InvalidInput(f"the request has {len(commands)} commands: send one at a time")
        try:
            self._waiting.put_nowait((sender, commands[0].decode("utf-8", "replace")))
        except queue.Full:
            raise QueueFull(f"{WAITING} commands wait already: send this one when some are answered") from None

    def _run_next(self) -> bool:
        """Returns False when the model is unloaded."""
        taken = self._waiting.get()
        if taken is None:
            return False
        sender, command = taken
        try:
            if self._closing.is_set():
                raise Draining("the model is being unloaded, and the command was not run: send it again to another server")
            outputs = _outputs(self._commands.run(command))
        except Exception as error:
            sender.send(replies.failure(error, DOING))
        else:
            replies.send_outputs(sender, outputs)
        return True

    def finalize(self) -> None:
        """Returns when all are answered. Triton waits for them before it unloads a model; those that still wait are refused."""
        self._closing.set()
        self._waiting.put(None)
        self._running.join()
        self._refusals.close()
        self._held.close()


def _outputs(answer: str) -> dict[str, Array]:
    return {"ANSWER": np.array([answer.encode()], dtype=object)}
