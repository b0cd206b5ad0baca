"""What the reports of imported checkpoints say: on the page of each, in a row of the page of all, and of all together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from builder.said import duration

NEAR = 0.95  # of the answers: below, it is said what may help
WHOLE = 0.95  # of what fine-tuning changed: below, a higher rank would hold more

Report = Mapping[str, Any]


def facts_of(report: Report) -> dict[str, str]:
    """Returns what there is to know of an import, as words."""
    after, size, speed = report["after"], report["bytes"], report["texts_per_second"]
    tested = report.get("test", {}).items()
    scores = [f"{side} {scores['metric']} {scores[scores['metric']]:.3f}" for side, scores in tested]
    return {
        "task": report["task"],
        "answers that are the checkpoint's": f"{after['agreement']:.1%} of {after['answers']:,}",
        "where it is sure": _share(after.get("where_sure")),
        "where it is not": _share(after.get("elsewhere")),
        "KL divergence": _number(after.get("divergence")),
        "before it learned": f"{report['before']:.1%}",
        "texts learned from": f"{report['texts']['learned']:,}",
        "scores": ", ".join(scores) or "-",
        "MB, of the checkpoint": f"{size['tenant'] / 1e6:.2f}, {size['checkpoint'] / 1e6:,.1f}",
        "texts a second here, of the checkpoint": f"{speed['tenant']:,.0f}, {speed['checkpoint']:,.0f}",
        "learned for": duration(report["seconds"]),
        "what may help": advice(report) if after["agreement"] < NEAR else "-",
    }


def advice(report: Report) -> str:
    """Says what may bring a tenant nearer to its checkpoint."""
    asked, exams = report["asked"], report["exams"]
    is_short = report["texts"]["learned"] + report["texts"]["judged"] < asked["most_texts"]
    found = ["more --texts that are like the tenant's own" if is_short else "a higher --most-texts"]
    if (held := report["change_held"]) < WHOLE:
        found.append(f"a higher --rank ({asked['rank']} holds {held:.0%} of the change)")
    if len(exams) > 1 and exams[-1]["score"] > exams[-2]["score"]:
        found.append("more --epochs (the last one still helped)")
    return f"give {', '.join(found)}, or a root with fewer layers in tables; or leave this model dedicated"


def totals(reports: Sequence[Report]) -> dict[str, Any]:
    """Returns means over checkpoints, and the sums of bytes and seconds."""
    after = [report["after"] for report in reports]
    means = {name: _mean(one.get(name) for one in after) for name in ("agreement", "where_sure", "elsewhere", "divergence")}
    lost = (_lost(report["test"]) for report in reports if "test" in report)
    size = {side: sum(report["bytes"][side] for report in reports) for side in ("tenant", "checkpoint")}
    took = sum(report["took"] for report in reports)
    return {"checkpoints": len(reports), **means, "score_lost": _mean(lost), "bytes": size, "took": round(took, 1)}


def shown(found: Mapping[str, Any]) -> dict[str, str]:
    """Returns totals as words."""
    size = found["bytes"]
    return {
        "checkpoints": f"{found['checkpoints']:,}",
        "answers that are theirs, mean": _share(found["agreement"]),
        "where they are sure": _share(found["where_sure"]),
        "where they are not": _share(found["elsewhere"]),
        "KL divergence, mean": _number(found["divergence"]),
        "score lost, mean": _number(found["score_lost"]),
        "MB, of the checkpoints": f"{size['tenant'] / 1e6:,.2f}, {size['checkpoint'] / 1e6:,.1f}",
        "took, added": duration(found["took"]),
    }


def _lost(scores: Mapping[str, Mapping[str, Any]]) -> float:
    own, wanted = (scores[side][scores[side]["metric"]] for side in ("tenant", "checkpoint"))
    return wanted - own


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 5) if known else None


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _number(number: float | None) -> str:
    return "-" if number is None else f"{number:.3f}"
