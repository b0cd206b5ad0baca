"""AlpaServe's Figs. 8, 9 and 16: what cuts cost, computed from the paper's profiles. No requests are simulated.

AlpaServe cuts between operators. Here a model is cut between attention and the other half of a layer. Its first and last
parts take more time than others, by a guess (`ends` in alpaserve_models.json): else every equal cut would be even.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from bench.curves import Curve
from hplm.placement.profile import BackboneProfile, Shape, Terms
from hplm.placement.stages import Cut, best_cut, equal_cut, stage_times
from research.papers.alpaserve_models import ASSUMED, TOKENS, backbone_of

DEVICES = (1, 2, 4, 8)
SHAPE = Shape(TOKENS, TOKENS**2, 1)
HOP, NO_HOP = Terms(ASSUMED["hop_ms"] * 1e6), Terms()


def cut_curves() -> dict[str, dict[str, Curve]]:
    """Returns the lines of each figure. In Fig. 9, devices are stages, or share a stage, or are replicas."""
    small, model = (backbone_of(kind, pieces=2, ends=ASSUMED["ends"]) for kind in ("BERT-1.3B", "BERT-2.7B"))

    def seconds(n: int) -> float:
        """Returns the time of a request whose layers so many devices compute together."""
        return model.terms(n).ns(*SHAPE) / 1e9

    def stages(n: int) -> list[float]:
        return (stage_times(model, HOP, 1, best_cut(model, HOP, 1, n, SHAPE), SHAPE) / 1e9).tolist()

    def best(own: BackboneProfile, n: int, hop: Terms = HOP) -> float:
        return overhead(own, hop, best_cut(own, HOP, 1, n, SHAPE))

    def equal(own: BackboneProfile, n: int) -> float:
        return overhead(own, HOP, equal_cut(own.layers, n))

    lines: dict[str, dict[str, Callable[[int], float]]] = {
        "Fig. 8a: overhead of stages": {
            "uneven cut": lambda n: best(model, n, NO_HOP),
            "hops": lambda n: best(model, n) - best(model, n, NO_HOP),
        },
        "Fig. 8b: overhead of devices a stage": {"communication": lambda n: n * seconds(n) / seconds(1) - 1},
        "Fig. 9a: seconds of a request by devices": {
            "stages": lambda n: sum(stages(n)),
            "devices a stage": seconds,
            "replicas": lambda n: seconds(1),
        },
        "Fig. 9b: requests a second by devices": {
            "stages": lambda n: 1 / max(stages(n)),
            "devices a stage": lambda n: 1 / seconds(n),
            "replicas": lambda n: n / seconds(1),
        },
    }
    for kind, own in (("BERT-1.3B", small), ("BERT-2.7B", model)):
        lines[f"Fig. 16: overhead by stages, {kind}"] = {"equal cut": partial(equal, own), "best cut": partial(best, own)}
    return {title: {name: {str(n): of(n) for n in DEVICES} for name, of in own.items()} for title, own in lines.items()}


def overhead(own: BackboneProfile, hop: Terms, cut: Cut) -> float:
    """Returns the overhead of AlpaServe 3.3: stages times the slowest one, above the time of a single stage, relative to it."""
    whole = stage_times(own, hop, 1, equal_cut(own.layers, 1), SHAPE).max()
    return float(len(cut) * stage_times(own, hop, 1, cut, SHAPE).max() / whole - 1)
