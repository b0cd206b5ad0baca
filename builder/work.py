"""What a cut build left behind, and whether the same build is being asked for again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from builder.archives import check_file
from builder.corpus import Corpus, tokenize_corpus
from builder.counting import count_ngrams
from builder.counts import Counts
from builder.store import Store
from hplm.errors import InvalidInput
from hplm.model.tokenizer import Tokenizer

PLAN = "plan.json"
ADAPTATION_TOKENS = 20_000_000  # more than an adaptation reads in hours; documents beyond are left out by chance


class Work:
    """A folder for one branch in the making. It holds the plan, so that nothing is ever finished that was begun otherwise."""

    def __init__(self, folder: Path, corpus: list[Path], options: dict[str, Any], clear: Callable[[], object]) -> None:
        """`clear` removes what lies outside of the folder, of a build whose folder was removed to start over."""
        self.folder = folder
        self._paths = corpus
        plan = _plan(corpus, options)
        file = folder / PLAN
        begun = json.loads(file.read_text("utf-8")) if file.exists() else None
        if begun is None or (begun != plan and _nothing_made(folder)):
            clear()
            folder.mkdir(parents=True, exist_ok=True)
            file.with_suffix(".new").write_text(json.dumps(plan, indent=2) + "\n", "utf-8")
            file.with_suffix(".new").rename(file)
        elif begun != plan:
            changed = [name for name, value in plan["options"].items() if begun["options"].get(name) != value]
            changed += ["corpus"] * (begun["corpus"] != plan["corpus"])
            raise InvalidInput(
                f"{folder} holds a build that was cut and had other {', '.join(changed)}: give the same command to finish it, "
                "or remove that folder to start over"
            )

    def corpus(self, tokenizer: Tokenizer) -> Corpus:
        return tokenize_corpus(self._paths, tokenizer, self.folder / "corpus")

    def count(self, store: Store, tokenizer: Tokenizer, folder: Path) -> Counts:
        """The corpus's n-grams, counted into `folder`."""
        return count_ngrams(self.corpus(tokenizer), store.space, folder)

    def close(self) -> None:
        """The branch is finished, or refused."""
        _put_away(self.folder)


def was_just_finished(folder: Path, corpus: list[Path], options: dict[str, Any]) -> bool:
    """Whether this very build made a branch that is there, and was cut before it put its folder away; it is put away now."""
    same = (folder / PLAN).exists() and json.loads((folder / PLAN).read_text("utf-8")) == _plan(corpus, options)
    _put_away(folder)
    return same


def _nothing_made(folder: Path) -> bool:
    """An earlier command failed at once, over a misspelt name perhaps: it binds nobody."""
    return all(path.stem == Path(PLAN).stem for path in folder.iterdir())


def _plan(corpus: list[Path], options: dict[str, Any]) -> dict[str, Any]:
    for path in corpus:
        check_file(path)
    inputs = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in corpus]
    return {"corpus": inputs, "options": options}


def _put_away(folder: Path) -> None:
    """The plan last: while it is there, the same command is known again."""
    if not folder.exists():
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != PLAN:
            path.unlink()
    (folder / PLAN).unlink(missing_ok=True)
    folder.rmdir()


def some_documents(corpus: Corpus, seed: int) -> list[np.ndarray]:
    """What an adaptation learns from: all of a corpus, or of a large one as many documents as fit in memory."""
    if corpus.tokens <= ADAPTATION_TOKENS:
        return list(corpus)
    share = ADAPTATION_TOKENS / corpus.tokens
    chosen = np.flatnonzero(np.random.default_rng(seed).random(len(corpus)) < share)
    return [corpus[int(i)] for i in chosen]
