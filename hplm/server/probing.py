"""Asks every model for an answer, because Triton calls a model ready whose process is dead.

A probe is the smallest request that a model's configuration allows, with the parameter `hplm_probe`. Our models say by it
whether they work, without a tenant and without counting it. Of other models, any answer of their own is good.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hplm.errors import Broken, Draining, Internal, error_in

PROBE = "hplm_probe"
_TYPES = {"TYPE_STRING": "BYTES", "TYPE_BOOL": "BOOL"}  # the names of others differ from those on the wire only in the prefix
_ZEROS: dict[str, object] = {"BYTES": "", "BOOL": False}
_UNHEALTHY = ("Stub process", "stub process", "is not healthy")  # as Triton says that a model's process is dead
_UNLOADED = ("no available versions", "unknown model", "is not ready", "not found")


class ModelState(enum.Enum):
    WORKS = "works"
    BUSY = "busy"  # its own answer is an error that passes
    BROKEN = "broken"  # it says itself that it answers no request
    DEAD = "dead"  # its process has ended
    UNLOADED = "unloaded"
    SILENT = "silent"  # no answer


READY = frozenset({ModelState.WORKS})
ALIVE = frozenset({ModelState.WORKS, ModelState.BUSY})  # a restart would gain nothing


@dataclass(frozen=True)
class Health:
    state: ModelState
    reason: str = ""


@dataclass(frozen=True)
class Probe:
    path: str  # below the model's
    body: bytes


def probe_of(config: Mapping[str, Any]) -> Probe:
    """Returns the probe of a model with this configuration. Triton takes no `infer` over HTTP for a decoupled model."""
    if config.get("model_transaction_policy", {}).get("decoupled"):
        values = {tensor["name"]: tensor["data"][0] for tensor in _inputs(config)}
        return Probe("generate", json.dumps({PROBE: True, **values}).encode())
    return Probe("infer", json.dumps({"parameters": {PROBE: True}, "inputs": _inputs(config)}).encode())


def _inputs(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the required inputs with the least values. If none is required, the first one: a request has an input."""
    batched = config.get("max_batch_size", 0) > 0
    inputs: list[dict[str, Any]] = []
    all: list[dict[str, Any]] = config.get("input", [])
    for tensor in [tensor for tensor in all if not tensor.get("optional")] or all[:1]:
        shape = [1] * batched + [max(1, int(size)) for size in tensor["dims"]]
        wanted: str = tensor["data_type"]
        datatype = _TYPES.get(wanted, wanted.removeprefix("TYPE_"))
        values = [_ZEROS.get(datatype, 0)] * math.prod(shape)
        inputs.append({"name": tensor["name"], "shape": shape, "datatype": datatype, "data": values})
    return inputs


def health(status: int, answer: bytes) -> Health:
    """Returns what the answer to a probe means."""
    if status == 200:
        return Health(ModelState.WORKS)
    reason = _error(answer)
    if any(words in reason for words in _UNLOADED):
        return Health(ModelState.UNLOADED, reason)
    if not reason or any(words in reason for words in _UNHEALTHY):
        return Health(ModelState.DEAD, reason or f"status {status} without a word")
    if error_in(reason) in (Broken, Internal):
        return Health(ModelState.BROKEN, reason)
    passes = status == 503 or error_in(reason) is Draining  # Triton's `generate` has one status for all errors
    return Health(ModelState.BUSY if passes else ModelState.WORKS, reason)


def _error(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["error"])
    except (ValueError, KeyError, TypeError):
        return ""
