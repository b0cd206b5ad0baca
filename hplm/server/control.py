"""HTTP calls to a running server: whether it is ready, what its models say to a probe, and loading and unloading them."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Collection, Mapping
from typing import Any

from hplm.errors import HplmError, shortened
from hplm.server import probing
from hplm.server.probing import Health, ModelState, Probe

_READY = "READY"
_LIVE = {_READY, "LOADING", "UNLOADING"}
_ENSEMBLE = "ensemble"
REVIVED = "hplm_revived"  # parameter of a model's configuration: how often its process was started again
_LOADING_SECONDS = 120.0


class Control:
    """`admin` is the header that opens the restricted APIs."""

    def __init__(self, host: str, http_port: int, admin: Mapping[str, str]) -> None:
        self._host, self._port = host, http_port
        self._headers = {**admin, "Connection": "close"}

    def ready(self) -> bool:
        """Whether every model is loaded."""
        try:
            return self._ask("GET", "/v2/health/ready")[0] == 200
        except (OSError, http.client.HTTPException):  # it does not listen yet
            return False

    def models(self) -> list[str]:
        """Returns the models that the server has loaded, or should have."""
        index = self._index()
        if not index:
            raise HplmError("the server does not say which models it has: set HPLM_ADMIN to its secret, or name the models")
        return [model["name"] for model in index]

    def loaded(self) -> set[str]:
        """Returns the models that are ready by Triton's word; none if it does not say."""
        try:
            return {model["name"] for model in self._index() if model.get("state") == _READY}
        except (OSError, http.client.HTTPException):
            return set()

    def probes(self, models: Collection[str], parts: bool = False) -> dict[str, Probe]:
        """Returns the probe of each model, all of which are loaded. Ensembles have none: they are what their models are.

        `parts`: returns the probes of these models too.
        """
        found: dict[str, Probe] = {}
        for model in models:
            config = self.config(model)
            if config.get("platform") != _ENSEMBLE:
                found[model] = probing.probe_of(config)
            elif parts:
                found |= self.probes([step["model_name"] for step in config["ensemble_scheduling"]["step"]])
        return found

    def probe(self, model: str, probe: Probe, timeout: float) -> Health:
        try:
            return probing.health(*self._ask("POST", f"/v2/models/{model}/{probe.path}", probe.body, timeout))
        except (OSError, http.client.HTTPException) as error:
            return Health(ModelState.SILENT, f"no answer ({type(error).__name__})")

    def config(self, model: str) -> dict[str, Any]:
        status, answer = self._ask("GET", f"/v2/models/{model}/config")
        if status != 200:
            said = shortened(answer.decode(errors="replace"))
            raise HplmError(f"the configuration of model {model!r} cannot be read ({status}: {said}): load the model")
        return json.loads(answer)

    def revive(self, model: str) -> bool:
        """Loads a model whose process is dead. Other models and ensembles stay as they are. Returns whether it is loaded.

        Triton loads a model again only if its configuration differs from the one that it has, so that counts the revivals.
        """
        try:
            config = self.config(model)
            parameters = dict(config.get("parameters", {}))
            before = int(parameters.get(REVIVED, {}).get("string_value", "0"))
            parameters[REVIVED] = {"string_value": str(before + 1)}
            body = json.dumps({"parameters": {"config": json.dumps({**config, "parameters": parameters})}})
            path = f"/v2/repository/models/{model}/load"
            return self._ask("POST", path, body.encode(), _LOADING_SECONDS)[0] == 200
        except (HplmError, OSError, http.client.HTTPException):
            return False

    def drain(self, deadline: float, keep: Collection[str] = ()) -> None:
        """Unloads the models, except `keep` and the ensembles over them. Each finishes its requests and takes no new ones."""
        left: set[str] | None = None
        while left != set() and time.monotonic() < deadline:
            try:
                live = {model["name"] for model in self._index() if model.get("state") in _LIVE}
                if left is None:
                    going = {model for model in live - set(keep) if not (keep and self._is_ensemble(model))}
                    for model in going:
                        self._ask("POST", f"/v2/repository/models/{model}/unload", b"{}")
                    left = going
                else:
                    left &= live
            except TimeoutError:  # the machine is busy
                continue
            except (OSError, http.client.HTTPException):  # the server died; the caller kills what is left
                return
            time.sleep(0.05)

    def _is_ensemble(self, model: str) -> bool:
        try:
            return self.config(model).get("platform") == _ENSEMBLE
        except HplmError:  # it is just being loaded or unloaded
            return False

    def _index(self) -> list[dict[str, Any]]:
        """Returns what the server says about its models; nothing if it does not tell us."""
        status, index = self._ask("POST", "/v2/repository/index", b"{}")
        return json.loads(index) if status == 200 else []

    def _ask(self, method: str, path: str, body: bytes | None = None, timeout: float = 5.0) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        try:
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()
