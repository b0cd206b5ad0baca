"""An exported backbone: everything under `model_repository/<backbone>/1`, opened by whoever serves a part of it."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from safetensors.torch import load_file

from hplm.adapters.bank import Bank
from hplm.model.config import BackboneConfig
from hplm.model.stacks import UpperStack
from hplm.model.tokenizer import Tokenizer
from hplm.plot.forest import Forest
from hplm.tenants.snapshot import Snapshot


class Backbone:
    CONFIG = "backbone.json"
    TOKENIZER = "tokenizer.json"
    UPPER = "upper.safetensors"
    TENANTS = "tenants.json"
    TABLES = "plot"
    BANKS = "adapters"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = BackboneConfig.load(folder / self.CONFIG)
        self.snapshot = Snapshot.load(folder / self.TENANTS)

    @cached_property
    def forest(self) -> Forest:
        return Forest(self.folder / self.TABLES, self.snapshot.branches)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer((self.folder / self.TOKENIZER).read_text("utf-8"), self.config.positions)

    def upper(self) -> UpperStack:
        upper = UpperStack(self.config)
        upper.load_state_dict(load_file(self.folder / self.UPPER))
        return upper

    def bank(self, name: str) -> Bank:
        return Bank(self.folder / self.BANKS / name)
