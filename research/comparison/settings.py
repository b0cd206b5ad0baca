"""The settings of a comparison, which its numbers share."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import numpy as np

from bench.machine import machine
from bench.rows import expect_text
from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig
from hplm.scheduling.simulation.arrivals import Arrivals
from loadtest.traffic import Mix, burst, lengths_of, steady, until
from research.comparison.schemes import COMPARED
from research.options import SEVERAL, expect_numbers_above_zero
from testing.random_store import SIZES

Scenario = Literal["saturate", "slowdown", "steady", "burst"]
CLOSED = ("saturate", "slowdown")  # a client waits for an answer before it sends the next request
DISTINCT = 4096  # different requests of `saturate`, more than are sent
OPEN_CONNECTIONS = 512  # in scenarios that do not wait for answers


@dataclass(frozen=True)
class Comparison:
    scenario: Scenario = "saturate"
    "How requests arrive."
    size: Literal["minilm", "bert-base", "toy"] = "bert-base"
    "Size of the model."
    tenants: Annotated[tuple[int, ...], SEVERAL] = (1, 10, 100, 1000)
    "Numbers of tenants. The server knows as many as the largest one."
    schemes: Annotated[tuple[str, ...], SEVERAL] = COMPARED
    "Schemes to measure."
    budget: int = 20
    "Dedicated models in memory."
    lengths: str = "128"
    "Tokens of a text, or normal:MEAN,VARIANCE."
    seconds: float = 15.0
    "Seconds of each measurement."
    connections: int = 16
    "Connections of saturate."
    batch_tokens: int = 1024
    "Most tokens in a batch, in every scheme."
    patience: float = 60.0
    "Seconds that an answer may take, and requests in flight after the end."
    dtype: str = "auto"
    "Precision of the engine."
    rank: int = 32
    "Rank of the adapters."

    def __post_init__(self) -> None:
        expect_numbers_above_zero(self)
        for tokens in (self.mix(1).lengths.least, self.mix(1).lengths.most):
            expect_text(tokens, self.size, "lengths")
        if unknown := [scheme for scheme in self.schemes if scheme not in COMPARED]:
            raise InvalidInput(f"--schemes: unknown scheme {unknown[0]!r}: choose from {','.join(COMPARED)}")

    @property
    def config(self) -> BackboneConfig:
        return SIZES[self.size]

    def mix(self, tenants: int) -> Mix:
        return Mix(tenants, lengths=lengths_of(self.lengths))

    @property
    def clients(self) -> int:
        """The number of clients at a time. For the slow-down it is one, so that no request waits for another one."""
        return {"slowdown": 1, "saturate": self.connections}.get(self.scenario, OPEN_CONNECTIONS)

    def arrivals(self, tenants: int) -> Arrivals:
        if self.scenario in CLOSED:
            return self.mix(tenants).draw(np.zeros(DISTINCT), None, np.random.default_rng(tenants))
        return until((steady if self.scenario == "steady" else burst)(self.mix(tenants)), self.seconds)

    def shared(self) -> dict[str, Any]:
        """Returns the settings that numbers must share to be compared. Schemes and numbers of asked tenants may differ."""
        clients = 1 if self.scenario == "slowdown" else self.connections
        mine = asdict(self) | {"connections": clients, "known_tenants": max(self.tenants), "machine": machine()}
        return {name: value for name, value in mine.items() if name not in ("tenants", "schemes")}
