"""Changes the text of a `config.pbtxt` that an export wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hplm.engine.settings import STAGES
from hplm.errors import InvalidInput
from hplm.tenants.models import BACKBONES, upper_name


def with_parameters(config: str, values: Mapping[str, str]) -> str:
    """Returns the text of a `config.pbtxt` with other values of parameters that it has."""
    for name, value in values.items():
        config, found = re.subn(rf'(key:\s*"{name}"\s*value\s*{{\s*string_value:\s*)"[^"]*"', rf'\g<1>"{value}"', config)
        if not found:
            raise InvalidInput(f"parameter {name!r} is missing in config.pbtxt: export the repository again")
    return config


def with_stages(config: str, stages: str) -> str:
    """Returns the text of an engine's `config.pbtxt` with these stages. An export has no such parameter."""
    if re.search(rf'key:\s*"{STAGES}"', config):
        return with_parameters(config, {STAGES: stages})
    line = f'parameters {{ key: "{STAGES}"        value {{ string_value: "{stages}" }} }}  # the layers on each device\n'
    return config + line if stages else config


def with_backbones(config: str, backbones: Sequence[str]) -> str:
    """Returns the text of an upper model's `config.pbtxt` with these backbones, and with the name that it has for them.

    What an export has measured of one backbone is not said of several.
    """
    found = re.search(r'^name: "([^"]+)"', config, re.MULTILINE)
    if found is None:
        raise InvalidInput("the name is missing in config.pbtxt: export the repository again")
    key = "backbone" if len(backbones) == 1 else BACKBONES
    named = rf'\g<1>{key}\2"{" ".join(backbones)}"'
    config = re.sub(rf'^(# |name: "){re.escape(found[1])}\b', rf"\g<1>{upper_name(backbones)}", config, flags=re.MULTILINE)
    if len(backbones) > 1:
        config = re.sub(r"^# At the export: .*\n", "", config, flags=re.MULTILINE)
    return re.sub(r'(key:\s*")backbones?("\s*value\s*{\s*string_value:\s*)"[^"]*"', named, config)


def with_upper(config: str, upper: str) -> str:
    """Returns the text of an ensemble's `config.pbtxt` whose texts are computed by this model."""
    return re.sub(r'(model_name:\s*)"[^"]*-upper"', rf'\1"{upper}"', config)
