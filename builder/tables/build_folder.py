"""The folder of an unfinished build: one process at a time holds it, and the same command continues it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from builder.console import say
from builder.learning.distil import readable
from builder.store.branches import Branches
from builder.store.resumable import PLAN, clear_work_folder, saved_plan, write_json
from builder.store.store import Store, check_name
from builder.tables.corpus import FOLDER, Corpus, tokenize_corpus
from builder.tables.counts import Counts, add_counts, count_ngrams
from builder.tables.parts import OF, NgramSettings, read_parts
from builder.tables.text_files import check_stays
from hplm.disk import NoSpace
from hplm.errors import InvalidInput
from hplm.plot.table import Table

ADAPTATION_TOKENS = 20_000_000  # more than an adaptation reads in hours; of a larger corpus it takes random documents


@contextmanager
def locked_folder(folder: Path, what: str) -> Iterator[None]:
    """Holds the folder in which `what` is built, for this process alone. Removes it in the end if it is empty."""
    handle = _opened(folder)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(handle), folder.stat()):
                raise FileNotFoundError
        except (BlockingIOError, FileNotFoundError):  # another process holds it, or has just removed it
            raise InvalidInput(f"{what} is being built by another process: wait for it") from None
        except OSError as error:
            raise InvalidInput(
                f"{folder} cannot be locked ({error.strerror}), as on NFS: build on a local disk, and copy the store then"
            ) from None
        try:
            yield
        finally:
            with suppress(OSError):  # an interrupted build continues from its content
                folder.rmdir()
    finally:
        os.close(handle)


@contextmanager
def locked_tenant(store: Store, tenant_id: str) -> Iterator[Path]:
    """Holds the folder in which a tenant's next version is made, and returns it. Refuses a bad name."""
    check_name("tenant", tenant_id)
    with locked_folder(folder := store.tenant_work_folder(tenant_id), f"tenant {tenant_id!r}"):
        yield folder


@contextmanager
def locked_next_version(store: Store, domain: str) -> Iterator[int]:
    """Holds the folder in which the next version of a domain is built. Returns its number, which is sure from then on."""
    while True:
        version = store.latest(domain) + 1
        with locked_folder(store.work_folder(domain, version), f"domain {domain!r}"):
            if version == store.latest(domain) + 1:
                yield version
                return


def _opened(folder: Path) -> int:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # another process has just ended, and removed it
            return os.open(folder, os.O_RDONLY)


@dataclass(frozen=True)
class BuildFolder:
    """The held folder of one unfinished branch."""

    folder: Path
    paths: Sequence[Path]  # of its corpus
    plan: dict[str, Any]

    def corpus(self, store: Store) -> Corpus:
        return tokenize_corpus(self.paths, store.tokenizer(), self.folder / FOLDER)

    def documents(self, store: Store, seed: int) -> list[np.ndarray]:
        """Returns the documents of an adaptation: the whole corpus, or as many documents of a large one as fit in memory."""
        corpus = self.corpus(store)
        share = ADAPTATION_TOKENS / max(1, corpus.tokens)
        chosen = np.flatnonzero(np.random.default_rng(seed).random(len(corpus)) < share)
        readable(documents := [corpus[int(i)] for i in chosen])
        return documents

    @property
    def parts(self) -> list[Path]:
        """The folders of counts that were made before."""
        return [Path(folder) for folder in self.plan["options"].get("counts", ())]

    def count(self, store: Store, folder: Path) -> Counts:
        """Counts the n-grams of the corpus into `folder`, or adds the counts that were made before."""
        if self.parts:
            return add_counts(read_parts(self.parts, NgramSettings.of(store)), folder)
        return count_ngrams(self.corpus(store), store.space, folder)


@contextmanager
def resumed_build(
    store: Branches, branch: tuple[str, int], corpus: Sequence[Path], options: dict[str, Any], clear: Callable[[], object]
) -> Iterator[BuildFolder]:
    """Begins to build a branch in its held folder, or goes on with it. Only another `keep` may change its plan.

    One that is refused before its lower layers are there, or have begun to learn, leaves nothing: with other options or a
    corrected corpus it is a new build. `clear` removes what a build left outside of its folder.
    """
    folder = store.work_folder(*branch)
    plan, before = _plan_of(corpus, options), saved_plan(folder)
    if before != plan:
        if before is None or all(path.name.startswith(PLAN) for path in folder.iterdir()):  # nothing was made
            clear()
        elif _changed({**before, "options": {**before["options"], "keep": options.get("keep")}}, plan):
            raise InvalidInput(
                f"{folder} holds an interrupted build with {_changed(before, plan)}: give the same command to finish it, or "
                "remove that folder to start again"
            )
        else:  # the lower layers do not depend on --keep
            store.remove_begun_table(*branch)
        write_json(folder / PLAN, plan)
    try:
        yield BuildFolder(folder, corpus, plan)
    except (InvalidInput, NoSpace):
        if not store.has_lower(*branch) and not any(folder.glob("*.pt")):
            clear()
            clear_work_folder(folder)
        raise


def saved_parent_version(store: Store, branch: tuple[str, int], parent: str) -> int | None:
    """Returns the parent's version in a build that was begun or has ended, even if the parent was updated since."""
    ended = store.plan(*branch) if branch in store.domains() else None  # a build that was removed has left its plan too
    options = (saved_plan(store.work_folder(*branch)) or ended or {}).get("options", {})
    return options.get("parent version") if options.get("parent") == parent else None


def finished_table(store: Store, branch: tuple[str, int], corpus: Sequence[Path], options: dict[str, Any]) -> Table | None:
    """Returns the table of a branch if this very build has made it. Removes what a kill at its end has left."""
    if branch not in store.domains():  # only later versions are left
        return None
    table, folder = store.table(*branch), store.work_folder(*branch)
    if saved_plan(folder) is not None:
        clear_work_folder(folder)
    if store.plan(*branch) != _plan_of(corpus, options):
        return None
    say(f"{branch[0]} version {branch[1]} is there: the same corpus and options have built it")
    return table


def _plan_of(corpus: Sequence[Path], options: dict[str, Any]) -> dict[str, Any]:
    """Returns the plan of a build: its options, and its corpus as it is now."""
    corpus = [*corpus, *(Path(folder) / OF for folder in options.get("counts", ()))]
    for path in corpus:
        check_stays(path)
    inputs = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in corpus]
    return {"corpus": inputs, "options": options}


def _changed(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Says what a plan had that is another one now, as a command has it."""
    options = before["options"]
    changed = [
        f"{name if ' ' in name else '--' + name.replace('_', '-')} {_given(options.get(name))} (now {_given(value)})"
        for name, value in now["options"].items()
        if options.get(name) != value
    ]
    if before["corpus"] != now["corpus"]:
        files, given = ([path for path, *_ in plan["corpus"]] for plan in (before, now))
        changed.append(f"--corpus {' '.join(files)}" + (", as it was" if files == given else ""))
    return ", ".join(changed)


def _given(value: Any) -> Any:
    if isinstance(value, dict):  # a window
        return str(value["n"])
    return "not given" if value is None else value
