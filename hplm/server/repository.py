"""A model repository as Triton understands one: a folder of model folders, each with its config.pbtxt."""

from __future__ import annotations

from pathlib import Path

from hplm.errors import HplmError


def model_names(repository: Path) -> list[str]:
    """The models in it; refuses what Triton would start on without a word and then serve nothing."""
    make_one = f"make one with `hplm export --store DIR --repository {repository}`"
    if not repository.exists():
        raise HplmError(f"model repository {repository}: no such directory; {make_one}")
    if not repository.is_dir():
        raise HplmError(f"model repository {repository}: not a directory; {make_one}")
    if (repository / "config.pbtxt").is_file():
        raise HplmError(
            f"model repository {repository}: this is the folder of one model; name the folder above it, {repository.parent}"
        )
    names = sorted(config.parent.name for config in repository.glob("*/config.pbtxt"))
    if not names:
        raise HplmError(f"model repository {repository}: holds no model (no folder with a config.pbtxt); {make_one}")
    return names
