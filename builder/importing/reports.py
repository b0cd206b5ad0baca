"""What the reports of imported checkpoints say: on the page of each, in a row of the page of all, and of all together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from builder.console import duration
from builder.learning.limits import LITTLE_EXPLAINED

NEAR = 0.95  # of the answers: below, it is said what may help
SIDES = "tenant", "checkpoint"
WHOLE = 0.95  # of what fine-tuning changed: below, a higher rank would hold more
NOTED = {"activation": "activation behind the logit", "limit": "tokens that are read of a text"}

Report = Mapping[str, Any]


def facts_of(report: Report) -> dict[str, str]:
    """Returns what there is to know of an import, as words."""
    after, tested, is_vector = report["after"], report.get("test", {}).items(), report["task"] == "embed"
    scores = [f"{side} {scores['metric']} {scores[scores['metric']]:.3f}" for side, scores in tested]
    return {
        "task": report["task"],
        ("cosines with the checkpoint's vectors, mean" if is_vector else "answers that are the checkpoint's"): _tested(after),
        **_agreed(after, report["bytes"]),
        "before it learned": f"{report['before']:.1%}",
        "texts learned from": f"{report['texts']['learned']:,}",
        **{words: str(own) for name, words in NOTED.items() if (own := report["imported"].get(name))},
        "scores on --test": ", ".join(scores) or "-",
        "answers to --test that are the checkpoint's": _tested(report.get("tested")),
        "learned for": duration(report["seconds"]),
        "what may help": advice(report) if after["agreement"] < NEAR else "-",
    }


def advice(report: Report) -> str:
    """Says what may bring a tenant nearer to its checkpoint."""
    asked, exams = report["asked"], report["exams"]
    found = [f"more --texts that are like the tenant's own and a --most-texts above {asked['most_texts']:,}"]
    if (held := report["change_held"]) < WHOLE:
        found.append(f"a higher --rank ({asked['rank']} holds {held:.0%} of the change)")
    if len(exams) > 1 and exams[-1]["score"] > exams[-2]["score"]:
        found.append("more --epochs (the last one still helped)")
    if (explained := report.get("root_explained")) is not None and explained < LITTLE_EXPLAINED:
        found.append(f"a root that has learned longer (this one explains only {explained:.3f} of the variance)")
    return f"give {', '.join(found)}, or a root with fewer layers in tables; or leave this model dedicated"


def totals(reports: Sequence[Report]) -> dict[str, Any]:
    """Returns means over checkpoints, and the sums of bytes and seconds."""
    names = ("agreement", "where_sure", "elsewhere", "divergence")
    means = {name: _mean(report["after"].get(name) for report in reports) for name in names}
    scores = ([report["test"][side] for side in ("checkpoint", "tenant")] for report in reports if "test" in report)
    lost = _mean(theirs[theirs["metric"]] - own[own["metric"]] for theirs, own in scores)
    size = {side: sum(report["bytes"][side] for report in reports) for side in SIDES}
    took = sum(report["took"] for report in reports)
    return {"checkpoints": len(reports), **means, "score_lost": lost, "bytes": size, "took": round(took, 1)}


def shown(found: Report) -> dict[str, str]:
    """Returns totals as words."""
    return {
        "checkpoints": f"{found['checkpoints']:,}",
        "answers that are the checkpoint's, mean": _word(found["agreement"], ".1%"),
        **_agreed(found, found["bytes"]),
        "score lost, mean": _word(found["score_lost"]),
        "took, added": duration(found["took"]),
    }


def _agreed(found: Report, size: Mapping[str, int]) -> dict[str, str]:
    return {
        "where the checkpoint is sure": _word(found.get("where_sure"), ".1%"),
        "where it is not sure": _word(found.get("elsewhere"), ".1%"),
        "KL divergence": _word(found.get("divergence")),
        "MB, of the checkpoint": f"{size['tenant'] / 1e6:,.2f}, {size['checkpoint'] / 1e6:,.1f}",
    }


def _tested(found: Report | None) -> str:
    return f"{found['agreement']:.1%} +- {found['off']:.1%} of {found['answers']:,}" if found else "-"


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 5) if known else None


def _word(number: float | None, form: str = ".3f") -> str:
    return "-" if number is None else f"{number:{form}}"
