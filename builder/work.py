"""What a cut build left behind, and whether the same build is being asked for again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from builder.corpus import Corpus, tokenize_corpus
from builder.counting import count_ngrams
from builder.counts import Counts
from builder.store import Store
from hplm.errors import InvalidInput
from hplm.model.tokenizer import Tokenizer

ADAPTATION_TOKENS = 20_000_000  # more than an adaptation reads in hours; documents beyond are left out by chance


class Work:
    """A folder for one branch in the making. It holds the plan, so that nothing is ever finished that was begun otherwise."""

    def __init__(self, folder: Path, corpus: list[Path], options: dict[str, Any]) -> None:
        self.folder = folder
        self._paths = corpus
        for path in corpus:
            if not path.exists():
                raise InvalidInput(f"{path} does not exist")
        inputs = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns] for path in corpus]
        plan = {"corpus": inputs, "options": options}
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "plan.json"
        if not file.exists():
            file.with_suffix(".new").write_text(json.dumps(plan, indent=2) + "\n", "utf-8")
            file.with_suffix(".new").rename(file)
        begun = json.loads(file.read_text("utf-8"))
        if begun != plan:
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
        """The branch is finished."""
        shutil.rmtree(self.folder)


def some_documents(corpus: Corpus, seed: int) -> list[np.ndarray]:
    """What an adaptation learns from: all of a corpus, or of a large one as many documents as fit in memory."""
    if corpus.tokens <= ADAPTATION_TOKENS:
        return list(corpus)
    share = ADAPTATION_TOKENS / corpus.tokens
    chosen = np.flatnonzero(np.random.default_rng(seed).random(len(corpus)) < share)
    return [corpus[int(i)] for i in chosen]
