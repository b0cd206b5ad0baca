"""Writes the `config.pbtxt` files of an exported backbone, commented and ready to be edited."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template
from typing import Any

import torch

from hplm.engine.settings import STAGES, check
from hplm.errors import InvalidInput
from hplm.generation.cache import least_tokens
from hplm.generation.settings import read_settings
from hplm.model.config import BackboneConfig
from hplm.options import LAYER_DTYPES
from hplm.parameters import Parameters, parameters_of, whole_number, yes_or_no
from hplm.scheduling import policy
from hplm.tenants.models import upper_of

ALIAS = "hplm"
CONFIGS = Path(__file__).with_name("configs")
MAX_TEXTS = 1024  # of one request; batches are bounded by the queue
OWN_OPTIONS = {"backbone", "device", "dtype", "auto_on_cpu"}  # parameters that no `--parameters` sets


@dataclass(frozen=True)
class ServingOptions:
    """The options of `hplm export`, most of which are parameters of the exported `config.pbtxt`."""

    dtype: str = "auto"
    auto_on_cpu: str = "auto"  # what `dtype` auto means on a CPU: int8, or auto for the best of the others
    auto_because: str = "not measured"
    device: str = "auto"
    policy: str = policy.DEFAULT
    admission: bool = True
    packing: str = "packed"
    commit_ms: str = "5"
    batch_ms: str = "50"
    slots: int = 256
    batch_tokens: int = 4096
    max_sequences: int = 32  # these six are a decoder's
    step_tokens: int = 256
    cache_tokens: int = 16_384
    kept_mb: int = 256
    queue_texts: int = 8192
    queue_mb: int = 1024
    threads: int = 0
    deadline_ms: str = "0"
    plot_hot: int = 0
    plot_preload: bool = False
    journal: str = ""

    def for_longest_text(self, config: BackboneConfig) -> ServingOptions:
        """Returns the options with batches that have room for an encoder's longest text, unless their size was chosen."""
        usual = ServingOptions.batch_tokens
        is_chosen = config.is_decoder or self.batch_tokens != usual
        return self if is_chosen else replace(self, batch_tokens=max(usual, config.positions))

    def with_parameters(self, given: Mapping[str, str], config: BackboneConfig) -> ServingOptions:
        """Returns the options with these parameters. Refuses those that the backbone's models do not have."""
        models = ("generate",) if config.is_decoder else ("lookup", "upper")
        known = {name for model in models for name in parameters_of(CONFIGS / f"{model}.pbtxt")} - OWN_OPTIONS
        if unknown := sorted(given.keys() - known):
            raise InvalidInput(f"--parameters {unknown[0]}={given[unknown[0]]}: give {', '.join(sorted(known))}")
        return replace(self, **{name: _typed(given, name, getattr(self, name)) for name in given})


def _typed(given: Mapping[str, str], name: str, usual: object) -> Any:
    if isinstance(usual, bool):
        return yes_or_no(given, name)
    return whole_number(given, name, least=0) if isinstance(usual, int) else given[name]


def template(name: str) -> str:
    """Returns a file of `configs`, where `$` stands before the name of a value."""
    return (CONFIGS / f"{name}.pbtxt").read_text("utf-8").rstrip("\n")


def check_options(config: BackboneConfig, options: ServingOptions) -> None:
    """Checks the options before anything is written, so that a bad one leaves the old export complete."""
    if config.name == ALIAS:
        raise InvalidInput(
            f"backbone {ALIAS!r}: the model that finds a tenant's backbone has this name; build with another --name"
        )
    if config.is_decoder:
        _check_generation(config, options)
        return
    check(_parameters(options))
    if options.batch_tokens < config.positions:
        raise InvalidInput(f"batch_tokens {options.batch_tokens}: give {config.positions} or more, for the longest text")


def _check_generation(config: BackboneConfig, options: ServingOptions) -> None:
    if options.dtype not in ("auto", *LAYER_DTYPES):
        raise InvalidInput(f"dtype {options.dtype!r} is not for decoders: choose auto, {' or '.join(LAYER_DTYPES)}")
    settings = read_settings(_parameters(options), torch.device("cpu"))  # only the server knows its devices
    least = least_tokens(config.positions)
    if settings.cache_tokens < least:
        raise InvalidInput(f"cache_tokens {settings.cache_tokens}: give {least} or more, for the longest text")


def write_configs(repository: Path, config: BackboneConfig, options: ServingOptions) -> None:
    tensors = {name: template(name) for name in ("answers", "prompts", "generated")}
    values = {**_parameters(options), "name": config.name, "max_texts": MAX_TEXTS, "more": "", **tensors}
    models = {ALIAS: "alias"}
    if config.is_decoder:
        models[config.name] = "generate"
    else:
        models |= {config.name: "ensemble", f"{config.name}-lookup": "lookup", upper_of(config.name): "upper"}
    _remove_admin(repository / f"{config.name}-admin")
    for model, kind in models.items():
        _write(repository / model, kind, values)


def write_upper(repository: Path, backbone: str, parameters: Parameters, stages: str) -> None:
    """Writes the model that computes a backbone of a group, with these parameters, and the model that calls it."""
    known = {*parameters_of(CONFIGS / "upper.pbtxt"), STAGES}
    others = {name: value for name, value in parameters.items() if name not in known} | ({STAGES: stages} if stages else {})
    more = "\n".join(f'parameters {{ key: "{name}"  value {{ string_value: "{value}" }} }}' for name, value in others.items())
    fixed = {"name": backbone, "max_texts": str(MAX_TEXTS), "answers": template("answers")}
    own = {**fixed, "auto_because": "the profiled precision", "more": more}
    _write(repository / upper_of(backbone), "upper", Parameters({**parameters, **own}))
    _write(repository / backbone, "ensemble", fixed)


def _write(folder: Path, kind: str, values: Mapping[str, object]) -> None:
    """Writes a model's configuration, whole or not at all."""
    (folder / "1").mkdir(parents=True, exist_ok=True)
    temporary = folder / "config.pbtxt.writing"
    temporary.write_text(Template(template(kind)).substitute(values).rstrip("\n") + "\n", "utf-8")
    temporary.rename(folder / "config.pbtxt")


def _parameters(options: ServingOptions) -> dict[str, str]:
    """Returns the options as strings, as `config.pbtxt` has them."""
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in vars(options).items()}


def is_of_decoder(config: str) -> bool:
    """Whether the text of a `config.pbtxt` is that of a decoder."""
    return 'backend: "hplm_generate"' in config


def _remove_admin(folder: Path) -> None:
    """Removes a model that exports of an earlier commit wrote. Its backend is gone, and a server would not start with it."""
    config = folder / "config.pbtxt"
    if config.is_file() and 'backend: "hplm_admin"' in config.read_text("utf-8"):  # else it is somebody's own model
        shutil.rmtree(folder)
