"""The steps of staging batch k+1 that run while batch k computes. Leaving some out measures their effect (HMI, Table 6)."""

from __future__ import annotations

from dataclasses import dataclass

from hplm.errors import InvalidInput


@dataclass(frozen=True)
class Overlap:
    staging: bool = True  # False: a batch is not even chosen before the batch before it is done
    retrieval: bool = True  # gathers rows of tables ahead
    swapping: bool = True  # copies adapters and heads ahead, layer by layer
    by_layer: bool = True  # a layer starts when its own adapters are copied; False: when those of all layers are


OVERLAPS = {
    "pipelined": Overlap(),
    "no_retrieval": Overlap(retrieval=False),
    "no_swapping": Overlap(swapping=False),
    "coarse_swapping": Overlap(by_layer=False),
    "synchronous": Overlap(staging=False),
}


def read_overlap(name: str) -> Overlap:
    """Reads a model's parameter `overlap`."""
    if name not in OVERLAPS:
        raise InvalidInput(f"unknown overlap {name!r}: choose one of {', '.join(OVERLAPS)}")
    return OVERLAPS[name]
