"""AlpaServe's Figs. 8, 9 and 16: what cuts cost and need, computed from the paper's profiles. No requests are simulated.

AlpaServe cuts between operators. Here a model is cut between attention and the other half of a layer. Its first and last
parts take more time than others, by a guess (`ends` in alpaserve_models.json): else every equal cut would be even.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bench.curves import Curve
from hplm.placement.profile import BackboneProfile, Shape, Terms
from hplm.placement.stages import best_cut, equal_cut, overhead, stage_times
from research.papers.alpaserve_models import ASSUMED, PAPER, TOKENS, profile_of

DEVICES = (1, 2, 4, 8)
SHAPE = Shape(TOKENS, TOKENS**2, 1)
HOP = Terms(ASSUMED["hop_ms"] * 1e6)
NO_HOP = Terms()
MODEL = "BERT-2.7B"
HALVES = 2  # of a layer


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


def cut_curves() -> dict[str, dict[str, Curve]]:
    """Returns the lines of each figure. In Fig. 9, devices are stages, or share a stage, or are replicas."""
    model = halved(MODEL)
    alone, size = _seconds(model, 1), PAPER["models"][MODEL]["bytes"] / 1e9
    ways = "stages", "devices a stage", "replicas"

    def uneven(n: int) -> float:
        return _overhead(model, n, NO_HOP)

    lines: dict[str, dict[str, Callable[[int], float]]] = {
        "Fig. 8a: overhead of stages": {"uneven cut": uneven, "hops": lambda n: _overhead(model, n) - uneven(n)},
        "Fig. 8b: overhead of devices a stage": {"communication": lambda n: n * _seconds(model, n) / alone - 1},
        "Fig. 9a: seconds of a request by devices": dict(
            zip(ways, (lambda n: sum(_stages(model, n)), lambda n: _seconds(model, n), lambda n: alone), strict=True)
        ),
        "Fig. 9b: requests a second by devices": dict(
            zip(
                ways, (lambda n: 1 / max(_stages(model, n)), lambda n: 1 / _seconds(model, n), lambda n: n / alone), strict=True
            )
        ),
        "Fig. 9c: GB of weights by devices": dict(zip(ways, (lambda n: size, lambda n: size, lambda n: n * size), strict=True)),
    }
    for kind in ("BERT-1.3B", MODEL):
        own = halved(kind)
        lines[f"Fig. 16: overhead by stages, {kind}"] = {
            "equal cut": lambda n, own=own: overhead(own, HOP, 1, equal_cut(own.layers, n), SHAPE),
            "best cut": lambda n, own=own: _overhead(own, n),
        }
    return {
        title: {name: {str(n): value(n) for n in DEVICES} for name, value in figure.items()} for title, figure in lines.items()
    }


def _overhead(model: BackboneProfile, stages: int, hop: Terms = HOP) -> float:
    return overhead(model, hop, 1, best_cut(model, HOP, 1, stages, SHAPE), SHAPE)


def _stages(model: BackboneProfile, stages: int) -> list[float]:
    """Returns the seconds of each stage."""
    return (stage_times(model, HOP, 1, best_cut(model, HOP, 1, stages, SHAPE), SHAPE) / 1e9).tolist()


def _seconds(model: BackboneProfile, devices: int) -> float:
    """Returns the seconds of a request, whose layers these devices compute together."""
    return model.terms(devices).ns(*SHAPE) / 1e9
