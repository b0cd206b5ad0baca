"""The report as a table and as a picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import isnan, nan, sqrt
from pathlib import Path
from statistics import mean
from typing import Any

from bench.run import draw_bars

Runs = Sequence[dict[str, Any]]
Table = dict[str, dict[str, float]]  # by task and case


def seeds_of(runs: Runs) -> dict[str, set[int]]:
    """Returns the seeds that all cases of a task have, by task: a case that is behind is not compared with other seeds."""
    found: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for run in runs:
        found[run["task"]][run["case"]].add(run["seed"])
    return {task: set.intersection(*cases.values()) for task, cases in found.items()}


def scores_of(runs: Runs) -> Table:
    """Returns the metric that decides, in points, averaged over these seeds."""
    seeds, table = seeds_of(runs), defaultdict(lambda: defaultdict(list))
    for run in runs:
        if run["seed"] in seeds[run["task"]]:
            table[run["task"]][run["case"]].append(100 * run[run["metric"]])
    return {task: {case: mean(points) for case, points in table[task].items()} for task in seeds}


def averages_of(runs: Runs) -> dict[str, float]:
    """Returns the average of each case that all tasks have. A task counts as often as it has seeds: tenants are seeds."""
    table, counts = scores_of(runs), {task: len(seeds) for task, seeds in seeds_of(runs).items()}
    cases = dict.fromkeys(case for row in table.values() for case in row)
    return {
        case: sum(counts[task] * row[case] for task, row in table.items()) / sum(counts.values())
        for case in cases
        if all(case in row for row in table.values())
    }


def gap_of(runs: Runs, case: str, other: str) -> tuple[float, float]:
    """Returns how many points a case is better than another on average, and the standard error.

    Scores are compared where task and seed are the same. Seeds of one task share its texts, so only tasks count as
    independent: with one task, the error is not known (NaN).
    """
    points = {(run["task"], run["seed"], run["case"]): 100 * run[run["metric"]] for run in runs}
    gaps = [[points[task, seed, case] - points[task, seed, other] for seed in seeds] for task, seeds in seeds_of(runs).items()]
    gap = mean(one for own in gaps for one in own)
    apart = sum(sum(one - gap for one in own) ** 2 for own in gaps)
    return gap, sqrt(len(gaps) / (len(gaps) - 1) * apart) / sum(map(len, gaps)) if len(gaps) > 1 else nan


def markdown_of(runs: Runs) -> str:
    """Returns the table, each average with its gaps to those of earlier cases. Scores of unfinished runs are left empty."""
    table, seeds, averages = scores_of(runs), seeds_of(runs), averages_of(runs)
    cases = list(dict.fromkeys(run["case"] for run in runs))
    about = {run["task"]: (run["kind"], run["metric"], f"{run['trained_on']:,}") for run in runs}

    def row(*begun: str, cells: Mapping[str, str]) -> list[str]:
        return [*begun, *[""] * (5 - len(begun)), *(cells.get(case, "") for case in cases)]

    def beside(gap: float, error: float) -> str:
        return f"{gap:+.2f}" if isnan(error) else f"{gap:+.2f} ± {error:.2f}"

    def formed(points: Mapping[str, float], form: str) -> dict[str, str]:
        return {case: form.format(value) for case, value in points.items()}

    rows = [row(task, *about[task], str(len(seeds[task])), cells=formed(own, "{:.1f}")) for task, own in table.items()]
    rows.append(row("**average**", cells=formed(averages, "**{:.2f}**")))
    whole = [case for case in cases if case in averages]
    for place, other in enumerate(whole[:-1], 1):
        rows.append(row(f"against {other}", cells={case: beside(*gap_of(runs, case, other)) for case in whole[place:]}))
    return markdown(("task", "kind", "metric", "texts", "seeds", *cases), rows)


def markdown(names: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (names, ["---"] * len(names), *rows))


def warning_of(runs: Runs) -> str:
    """Returns a warning if runs of a case read different roots: one that is built again is another one. Else nothing."""
    roots: dict[str, set[str]] = defaultdict(set)
    for run in runs:
        roots[run["case"]].add(run.get("root", ""))
    mixed = [case for case, own in roots.items() if len(own) > 1]
    return f"\nNo root in common: {', '.join(mixed)}. Compute them on one machine, with one --work folder." if mixed else ""


def draw(runs: Runs, title: str, path: Path) -> None:
    """Draws the table. The suffix of the path chooses the format."""
    table = {**scores_of(runs), "average": averages_of(runs)}
    cases = sorted(dict.fromkeys(run["case"] for run in runs), key=lambda case: case != "hplm")  # ours has the first color
    bars = {case: {task: row.get(case, 0.0) for task, row in table.items()} for case in cases}
    least = min((min(row.values()) for row in table.values() if row), default=0)
    draw_bars({f"{title}: accuracy or F1 on unseen files, in points": bars}, path, least=max(0, least // 10 * 10 - 10))
