"""AlpaServe's Figs. 8, 9 and 16: what cuts cost and need, computed from the paper's profiles. No requests are simulated.

AlpaServe cuts between operators. Here a model is cut between attention and the other half of a layer. Its first and last
parts take more time than others, by a guess (`ends` in alpaserve.json): else every equal cut would be even.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bench.measuring.alpaserve import ASSUMED, PAPER, TOKENS, profile_of
from hplm.placement.profile import BackboneProfile, Shape, Terms
from hplm.placement.stages import Cut, best_cut, equal_cut, overhead, stage_times

DEVICES = (1, 2, 4, 8)
SHAPE = Shape(TOKENS, TOKENS**2, 1)
HOP = Terms(ASSUMED["hop_ms"] * 1e6)
NO_HOP = Terms()
MODEL = "BERT-2.7B"
HALVES = 2  # of a layer

By = dict[str, float | None]  # number on the axis: value


def cut_curves() -> dict[str, dict[str, By]]:
    return {**_decomposed(), **_compared()}


def partition_curves() -> dict[str, dict[str, By]]:
    """Fig. 16: the overhead of equal cuts, and of those that `best_cut` finds."""
    return {f"Fig. 16: overhead by stages, {kind}": _partitioned(halved(kind)) for kind in ("BERT-1.3B", MODEL)}


def halved(kind: str) -> BackboneProfile:
    """Returns a model whose layers are in halves, and whose ends take longer."""
    own = profile_of([kind]).backbones["model-0"]
    layers = HALVES * own.layers
    first, last = (HALVES * extra for extra in ASSUMED["ends"])
    weights = [1 + first, *[1.0] * (layers - 2), 1 + last]
    times = {
        intra: tuple(Terms(token_ns=terms[0].token_ns * own.layers * weight / sum(weights)) for weight in weights)
        for intra, terms in own.times.items()
    }
    return replace(own, layers=layers, layer_bytes=(own.layer_bytes[0] // HALVES,) * layers, times=times)


def _partitioned(model: BackboneProfile) -> dict[str, By]:
    return {
        "equal cut": _by_devices(lambda n: _overhead(model, equal_cut(model.layers, n))),
        "best cut": _by_devices(lambda n: _overhead(model, _best(model, n))),
    }


def _decomposed() -> dict[str, dict[str, By]]:
    """Fig. 8: what stages and devices a stage take beyond an even share of the model's time, relative to that time."""
    model = halved(MODEL)

    def uneven(stages: int) -> float:
        return overhead(model, NO_HOP, 1, _best(model, stages), SHAPE)

    return {
        "Fig. 8a: overhead of stages": {
            "uneven cut": _by_devices(uneven),
            "hops": _by_devices(lambda n: _overhead(model, _best(model, n)) - uneven(n)),
        },
        "Fig. 8b: overhead of devices a stage": {
            "communication": _by_devices(lambda n: n * model.terms(n).ns(*SHAPE) / model.terms(1).ns(*SHAPE) - 1)
        },
    }


def _compared() -> dict[str, dict[str, By]]:
    """Fig. 9: devices that are stages, that divide each stage, or that are replicas."""
    model = halved(MODEL)
    alone = model.terms(1).ns(*SHAPE) / 1e9
    size = PAPER["models"][MODEL]["bytes"] / 1e9

    def stages(n: int) -> list[float]:
        return [own / 1e9 for own in stage_times(model, HOP, 1, _best(model, n), SHAPE).tolist()]

    def divided(n: int) -> float:
        return model.terms(n).ns(*SHAPE) / 1e9

    def lines(*values: Callable[[int], float]) -> dict[str, By]:
        return dict(zip(("stages", "devices a stage", "replicas"), map(_by_devices, values), strict=True))

    return {
        "Fig. 9a: seconds of a request by devices": lines(lambda n: sum(stages(n)), divided, lambda n: alone),
        "Fig. 9b: requests a second by devices": lines(
            lambda n: 1 / max(stages(n)), lambda n: 1 / divided(n), lambda n: n / alone
        ),
        "Fig. 9c: GB of weights by devices": lines(lambda n: size, lambda n: size, lambda n: n * size),
    }


def _by_devices(value: Callable[[int], float]) -> By:
    return {str(devices): value(devices) for devices in DEVICES}


def _best(model: BackboneProfile, stages: int) -> Cut:
    return best_cut(model, HOP, 1, stages, SHAPE)


def _overhead(model: BackboneProfile, cut: Cut) -> float:
    return overhead(model, HOP, 1, cut, SHAPE)
