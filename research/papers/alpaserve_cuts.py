"""AlpaServe's Figs. 8, 9 and 16: what cuts cost and need, computed from the paper's profiles. No requests are simulated.

AlpaServe cuts between operators. Here a model is cut between attention and the other half of a layer. Its first and last
parts take more time than others, by a guess (`ends` in alpaserve.json): else every equal cut would be even.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bench.curves import Curve
from hplm.placement.profile import BackboneProfile, Shape, Terms
from hplm.placement.stages import Cut, best_cut, equal_cut, overhead, stage_times
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
    model = halved(MODEL)
    alone, size = model.terms(1).ns(*SHAPE) / 1e9, PAPER["models"][MODEL]["bytes"] / 1e9

    def uneven(stages: int) -> float:
        return overhead(model, NO_HOP, 1, _best(model, stages), SHAPE)

    def stages(n: int) -> list[float]:
        return [own / 1e9 for own in stage_times(model, HOP, 1, _best(model, n), SHAPE).tolist()]

    def divided(n: int) -> float:
        return model.terms(n).ns(*SHAPE) / 1e9

    def by_devices(**values: Callable[[int], float]) -> dict[str, Curve]:
        return {name.replace("_", " "): {str(n): value(n) for n in DEVICES} for name, value in values.items()}

    def partitioned(kind: str) -> dict[str, Curve]:
        """The overhead of equal cuts, and of those that `best_cut` finds."""
        own = halved(kind)
        return by_devices(
            equal_cut=lambda n: overhead(own, HOP, 1, equal_cut(own.layers, n), SHAPE),
            best_cut=lambda n: overhead(own, HOP, 1, _best(own, n), SHAPE),
        )

    # Fig. 8: what is beyond an even share of the model's time. Fig. 9: devices as stages, in each stage, or as replicas.
    return {
        "Fig. 8a: overhead of stages": by_devices(
            uneven_cut=uneven, hops=lambda n: overhead(model, HOP, 1, _best(model, n), SHAPE) - uneven(n)
        ),
        "Fig. 8b: overhead of devices a stage": by_devices(communication=lambda n: n * divided(n) / alone - 1),
        "Fig. 9a: seconds of a request by devices": by_devices(
            stages=lambda n: sum(stages(n)), devices_a_stage=divided, replicas=lambda n: alone
        ),
        "Fig. 9b: requests a second by devices": by_devices(
            stages=lambda n: 1 / max(stages(n)), devices_a_stage=lambda n: 1 / divided(n), replicas=lambda n: n / alone
        ),
        "Fig. 9c: GB of weights by devices": by_devices(
            stages=lambda n: size, devices_a_stage=lambda n: size, replicas=lambda n: n * size
        ),
        **{f"Fig. 16: overhead by stages, {kind}": partitioned(kind) for kind in ("BERT-1.3B", MODEL)},
    }


def _best(model: BackboneProfile, stages: int) -> Cut:
    return best_cut(model, HOP, 1, stages, SHAPE)
