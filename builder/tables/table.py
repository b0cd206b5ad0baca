"""Makes a table in the store from counted n-grams and a lower stack. Its size is known before anything is computed."""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from builder.console import duration, progress_bar, say
from builder.learning.limits import check_seed
from builder.store.store import Store
from builder.tables.counts import Counts
from builder.tables.ranking import Ranking, check_keep
from hplm.disk import check_room
from hplm.model.stacks import LowerStack
from hplm.plot.index import IndexMeta
from hplm.plot.meta import TableMeta, TableSpec
from hplm.plot.table import Table
from hplm.plot.writing import BATCH, write_table

USUAL_NGRAMS = 1_000_000  # the most that a table takes if nothing else is asked for: 4.6 GB of a BERT-base in fp16
PROBED = 256  # n-grams on a CPU
FILLED = 0.9  # of the free space, by a table that is proposed instead of one that is too large


@dataclass(frozen=True)
class TableOptions:
    """The options of every build of a branch."""

    keep: float | None = None  # default: all, or as many as a table usually takes (`chosen_keep`)
    seed: int = 0  # of what learns
    counts: list[str] = field(default_factory=list, kw_only=True)  # folders of `hplm build counts`; default: count the corpus

    def __post_init__(self) -> None:
        check_keep(self.keep)
        check_seed(self.seed)

    def planned(self) -> dict[str, Any]:
        """Returns the options as plans have them: those of 0.1.0 know no counts."""
        return {name: value for name, value in asdict(self).items() if name != "counts" or value}


def build_table(
    store: Store, spec: TableSpec, counts: Counts | None, keep: float, lower: LowerStack, device: torch.device,
    known: Table | None = None,
) -> Table:  # fmt: skip
    """Builds a table of the most frequent n-grams. The root also holds every single token, so that each lookup ends in it.

    Without counts it holds nothing else.

    Cut anywhere, a call with the same arguments goes on. `known`, an earlier version by the same lower stack, saves computing.
    """
    keys = spec.space.unigrams() if counts is None else _keys(spec, Ranking(counts, root=spec.parent is None), keep)
    lower = lower.to(device).eval()

    @torch.inference_mode()
    def values_of(windows: np.ndarray) -> Tensor:
        return lower(torch.from_numpy(windows).to(device)).cpu()

    folder = store.table_folder(spec.domain, spec.version)
    title = f"{spec.domain}: computing the table"
    with progress_bar(title=title, total=len(keys), unit="n-gram", unit_scale=True) as bar:
        return write_table(folder, spec, keys, values_of, progress=bar.update, known=known)


def table_bytes(spec: TableSpec, ngrams: int, dtype: str) -> int:
    """Returns the bytes of such a table with so many n-grams, without the few bytes of padding after its keys."""
    of: dict[str, Any] = {field.name: getattr(spec, field.name) for field in fields(TableSpec)} | {"dtype": dtype}
    return sum(
        TableMeta(**of, keys=ngrams, least_cosine=1.0, index=IndexMeta(ngrams, spec.space.words, 0, {})).sizes().values()
    )


def _keys(spec: TableSpec, ranking: Ranking, keep: float) -> np.ndarray:
    """Returns the first keys of the ranking and, for a root, the single tokens that are not among them."""
    space, keys = spec.space, ranking.keys(ranking.number(keep))
    if not ranking.root:
        return keys
    alone = keys[((keys & space.masks[-1]) == keys).all(1)]
    missing = np.ones(spec.vocabulary, dtype=bool)
    missing[space.unpack(alone)[:, space.window.centre] - 1] = False
    return np.concatenate([keys, space.unigrams()[missing]])


def chosen_keep(counts: Counts | None, root: bool, keep: float | None) -> float:
    """Returns the share of the windows that a table takes. `keep` None: all, or as many as a table usually takes."""
    if keep is not None or counts is None:
        return 1.0 if keep is None else keep
    return Ranking(counts, root).keep_for(USUAL_NGRAMS)


def check_table(
    store: Path, spec: TableSpec, counts: Counts | None, keep: float, lower: LowerStack, device: torch.device, known: int = 0
) -> None:
    """Prints the size of a table and the time to compute it here. Refuses one that the disk has no room for.

    `known`: the number of rows that are copied from the version before.
    """
    what = f"the table of domain {spec.domain!r}"
    if counts is None:  # it holds the words of a decoder, which are copied
        check_room(store, table_bytes(spec, spec.vocabulary, spec.dtype), what, "free some space")
        return
    ranking = Ranking(counts, spec.parent is None)
    ngrams, most = ranking.size(keep), ranking.size(1.0)
    needed, computed = table_bytes(spec, ngrams, spec.dtype), max(0, ngrams - known)
    said = f"{spec.domain}: {ngrams:,} n-grams will take {needed / 1e9:,.2f} GB"
    if computed and counts.levels[0]:
        said += f" and about {duration(computed / _rate(spec, counts, lower, device))} to compute here"
    if ngrams < most:
        said += f" (--keep {keep:.2g} of {most:,})"
    say(said)
    fitting = ranking.keep_for(int(FILLED * ngrams * shutil.disk_usage(store).free / max(1, needed)))
    check_room(store, needed, what, f"give --keep {fitting:.2g}, or --dtype int8, or free some space")


@torch.no_grad()  # and not in inference mode: the stack moves to the device, and learns there afterwards
def _rate(spec: TableSpec, counts: Counts, lower: LowerStack, device: torch.device) -> float:
    """Returns the n-grams that are computed a second, from the second of two equal batches: the first one allocates memory."""
    keys = counts.run(0).read_keys(0, min(counts.levels[0], BATCH if device.type == "cuda" else PROBED))
    windows, lower = torch.from_numpy(spec.space.unpack(keys)).to(device), lower.to(device).eval()
    seconds = 0.0
    for _ in range(2):
        started = time.monotonic()
        lower(windows).cpu()
        seconds = time.monotonic() - started
    return len(keys) / max(seconds, 1e-9)
