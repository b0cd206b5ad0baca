"""How a router asks a replica whether it works: an inference through each public model of its repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hplm.errors import InvalidInput
from hplm.server.probing import Probe, probe_of
from hplm.server.repository import model_names
from hplm.tenants.state import EXPORTED_TENANTS

ALIAS = "hplm"
_TEXT = {"data_type": "TYPE_STRING", "dims": [1]}
_ENCODER: dict[str, Any] = {"max_batch_size": 1, "input": [{"name": "TEXT", **_TEXT}]}
_DECODER: dict[str, Any] = {"model_transaction_policy": {"decoupled": True}, "input": [{"name": "text_input", **_TEXT}]}


def probes_of(repository: Path) -> dict[str, Probe]:
    """Returns the probe of each backbone, and of the model that finds the backbones of tenants."""
    models = model_names(repository)
    backbones = [model for model in models if (repository / model / "1" / EXPORTED_TENANTS).is_file()]
    if not backbones:
        raise InvalidInput(f"{repository} contains no backbone: export one with `hplm export`")
    public = backbones + [ALIAS] * (ALIAS in models)
    configs = {model: (repository / model / "config.pbtxt").read_text("utf-8") for model in public}
    return {model: probe_of(_DECODER if "decoupled: true" in config else _ENCODER) for model, config in configs.items()}
