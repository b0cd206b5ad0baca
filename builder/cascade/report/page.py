"""The report as Markdown. An effect that is smaller than its standard error is said to be none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from builder.cascade.report.figures import BY_RANK, LAST_ALONE, PLAIN_SOFTMAX, RANDOM_TEXTS, UNPRUNED
from builder.cascade.report.ways import CASCADE, INFAAS, ORACLE, RANDOM, STRONG, VOTE

Figures = Mapping[str, Any]
NONE = "none"
WAYS = {
    STRONG: "the tenant's own level answers all texts",
    INFAAS: "the cheapest single level that loses no more than {drop:g} points on the profile's texts",
    VOTE: "all levels answer, weighted by their scores on the profile's texts; the time is that of one after the other",
    CASCADE: "the dearest plan of the ladder that has several levels",
    RANDOM: "the cascade's plan, but as many random texts go on",
    ORACLE: "exactly the wrong answers of the plan's first level go on, which no dispatcher can know",
}
PARTS = {
    PLAIN_SOFTMAX: "calibration",
    RANDOM_TEXTS: "choosing which texts go on",
    BY_RANK: "the draw of Eq. 4",
    UNPRUNED: "pruning",
    LAST_ALONE: "the ensemble",
}
PICTURES = {
    "confidence": "Confidence and dispatch (Fig. 6)",
    "latency": "Latency (Fig. 7)",
    "cutoffs": "The cutoff (Fig. 8)",
    "pruning": "Pruning (Fig. 9)",
    "promises": "What the profile promised",
}


def page_of(report: Mapping[str, Any], pictures: Mapping[str, Mapping[str, str]]) -> str:
    """`pictures`: by tenant, the names of their files by kind."""
    tenants = report["tenants"]
    lines = ["# Cascades", "", *_preface(report)]
    if len(tenants) > 1:
        lines += ["", "## All tenants", "", *_across(report["across"]), "", f"![all tenants]({report['picture']})"]
    for figures in tenants:
        lines += ["", f"## {figures['tenant']}", "", *_tenant(figures, pictures[figures["tenant"]])]
    return "\n".join(lines) + "\n"


def _preface(report: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "Plans of levels beside simpler ways of answering, on texts that have trained, calibrated and chosen nothing. "
        "After `+-` is a standard error. Differences are of the same texts. A difference that is smaller than its error is "
        f"called {NONE}."
    )
    yield ""
    yield (
        "Times are not measured here. Each text counts with the time that its profile has measured for a single text of as "
        "many tokens in the shared layers of each level that reads it. Lookup, heads and waiting are not in it."
    )
    yield ""
    yield from (f"- **{way}**: {text.format(drop=report['drop'])}" for way, text in WAYS.items())


def _across(across: Mapping[str, Any]) -> Iterator[str]:
    yield from _head("way", "points against strong", "time / strong", "work / strong")
    for way, own in across.items():
        yield _row(way, _points(own), _ratio(own, "mean_over_strong"), f"{own['work']:.2f}")


def _tenant(figures: Figures, pictures: Mapping[str, str]) -> Iterator[str]:
    levels = ", ".join(f"{level['name']} ({level['layers']})" for level in figures["levels"])
    yield (
        f"Version {figures['version']}, {figures['task']}, {figures['precision']}: {figures['texts']:,} texts of "
        f"`{figures['file']}`; {figures['left_out']:,} more were left out, because they have trained or chosen something. "
        f"Levels, with their layers: {levels}."
    )
    yield ""
    yield _of_plan(figures)
    yield from ("", *_ways(figures["ways"], figures["metric"]), "", *_against(figures["against"]))
    yield from ("", _picture("latency", pictures))
    if figures["rung"] is not None:
        yield from ("", *_confidence(figures["confidence"]), "", _picture("confidence", pictures))
        yield from ("", *_dispatch(figures["dispatch"]))
        yield from ("", *_parts(figures["parts"]), "", _picture("cutoffs", pictures))
        if "alphas" in figures:
            yield from ("", *_pruning(figures["alphas"]))
        if "pruning" in pictures:
            yield from ("", _picture("pruning", pictures))
    yield from ("", *_targets(figures["targets"]), "", _picture("promises", pictures))


def _of_plan(figures: Figures) -> str:
    described = figures["plan"]["described"]
    if figures["rung"] is None:
        return f"Every plan of the ladder is a single level. Calm traffic is answered by {described}: there is no cascade."
    if figures["rung"] > 1:
        return f"The cascade is rung {figures['rung']}: {described}. Rungs above are single levels, for calm traffic."
    return f"The cascade: {described}."


def _ways(ways: Mapping[str, Any], metric: str) -> Iterator[str]:
    yield from _head("way", metric, "points against strong", "mean ms", "p50", "p75", "p99", "time / strong", "go on")
    for way, own in ways.items():
        _, _, middle, third, tail = own["percentiles_ms"]
        times = (f"{own['mean_ms']:.2f}", f"{middle:.2f}", f"{third:.2f}", f"{tail:.2f}")
        goes_on = " / ".join(f"{share:.1%}" for share in own["went_on"])
        yield _row(_bold(way, way == CASCADE), f"{own['score']:.4f}", _points(own), *times, _ratio(own), goes_on)


def _against(against: Mapping[str, Any]) -> Iterator[str]:
    yield from _head("cascade against", "points", "time / its time")
    for way, own in against.items():
        yield _row(way, _points(own), _ratio(own, "mean_over_other"))


def _confidence(found: Mapping[str, Any]) -> Iterator[str]:
    after = f"The expected calibration error of level {found['level']} is {found['after']['ece']:.4f}"
    if "before" not in found:
        yield f"{after}. A number has no softmax that it could be compared with."
        return
    gain, error = found["ece_gain"], found["ece_gain_error"]
    yield (
        f"{after}, and {found['before']['ece']:.4f} with plain softmax. The effect of calibration: {_signed(-gain, error, 4)}."
    )


def _dispatch(found: Mapping[str, Any]) -> Iterator[str]:
    yield from _head("texts", "share", "score", "the other level", "points won")
    for name, title, other in (
        ("early", "answered early", "the last level instead"),
        ("went_on", "went on", "the first level instead"),
    ):
        own = found[name]
        if own["score"] is None:
            yield _row(title, f"{own['share']:.1%}", "too few", other, "")
        else:
            yield _row(title, f"{own['share']:.1%}", f"{own['score']:.4f}", other, _points(own))


def _parts(parts: Mapping[str, Any]) -> Iterator[str]:
    yield from _head("part", "without it", "points that the part adds", "time with / without", "go on without")
    for without, own in parts.items():
        ratio = _ratio(own, "mean_over_other")
        yield _row(PARTS[without], without, _points(own), ratio, f"{own['went_on']:.1%}")


def _pruning(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from _head(
        "alpha of texts that went on",
        "words pruned",
        "score of these texts",
        "points against no pruning",
        "time of later levels",
    )
    for row in rows:
        alpha = _bold(f"{row['alpha']:g}", row["chosen"])
        if row["score"] is None:
            yield _row(alpha, f"{row['pruned']:.1%}", "too few texts", "", "")
        else:
            ratio = _ratio(row, "mean_over_whole")
            yield _row(alpha, f"{row['pruned']:.1%}", f"{row['score']:.4f}", _points(row), ratio)


def _targets(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield from _head("plan of the profile", "promised points", "points here", "promised ms", "mean ms here")
    for row in rows:
        promised = row["profiled"]
        points = f"{promised['points']:+.2f} +- {promised['points_error']:.2f}"
        times = f"{promised['mean_ms']:.2f}", f"{row['mean_ms']:.2f}"
        yield _row(_bold(row["plan"], row["chosen"]), points, _points(row), *times)


def _head(*cells: str) -> tuple[str, str]:
    return _row(*cells), "|" + "---|" * len(cells)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _bold(text: str, is_bold: bool) -> str:
    return f"**{text}**" if is_bold else text


def _points(own: Mapping[str, Any]) -> str:
    return _signed(own["points"], own["points_error"], 2)


def _signed(value: float, error: float, digits: int) -> str:
    if not value and not error:
        return "0"
    text = f"{value:+.{digits}f} +- {error:.{digits}f}"
    return text if abs(value) > error else f"{NONE} ({text})"


def _ratio(own: Mapping[str, Any], name: str = "mean_over_strong") -> str:
    value, error = own[name], own[f"{name}_error"]
    if value == 1 and not error:
        return "1"
    text = f"{value:.2f} +- {error:.2f}"
    return text if abs(value - 1) > error else f"{NONE} ({text})"


def _picture(kind: str, pictures: Mapping[str, str]) -> str:
    return f"![{PICTURES[kind]}]({pictures[kind]})"
