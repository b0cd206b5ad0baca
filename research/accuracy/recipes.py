"""Makes the tables that tenants are trained on, by recipes, and whole BERTs, further pretrained (HMI's observation O1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from builder.learning.bodies import WholeBody
from builder.learning.distil import WAY_OUT
from builder.learning.limits import Budget
from builder.learning.loop import ParameterGroup, Training, train
from builder.learning.masked import HEAD_RATE, HEAD_SHARE, LEARNING_RATE, MaskedHead, given_head, masked
from builder.learning.progress import Exam
from builder.learning.windows import TextPack, index_of, reading
from builder.packed_batches import positions_of
from builder.store.branches import table_spec
from builder.store.resumable import clear_work_folder, replaced
from builder.store.store import Store
from builder.tables.build_folder import locked_folder
from builder.tables.corpus import tokenize_corpus
from builder.tables.counts import Counts
from builder.tables.domain import DomainOptions, build_domain
from builder.tables.root import RootOptions, build_root
from builder.tables.table import build_table
from builder.tasks.lookup import Pack
from hplm.model.windows import Window
from hplm.plot.table import Table
from research.result_file import digest_of


@dataclass(frozen=True)
class Recipe:
    """Smaller tables are cut from the largest one of the same layers."""

    lower: int
    upper: int
    root_minutes: float
    root_keep: float  # share of the n-grams in the root's table
    root_largest: float  # share in the largest table of this root
    window: int = 3
    minutes: float = 0  # of learning the domain's corpus; 0: the lower layers are the root's
    keep: float = 0  # share of the corpus's n-grams in the domain's table; 0: the domain has no table, only the root's
    largest: float = 1.0  # share in the domain's largest table

    @property
    def root(self) -> Recipe:
        return Recipe(self.lower, self.upper, self.root_minutes, self.root_keep, self.root_largest, self.window)

    @property
    def plain(self) -> Recipe:
        """The recipe without options that make no difference."""
        return self if self.keep else self.root

    @property
    def whole(self) -> Recipe:
        """The recipe of the largest tables."""
        return replace(self, root_keep=self.root_largest, keep=self.largest if self.keep else 0)

    @property
    def described(self) -> dict[str, Any]:
        """Returns the recipe as results name it, with what all of them had in common when others were studied."""
        return {**asdict(self.plain), "learn": "masked", "dtype": "fp16"}

    @property
    def store(self) -> str:
        """The folder's name. Recipes with the same root share a store."""
        return digest_of(self.root.described)

    def branch(self, domain: str) -> str:
        return f"{domain}-{digest_of(self.described)}" if self.keep else "root"


def build_store(
    stores: Path, recipe: Recipe, name: str, model: str, roots: list[Path], corpus: Path, device: torch.device
) -> Store:
    """Returns a store with the table of a domain, or of a root. Builds it, and what it is made from, if they are missing.

    `roots`: the corpora of the root. The next call continues an interrupted one.
    """
    folder, branch, whole = stores / recipe.store, recipe.branch(name), recipe.whole
    if (folder / "plot" / branch / "1/meta.json").exists():
        return Store(folder)
    given = name, model, roots, corpus, device
    if branch != "root":
        build_store(stores, recipe.root, *given)
    if recipe != whole:
        origin = build_store(stores, whole, *given)
        if not (folder / "store.json").exists():
            tokenizer = (origin.folder / "tokenizer.json").read_text("utf-8")
            Store.create(folder, origin.model, origin.config, tokenizer, origin.lower("root", 1), origin.upper())
        keep = recipe.root_keep if branch == "root" else recipe.keep
        recut_domain(origin, whole.branch(name), Store(folder), branch, keep, device)
    elif branch == "root":
        options = RootOptions(
            recipe.root_keep, name="report", lower=recipe.lower, upper=recipe.upper, window=Window(recipe.window)
        )
        build_root(model, roots, folder, options, Budget(minutes=recipe.root_minutes), device)
    else:
        options, budget = DomainOptions(keep=recipe.keep), Budget(minutes=recipe.minutes)
        build_domain(Store(folder), branch, [corpus], options, budget, device)
    return Store(folder)


