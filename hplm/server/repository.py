"""Checks a model repository: a folder of model folders, each with a config.pbtxt."""

from __future__ import annotations

from pathlib import Path

from hplm.errors import HplmError


def model_names(repository: Path) -> list[str]:
    """Returns the models of a repository. Refuses folders with which Triton would start silently, but serve nothing."""
    make_one = f"make one with `hplm export --store DIR --repository {repository}`"
    if not repository.exists():
        raise HplmError(f"model repository {repository} does not exist: {make_one}")
    if not repository.is_dir():
        raise HplmError(f"model repository {repository} is not a directory: {make_one}")
    if (repository / "config.pbtxt").is_file():
        raise HplmError(
            f"model repository {repository} is the folder of a single model: give the folder above it, {repository.parent}"
        )
    names = sorted(config.parent.name for config in repository.glob("*/config.pbtxt"))
    if not names:
        raise HplmError(f"model repository {repository} contains no model (no folder with a config.pbtxt): {make_one}")
    return names
