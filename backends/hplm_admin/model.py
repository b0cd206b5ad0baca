"""Triton's side of management: takes a JSON command and returns a JSON answer. Every request needs the admin key."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

from backends import replies
from hplm.errors import InvalidInput, NoTenant
from hplm.model.config import BackboneConfig
from hplm.tenants.commands import Commands
from hplm.tenants.keys import allows, key_of, presented_key
from hplm.tenants.manager import Manager


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        folder = Path(args["model_repository"]).parent / replies.model_parameters(args)["backbone"] / "1"
        state, secret = replies.state_folder([folder]), os.environ.get("HPLM_ADMIN_KEY", "").strip()
        if state is None or not secret:
            raise InvalidInput(
                f"model {args['model_name']!r} changes what is served, so it needs a state (hplm serve --state, HPLM_STATE) "
                "and a key (HPLM_ADMIN_KEY): set both, or remove its folder from the repository"
            )
        self._keys = (key_of(secret),)
        self._commands = Commands(Manager(folder, state), BackboneConfig.load(folder / "backbone.json"))

    def execute(self, requests: list[pb_utils.InferenceRequest]) -> list[pb_utils.InferenceResponse]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: pb_utils.InferenceRequest) -> pb_utils.InferenceResponse:
        try:
            replies.refuse_while_draining()
            parameters = replies.request_parameters(request)
            if replies.is_probe(parameters):
                return _answer("{}")
            if not allows(self._keys, presented_key(parameters), time.time()):
                raise NoTenant
            commands = replies.required(request, "COMMAND").as_numpy().reshape(-1)
            if len(commands) != 1:
                raise InvalidInput(f"the request has {len(commands)} commands: send one at a time")
            return _answer(self._commands.run(commands[0].decode("utf-8", "replace")))
        except Exception as error:
            return replies.failure(error, "the command")


def _answer(answer: str) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse([replies.tensor("ANSWER", np.array([answer.encode()], dtype=object))])
