"""The report as a table and as a picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from demo.picture import draw_bars
from research.markdown import markdown

Runs = Sequence[dict[str, Any]]


def scores_of(runs: Runs) -> dict[str, dict[str, float]]:
    """By task and case: the metric that decides, in points, averaged over the seeds that all cases of the task have."""
    seeds, table = seeds_of(runs), defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run["seed"] in seeds[run["task"]]:
            table[run["task"]][run["case"]].append(100 * run[run["metric"]])
    return {task: {case: mean(points) for case, points in table[task].items()} for task in seeds}


def seeds_of(runs: Runs) -> dict[str, set[int]]:
    """By task; a case that is behind with its seeds is not compared with other seeds of the rest."""
    found: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for run in runs:
        found[run["task"]][run["case"]].add(run["seed"])
    return {task: set.intersection(*cases.values()) for task, cases in found.items()}


def averages_of(table: dict[str, dict[str, float]], weights: dict[str, float] | None = None) -> dict[str, float]:
    """Over the tasks, of each case that all of them have been asked; `weights`: of the tasks, else they count alike."""
    cases = dict.fromkeys(case for row in table.values() for case in row)
    weights = weights or dict.fromkeys(table, 1.0)
    total = sum(weights.values())
    return {
        case: sum(weights[task] * row[case] for task, row in table.items()) / total
        for case in cases
        if total and all(case in row for row in table.values())
    }


def tenants_in(runs: Runs) -> dict[str, float]:
    """By task, where each run is a tenant: a task counts as often as it has tenants."""
    return {task: float(len(seeds)) for task, seeds in seeds_of(runs).items()}


def markdown_of(runs: Runs, weights: dict[str, float] | None = None) -> str:
    """Scores of unfinished runs are left empty. An average is there for a case that all tasks have."""
    table, seeds = scores_of(runs), seeds_of(runs)
    averages, cases = averages_of(table, weights), list(dict.fromkeys(run["case"] for run in runs))
    about = {run["task"]: (run["kind"], run["metric"], f"{run['trained_on']:,}") for run in runs}

    def row(*begun: str, points: dict[str, float], form: str) -> list[str]:
        return [*begun, *[""] * (5 - len(begun)), *(form.format(points[case]) if case in points else "" for case in cases)]

    rows = [row(task, *about[task], str(len(seeds[task])), points=own, form="{:.1f}") for task, own in table.items()]
    rows.append(row("**average**", points=averages, form="**{:.2f}**"))
    if (first := cases[0]) in averages:
        gaps = {case: average - averages[first] for case, average in averages.items()}
        rows.append(row(f"against {first}", points=gaps, form="{:+.2f}"))
    return "\n".join([markdown(("task", "kind", "metric", "texts", "seeds", *cases), rows), *_mixed(runs)])


def _mixed(runs: Runs) -> Iterator[str]:
    """Yields warnings about runs that differ in more than their case: a root that is built again is another one."""
    for case in dict.fromkeys(run["case"] for run in runs):
        roots = sorted({run.get("root", "not told") for run in runs if run["case"] == case})
        if len(roots) > 1:
            yield f"\n{case} has no root in common ({', '.join(roots)}): compute it on one machine, with one --work folder."
    ways = {f"{run['products']} on {run['device']}" if "products" in run else "not told" for run in runs}
    if len(ways) > 1:
        yield f"\nTrained in different ways: {', '.join(sorted(ways))}."


def draw(runs: Runs, title: str, path: Path, weights: dict[str, float] | None = None) -> None:
    """The format is that of the path's suffix."""
    table = scores_of(runs)
    table = {**table, "average": averages_of(table, weights)}
    cases = sorted(dict.fromkeys(run["case"] for run in runs), key=lambda case: case != "hplm")  # ours has the first color
    bars = {case: {task: row.get(case, 0.0) for task, row in table.items()} for case in cases}
    least = min((min(row.values()) for row in table.values() if row), default=0)
    draw_bars({f"{title}: accuracy or F1 on unseen files, in points": bars}, path, least=max(0, least // 10 * 10 - 10))