def recut_domain(origin: Store, branch: str, store: Store, name: str, keep: float, device: torch.device) -> Table:
    """Makes another table of a branch's corpus by the same lower layers, as a new branch of a store with the same root."""
    build = store.work_folder(name, 1)
    with locked_folder(build, f"domain {name!r}"):
        if (name, 1) in store.domains():
            return store.table(name, 1)
        store.remove_branch(name, 1)  # of an interrupted call, perhaps with another size
        clear_work_folder(build)
        counts, lower, known = Counts(origin.counts_folder(branch, 1)), origin.lower(branch, 1), origin.table(branch, 1)
        store.save_lower(name, 1, lower)  # before the table, which makes it a branch
        spec = table_spec(store.config, name, 1, None if name == "root" else ("root", 1), known.meta.dtype, counts.tokens)
        table = build_table(store, spec, counts, keep, lower, device, known)
        clear_work_folder(build)
        return table


def pretrained_body(store: Store, part: str, minutes: float, corpus: Path, folder: Path, device: torch.device) -> WholeBody:
    """Returns the store's original BERT, of which these layers have read the corpus. `folder` keeps it, for the next call."""
    body, kept = WholeBody.of(store), folder / "body.pt"
    if not kept.exists():
        with locked_folder(folder, f"the further pretrained {folder.name}"):
            documents = list(tokenize_corpus([corpus], store.tokenizer(), folder / "corpus"))
            _pretrain(body, store, documents, part, Budget(minutes=minutes), device, folder / "learning.pt")
            with replaced(kept) as temporary:
                torch.save(body.state_dict(), temporary)
    body.load_state_dict(torch.load(kept, weights_only=True, map_location="cpu"))
    return body


def _pretrain(
    body: WholeBody, store: Store, documents: Sequence[np.ndarray], part: str, budget: Budget, device: torch.device, saved: Path
) -> None:
    """Changes `body` in place. Fits a head first if the model has none. The same call continues an interrupted one."""
    config, given = store.config, given_head(store.model, store.config)
    head, batches = given or MaskedHead(config), partial(reading, config, documents, 0, device)
    for module in (body, head):
        module.to(device).eval()

    def loss_of(read: TextPack) -> tuple[Tensor, int]:
        texts, chance = read
        words, lengths = np.concatenate(texts), np.array([len(text) for text in texts])
        seen, guessed = masked(words, config, chance)
        positions, wanted = index_of(positions_of(lengths), device), index_of(words[guessed], device)
        pack = Pack(
            sums=lambda: torch.empty(0), tokens=index_of(seen, device), positions=positions,
            segments=torch.zeros_like(positions), lengths=lengths.tolist(), reading=index_of(guessed, device),
            rows_of=[len(guessed)], targets=wanted,
        )  # fmt: skip
        return F.cross_entropy(head(body(pack, None), body.words.weight).float(), wanted), len(words)

    def learn(title: str, group: ParameterGroup, part: Budget, savepoint: Path) -> None:
        """The last weights are kept: nothing scores them."""
        for module in (body, head):
            module.requires_grad_(False)
        training = Training(title, device, [group], batches, loss_of, lambda: Exam(0.0, 0.0), WAY_OUT)
        train(training, part, savepoint)

    if given is None:
        fitted = ParameterGroup(HEAD_RATE, dict(head.named_parameters("head")))
        learn("fitting a head", fitted, budget.part(HEAD_SHARE), saved.with_name(f"{saved.stem}-head{saved.suffix}"))
        budget = budget.part(1 - HEAD_SHARE)
    learned = ParameterGroup(LEARNING_RATE, {str(number): parameter for number, parameter in enumerate(body.part(part))})
    learn(f"pretraining, {part}", learned, budget, saved)
