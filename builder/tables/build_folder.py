"""The folder of an unfinished build: one process at a time holds it, and the same command continues it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from builder.learning.distil import readable
from builder.store.resumable import PLAN, begun_plan, write_json
from builder.store.store import Store, check_name
from builder.tables.corpus import FOLDER, Corpus, tokenize_corpus
from builder.tables.counts import Counts, count_ngrams
from builder.tables.text_files import check_file
from hplm.errors import InvalidInput
from hplm.model.tokenizer import Tokenizer
from hplm.plot.keys import KeySpace
from hplm.plot.room import NoSpace

ADAPTATION_TOKENS = 20_000_000  # more than an adaptation reads in hours; of a larger corpus it takes random documents


@contextmanager
def held(folder: Path, what: str) -> Iterator[None]:
    """Holds the folder in which `what` is built, for this process alone. Removes it in the end if it is empty."""
    handle = _opened(folder)
    try:
        if not _locked(handle, folder):
            raise InvalidInput(f"{what} is being built by another process: wait for it")
        try:
            yield
        finally:
            with suppress(OSError):  # an interrupted build continues from its content
                folder.rmdir()
    finally:
        os.close(handle)


@contextmanager
def held_tenant(store: Store, tenant_id: str) -> Iterator[Path]:
    """Holds the folder in which a tenant's next version is made, and returns it. Refuses a bad name."""
    check_name("tenant", tenant_id)
    with held(folder := store.tenant_work_folder(tenant_id), f"tenant {tenant_id!r}"):
        yield folder


@contextmanager
def held_next(store: Store, domain: str) -> Iterator[int]:
    """Holds the folder in which the next version of a domain is built. Returns its number, which is sure from then on."""
    while True:
        version = store.latest(domain) + 1
        with held(store.work_folder(domain, version), f"domain {domain!r}"):
            if version == store.latest(domain) + 1:
                yield version
                return


def _opened(folder: Path) -> int:
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # another process has just ended, and removed it
            return os.open(folder, os.O_RDONLY)


def _locked(handle: int, folder: Path) -> bool:
    """Returns False if another process holds the folder, or has just removed it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(handle), folder.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


class BuildFolder:
    """The held folder of one unfinished branch and its plan. A build with another plan is never continued."""

    def __init__(self, folder: Path, corpus: list[Path], options: dict[str, Any], clear: Callable[[], object]) -> None:
        """`clear` removes what a build left outside of this folder, when the folder was removed to start again."""
        self.folder = folder
        self._paths, self._clear = corpus, clear
        plan = _plan_of(corpus, options)
        begun = begun_plan(folder)
        if begun is None or (begun != plan and _nothing_made(folder)):
            clear()
            write_json(folder / PLAN, plan)
            return
        before, now = (_options(one) for one in (begun, plan))
        changed = [f"{name} {before.get(name)} (now {value})" for name, value in now.items() if before.get(name) != value]
        if begun["corpus"] != plan["corpus"]:
            files = [[path for path, *_ in one["corpus"]] for one in (begun, plan)]
            changed.append(f"--corpus {' '.join(files[0])}" + (", as it was" if files[0] == files[1] else ""))
        if changed:
            raise InvalidInput(
                f"{folder} holds an interrupted build with {', '.join(changed)}: give the same command to finish it, or remove "
                "that folder to start again"
            )

    @property
    def has_corpus(self) -> bool:
        return bool(self._paths)

    def corpus(self, tokenizer: Tokenizer) -> Corpus:
        with self._binding_nobody():
            return tokenize_corpus(self._paths, tokenizer, self.folder / FOLDER)

    def documents(self, tokenizer: Tokenizer, seed: int) -> list[np.ndarray]:
        """Returns the documents of an adaptation: the whole corpus, or as many documents of a large one as fit in memory."""
        documents = _some_documents(self.corpus(tokenizer), seed)
        with self._binding_nobody():
            readable(documents)
        return documents

    def count(self, space: KeySpace, tokenizer: Tokenizer, folder: Path) -> Counts:
        """Counts the n-grams of the corpus into `folder`."""
        return count_ngrams(self.corpus(tokenizer), space, folder)

    @contextmanager
    def refusable(self) -> Iterator[None]:
        """Removes all that was made if the disk has no room for the table: with another --keep it is a new build.

        What an interrupted call has learned stays: the same command goes on once the disk has room.
        """
        try:
            yield
        except NoSpace:
            if not any(self.folder.glob("*.pt")):
                self._clear()
                self.close()
            raise

    def close(self) -> None:
        """Removes the folder: the branch is finished, or refused."""
        put_away(self.folder)

    @contextmanager
    def _binding_nobody(self) -> Iterator[None]:
        """Removes the folder if the corpus is refused: a corrected corpus is a new build."""
        try:
            yield
        except InvalidInput:
            self.close()
            raise


def parent_version_begun(folder: Path, parent: str) -> int | None:
    """Returns the parent's version in an interrupted build, which continues on it even if the parent was updated since."""
    options = (begun_plan(folder) or {}).get("options", {})
    return options.get("parent version") if options.get("parent") == parent else None


def was_just_finished(folder: Path, corpus: list[Path], options: dict[str, Any]) -> bool:
    """Returns whether this build finished its branch but was interrupted before it removed its folder."""
    return begun_plan(folder) == _plan_of(corpus, options)


def put_away(folder: Path) -> None:
    """Removes the folder's content, the plan last: as long as it is there, the same command is recognised."""
    for path in sorted(folder.iterdir(), key=lambda path: (path.name == PLAN, path.name)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _options(plan: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a plan as a command has them. A window is two of them."""
    options = json.loads(json.dumps(plan["options"]))  # as a file returns it
    if (window := options.pop("window", None)) is not None:
        options |= {"window": window["n"], "causal": window["causal"]}
    return {
        name if " " in name else f"--{name.replace('_', '-')}": "not given" if value is None else value
        for name, value in options.items()
    }


def _nothing_made(folder: Path) -> bool:
    """Returns whether an earlier command failed before it made anything: its plan need not be repeated."""
    return all(path.name.startswith(PLAN) for path in folder.iterdir())


def _plan_of(corpus: list[Path], options: dict[str, Any]) -> dict[str, Any]:
    """Returns the plan of a build, as a file returns it: its options, and its corpus as it is now."""
    for path in corpus:
        check_file(path)
    inputs = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in corpus]
    return {"corpus": inputs, "options": options}


def _some_documents(corpus: Corpus, seed: int) -> list[np.ndarray]:
    if corpus.tokens <= ADAPTATION_TOKENS:
        return list(corpus)
    share = ADAPTATION_TOKENS / corpus.tokens
    chosen = np.flatnonzero(np.random.default_rng(seed).random(len(corpus)) < share)
    return [corpus[int(i)] for i in chosen]
