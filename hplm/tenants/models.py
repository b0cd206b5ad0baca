"""The names of the models that serve a backbone of encoders, as far as they may differ.

An upper model computes one backbone, or a group of backbones that share its devices. It has their names, with a sign between
them that no name has: `law-upper` computes `law`, and `law+medicine-upper` both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hplm.errors import InvalidInput
from hplm.tenants.snapshot import NAME

BACKBONES = "backbones"  # a parameter that is only there where an upper model computes several
_JOINED, _UPPER = "+", "-upper"


def upper_name(backbones: Sequence[str]) -> str:
    """Returns the name of the model that computes these backbones."""
    return _JOINED.join(backbones) + _UPPER


def upper_of(repository: Path, backbone: str) -> str:
    """Returns the name of the model that computes a backbone: its own one, unless only a group has it."""
    own = upper_name([backbone])
    if (repository / own).is_dir():
        return own
    groups = sorted(path.name for path in repository.glob(f"*{_JOINED}*{_UPPER}"))
    return next((name for name in groups if backbone in name.removesuffix(_UPPER).split(_JOINED)), own)


def upper_config(repository: Path, backbone: str) -> Path:
    """Returns the `config.pbtxt` of the model that computes a backbone."""
    return repository / upper_of(repository, backbone) / "config.pbtxt"


def backbones_of(parameters: Mapping[str, str]) -> list[str]:
    """Returns the backbones that an upper model with these parameters computes."""
    names = parameters.get(BACKBONES, "").split() or [parameters["backbone"]]
    wrong = next((name for name in names if not NAME.fullmatch(name) or names.count(name) > 1), None)
    if wrong is not None:
        given = " ".join(names)
        raise InvalidInput(f"parameter {BACKBONES!r} is {given!r}: name each backbone once, with a space between them")
    return names
