"""The numbers of imports as tables."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from research.accuracy.table import markdown
from research.imports.cases import CASES, FIRST, MIXED
from research.result_file import Finished

Found = Mapping[str, Mapping[str, dict[str, Any]]]  # results by case and task


def tables_of(finished: Iterable[Finished]) -> Iterator[str]:
    """Yields the tables of each setting. Means of a case are over the tasks that have it, and a comparison is paired."""
    settings: dict[str, dict[str, dict[str, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for run, result in finished:
        about = {name: run[name] for name in ("kind", "labels") if name in run}
        settings[json.dumps(run["setting"])][run["case"]][run["task"]] = about | result
    for setting, found in settings.items():
        yield ", ".join(f"{name} {value}" for name, value in json.loads(setting).items())
        if FIRST in found:
            yield _cases(found)
            yield _tasks(found)
        if MIXED in found:
            yield _mixed([*found[MIXED].values()])


def _cases(found: Found) -> str:
    rows = []
    for case in (case for case in CASES if case in found):
        own, first = found[case], found[FIRST]
        both = [task for task in own if task in first]
        nearer = _off([100 * (own[task]["tenant"] - first[task]["tenant"]) for task in both])
        agreed = _off([100 * (own[task]["agreement"] - first[task]["agreement"]) for task in both])
        took = [one["took"] for one in own.values()]
        rows.append(
            (
                f"`{case}`: {CASES[case].about}", str(len(own)), _off([_lost(one) for one in own.values()]),
                _mean(own, "agreement"), _mean(own, "where_sure"), *(("", "") if case == FIRST else (nearer, agreed)),
                f"{np.mean(took):.0f}, {max(took):.0f}",
            )
        )  # fmt: skip
    heads = (
        "case", "checkpoints", "points lost", "same answer", "where sure", f"score over `{FIRST}`", "same answers over it",
        "seconds, most",
    )  # fmt: skip
    return markdown(heads, rows)


def _tasks(found: Found) -> str:
    rows = []
    for task, one in sorted(found[FIRST].items(), key=lambda item: -_lost(item[1])):
        labelled, back, size = found.get("labelled", {}).get(task), one["exported"], one["bytes"]
        rows.append(
            (
                task, one["kind"], str(one["labels"]), f"{100 * one['checkpoint']:.1f}", f"{_lost(one):.1f}",
                f"{_lost(labelled):.1f}" if labelled else "", f"{one['agreement']:.3f}", _share(one.get("where_sure")),
                f"1/{size['checkpoint'] / size['tenant']:.0f}", f"{back['plain']:.3f}", f"{back['windowed_apart']:.1e}",
            )
        )  # fmt: skip
    heads = (
        "checkpoint", "kind", "labels", "score", "lost", "lost with labels", "same", "where sure", "bytes",
        "same after export", "windowed: a logit apart",
    )  # fmt: skip
    return markdown(heads, rows)


def _mixed(results: Sequence[Mapping[str, Any]]) -> str:
    took, agreement = ([one[name] for one in results] for name in ("took", "agreement"))
    return (
        f"{len(results)} mixed: {np.mean(took):.0f} s each, {np.percentile(took, 90):.0f} for nine of ten, {max(took):.0f} at "
        f"most; {np.mean(agreement):.3f} of the answers are the checkpoint's, {min(agreement):.3f} at least"
    )


def _lost(one: Mapping[str, Any]) -> float:
    return 100 * (one["checkpoint"] - one["tenant"])


def _mean(own: Mapping[str, Mapping[str, Any]], name: str) -> str:
    known = [one[name] for one in own.values() if one.get(name) is not None]
    return _share(float(np.mean(known)) if known else None)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _off(points: Sequence[float]) -> str:
    """Returns the mean and its standard error."""
    if not points:
        return ""
    return f"{np.mean(points):.2f}" + (f" +- {np.std(points, ddof=1) / len(points) ** 0.5:.2f}" if len(points) > 1 else "")
