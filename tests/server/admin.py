"""Remote management: commands to the model that changes tenants."""

import base64
import json

import numpy as np
import tritonclient.http
from safetensors.torch import save

from testing.random_store import random_weights
from tests.support.servers import ADMIN_KEY


class Admin:
    def __init__(self, server, key=ADMIN_KEY, backbone="toy"):
        self._model, self._config = f"{backbone}-admin", server.built.stores[backbone].config
        self._client = tritonclient.http.InferenceServerClient(server.http_url)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def __call__(self, command, **given):
        tensor = tritonclient.http.InferInput("COMMAND", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([json.dumps({"command": command, **given}).encode()], dtype=object))
        return json.loads(self._client.infer(self._model, [tensor], headers=self._headers).as_numpy("ANSWER")[0])

    def trained(self, tenant, seed=7):
        """Returns what a client sends to add a tenant that it has trained itself."""
        adapter, head = random_weights(self._config, tenant, 0.3, seed)
        tensors = {f"head.{key}": value.contiguous() for key, value in head.items()}
        tensors |= {f"adapter.{i}.{key}": value.contiguous() for i, layer in enumerate(adapter) for key, value in layer.items()}
        given = {name: getattr(tenant, name) for name in ("id", "domain", "domain_version", "task", "labels")}
        kind = {"kind": tenant.adapter, "rank": tenant.rank, "places": tenant.places}
        return {**given, "adapter": kind, "tensors": base64.b64encode(save(tensors)).decode()}
