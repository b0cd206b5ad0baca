"""What is made ready for batch k+1 while batch k computes; everything, but for measuring what that is worth (HMI, Table 6)."""

from __future__ import annotations

from dataclasses import dataclass

from hplm.errors import InvalidInput


@dataclass(frozen=True)
class Overlap:
    staging: bool = True  # False: a batch is not even chosen before the one before it is done
    retrieval: bool = True  # rows of tables are gathered
    swapping: bool = True  # adapters and heads are copied, layer by layer
    by_layer: bool = True  # a layer starts when its adapters are there; False: a batch, when all of its adapters are


OVERLAPS = {
    "pipelined": Overlap(),
    "no_retrieval": Overlap(retrieval=False),
    "no_swapping": Overlap(swapping=False),
    "coarse_swapping": Overlap(by_layer=False),
    "synchronous": Overlap(staging=False),
}


def read_overlap(name: str) -> Overlap:
    """From a model's parameter."""
    if name not in OVERLAPS:
        raise InvalidInput(f"overlap {name!r} is not known: choose one of {', '.join(OVERLAPS)}")
    return OVERLAPS[name]
