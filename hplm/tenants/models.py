"""The names of the models that serve a backbone of encoders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hplm.errors import InvalidInput


def upper_of(backbone: str) -> str:
    """Returns the name of the model that computes a backbone."""
    return f"{backbone}-upper"


def upper_config(repository: Path, backbone: str) -> Path:
    """Returns the `config.pbtxt` of the model that computes a backbone."""
    return repository / upper_of(backbone) / "config.pbtxt"


def has_output(model: Path, name: str) -> bool:
    """Whether a model has an output, by its `config.pbtxt`: an earlier release may have exported it."""
    config = model / "config.pbtxt"
    return not config.is_file() or f'"{name}"' in config.read_text("utf-8")


def backbone_of(parameters: Mapping[str, str]) -> str:
    """Returns the backbone that an upper model with these parameters computes."""
    several = parameters.get("backbones")
    if several is not None:
        raise InvalidInput(
            f"parameter 'backbones' is {several!r}, but each backbone needs an upper model of its own: write the repository "
            "again with `hplm place emit`"
        )
    return parameters["backbone"]
