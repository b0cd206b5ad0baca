"""Triton's side of management: takes a JSON command and returns a JSON answer. Every request needs the admin key."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np

from backends import replies
from backends.replies import InferenceRequest
from hplm.errors import Draining, InvalidInput, NoTenant, QueueFull
from hplm.model.config import BackboneConfig
from hplm.request.answers import Outputs
from hplm.tenants.commands import Commands
from hplm.tenants.keys import allows, by_digest, key_of, presented_key
from hplm.tenants.manager import Manager
from hplm.threads import Threads

WAITING = 64  # the most commands that wait for others


class TritonPythonModel(replies.BackendModel):
    """A command may take minutes, and probes must not wait for it. So a thread runs the commands, one after the other."""

    doing = "the command"

    def initialize(self, args: dict[str, str]) -> None:
        super().initialize(args)
        state, secret = self._state, os.environ.get("HPLM_ADMIN_KEY", "").strip()
        if state is None or not secret:
            raise InvalidInput(
                f"model {self._name!r} changes what is served, so it needs a state (hplm serve --state, HPLM_STATE) "
                "and a key (HPLM_ADMIN_KEY): set both, or remove its folder from the repository"
            )
        self._keys = by_digest([key_of(secret)])
        self._commands = Commands(Manager(self._folder, state), BackboneConfig.load(self._folder / "backbone.json"))
        self._closing = threading.Event()
        self._waiting = Threads(self._run, "commands")

    def _well(self, request: InferenceRequest) -> Outputs:
        return _outputs("{}")

    def _take(self, request: InferenceRequest, given: dict[str, Any], sender: replies.Sender, received_ns: int) -> None:
        if not allows(self._keys, presented_key(given), time.time()):
            raise NoTenant(
                "the admin key is missing or wrong: send the header 'authorization: Bearer KEY', where KEY is the server's "
                "HPLM_ADMIN_KEY; a proxy may not forward it"
            )
        commands = replies.required(replies.inputs_of(request), "COMMAND").as_numpy().reshape(-1)
        if len(commands) != 1:
            raise InvalidInput(f"the request has {len(commands)} commands: send one at a time")
        if len(self._waiting) >= WAITING:
            raise QueueFull(f"{WAITING} commands wait already: send this one when some are answered")
        self._waiting.put((sender, commands[0].decode("utf-8", "replace")))

    def _run(self, waiting: tuple[replies.Sender, str]) -> None:
        sender, command = waiting
        try:
            if self._closing.is_set():
                raise Draining("the model is being unloaded, and the command was not run: send it again to another server")
            outputs = _outputs(self._commands.run(command))
        except Exception as error:
            sender.send(replies.failure(error, self.doing))
        else:
            sender.send_answer(outputs)

    def finalize(self) -> None:
        """Returns when all are answered. Triton waits for them before it unloads a model; those that still wait are refused."""
        self._closing.set()
        self._waiting.close()
        super().finalize()


def _outputs(answer: str) -> Outputs:
    return {"ANSWER": np.array([answer.encode()], dtype=object)}
