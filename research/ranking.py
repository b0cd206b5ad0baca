"""Compares ways to choose the n-grams of a table: how much of their corpus they cover, how well they explain an unread text.

    python -m research.ranking

Takes the counts, the root's lower stack and the tenants' test texts of a finished demo, and trains nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from builder.store.store import Store
from builder.tables.counts import Counts
from builder.tables.ranking import Ranking
from builder.training.tasks import training_task
from demo.data import DemoTenant, data_of
from hplm.errors import HplmError
from hplm.plot.index import Index, write_index
from research.storage import finished_demo

KEEPS = (0.1, 0.04, 0.01, 0.004, 0.001)
FACTORS = (1, 2, 4, 8)
TEXTS = 40  # of each tenant
BATCH = 2048


class Ngrams:
    """All n-grams of a corpus, level by level, in each level the most frequent first."""

    def __init__(self, counts: Counts) -> None:
        self.space = counts.space
        keys, numbers = [], []
        for level, rows in enumerate(counts.levels):
            run = counts.run(level)
            number = run.read_counts(0, rows).astype(np.int64)
            by_number = np.argsort(-number, kind="stable")
            keys.append(run.read_keys(0, rows)[by_number])
            numbers.append(number[by_number])
        self.keys, self.counts = np.concatenate(keys), np.concatenate(numbers)
        self.levels = np.repeat(np.arange(len(keys)), counts.levels)
        self._share = np.concatenate([(np.arange(rows) + 0.5) / rows for rows in counts.levels])  # of its level, up to it

    @cached_property
    def together(self) -> np.ndarray:
        """The order of all levels by count."""
        return np.lexsort((-self.levels, -self.counts))

    def apart(self, factor: float) -> np.ndarray:
        """Returns the order in which `factor` times the share of shorter forms is beside that of whole windows."""
        return np.lexsort((-self.levels, np.where(self.levels, self._share / factor, self._share)))

    def covered(self, chosen: np.ndarray) -> float:
        """Returns the share of the corpus's whole windows that these n-grams are."""
        whole = self.levels == 0
        return self.counts[chosen][whole[chosen]].sum() / self.counts[whole].sum()


class Text:
    """A text that no table has read, with the lower stack's vectors of each level of its windows."""

    def __init__(self, store: Store, tenants: Sequence[DemoTenant]) -> None:
        read = [training_task(tenant.task).read(tenant.test).examples[:TEXTS] for tenant in tenants]
        tokenizer, self._window = store.tokenizer(), store.space.window
        encoded = [tokenizer.encode(one.text, one.pair, truncate=True).tokens for examples in read for one in examples]
        self.tokens, self.lengths = np.concatenate(encoded), np.array([len(tokens) for tokens in encoded])
        whole = self._window.of(self.tokens, self.lengths)
        lower = store.lower("root", 1).eval()
        self._vectors = [_computed(lower, np.where(kept, whole, 0)) for kept in self._window.levels()]

    def explained(self, levels: np.ndarray) -> float:
        """Returns the share of the variance of its tokens that is left if each window is found at this level."""
        found = self._vectors[0].clone()
        for level, vectors in enumerate(self._vectors):
            here = torch.from_numpy(levels == level)
            found[here] = vectors[here]
        whole = self._window.aggregate(self._vectors[0])
        missed = (self._window.aggregate(found) - whole).square().sum() / (whole - whole.mean(0)).square().sum()
        return 1 - float(missed)


@torch.inference_mode()
def _computed(lower: torch.nn.Module, windows: np.ndarray) -> Tensor:
    return torch.cat([lower(torch.from_numpy(windows[start : start + BATCH])) for start in range(0, len(windows), BATCH)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m research.ranking", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(".hplm/demo"), help="folder of the demo (default: %(default)s)")
    args = parser.parse_args()
    try:
        folder = finished_demo(args.folder)
        store = Store(folder / "store")
        for domain, version in store.domains():
            counts = Counts(store.counts_folder(domain, version))
            print(f"\n{domain}: {counts.tokens:,} tokens, {' + '.join(f'{rows:,}' for rows in counts.levels)} n-grams\n")
            print("\n".join(coverage_lines(counts, domain == "root")))
        text = Text(store, data_of(folder / "data").tenants)
        print(f"\nthe root on {len(text.tokens):,} unread tokens, by the number of n-grams beside single tokens\n")
        print("\n".join(unread_lines(Ngrams(Counts(store.counts_folder("root", 1))), text)))
    except HplmError as error:
        print(f"ranking: {error}", file=sys.stderr)
        return 1
    return 0


def coverage_lines(counts: Counts, root: bool) -> Iterator[str]:
    """Yields a table: what both ways of ranking keep of a corpus, for some shares."""
    ngrams, ranking = Ngrams(counts), Ranking(counts, root)
    names = [f"{tokens}-grams" for tokens in counts.space.window.levels().sum(1).tolist()]
    yield from _head("keep", "ranked", *names, f"{names[0]} of the corpus covered")
    for keep in KEEPS:
        apart = ngrams.apart(ranking.shorter)[: ranking.number(keep)]
        for way, chosen in (("together", ngrams.together[: round(keep * counts.distinct)]), ("apart", apart)):
            held = np.bincount(ngrams.levels[chosen], minlength=len(names)).tolist()
            yield _row(f"{keep:.1%}", way, *(f"{count:,}" for count in held), f"{ngrams.covered(chosen):.1%}")


def unread_lines(ngrams: Ngrams, text: Text) -> Iterator[str]:
    """Yields a table: where windows are found and what that explains, for tables with as many rows, chosen in several ways."""
    longer = ngrams.levels < ngrams.levels.max()  # a root has all single tokens
    ways = {"together": ngrams.together} | {f"apart, x {factor}": ngrams.apart(factor) for factor in FACTORS}
    ways |= {"whole windows alone": ngrams.apart(1e-9), "shorter forms first": ngrams.apart(1e9)}
    names = [f"{tokens}-gram" for tokens in ngrams.space.window.levels().sum(1).tolist()]
    yield from _head("n-grams", "ranked", *names, "explained")
    places = _places(ngrams, text)
    for share in reversed(KEEPS):
        number = round(share * int(longer.sum()))
        for way, order in ways.items():
            ranks = np.full(len(order) + 1, len(order))  # the last is that of an n-gram which the corpus lacks
            ranks[order[longer[order]]] = np.arange(longer.sum())
            found = ranks[places] < number
            found[-1] = True
            levels = found.argmax(0)
            shares = np.bincount(levels, minlength=len(names)) / len(levels)
            yield _row(f"{number:,}", way, *(f"{share:.1%}" for share in shares), f"{text.explained(levels):.3f}")


def _places(ngrams: Ngrams, text: Text) -> np.ndarray:
    """Returns which n-gram each window of a text is, levels x tokens; -1: none."""
    whole = ngrams.space.of(text.tokens, text.lengths)
    with tempfile.TemporaryDirectory() as folder:
        index = Index(Path(folder), write_index(Path(folder), ngrams.keys))
        return np.stack([index.find(whole & mask) for mask in ngrams.space.masks]) - 1


def _head(*titles: str) -> Iterator[str]:
    yield _row(*titles)
    yield "|---" * len(titles) + "|"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
