"""Builds a domain: a branch whose lower stack is adapted to a corpus and whose frequent n-grams have a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from builder.learning.bodies import checkpoint_of
from builder.learning.causal import learn_windows
from builder.learning.distil import distil
from builder.learning.limits import Budget
from builder.learning.masked import MaskedHead, further_pretrain, given_head
from builder.store.branches import table_spec
from builder.store.resumable import clear_work_folder
from builder.store.store import Store, check_name
from builder.tables.build_folder import (
    BuildFolder,
    finished_table,
    locked_folder,
    locked_next_version,
    resumed_build,
    saved_parent_version,
)
from builder.tables.counts import Counts, add_counts
from builder.tables.ranking import Ranking
from builder.tables.root import save_report
from builder.tables.table import TableOptions, build_table, check_table, chosen_keep
from hplm.errors import InvalidInput, some
from hplm.model.stacks import LowerStack
from hplm.options import MIN_TOKENS
from hplm.plot.meta import TableSpec
from hplm.plot.table import Table

NAMED = 20  # the most users of a domain that an error names


@dataclass(frozen=True)
class DomainOptions(TableOptions):
    dtype: str = "fp16"
    parent: str = "root"
    learn: str | None = None  # how the lower layers learn the corpus
    min_tokens: int = MIN_TOKENS


Adapt = Callable[[BuildFolder, tuple[str, int]], None]  # saves a branch's lower stack, made of that of the given branch


def build_domain(
    store: Store, name: str, corpus: list[Path], options: DomainOptions, budget: Budget, device: torch.device
) -> Table:
    """Builds a branch. Only the lower layers learn; the upper half is shared and stays unchanged (HMI, observation O1).

    The same call after an interruption continues the build, and after its end changes nothing.
    """
    check_name("domain", name)
    if not store.config.lower_layers:
        raise InvalidInput(f"backbone {store.config.name!r} has no lower layers, whose tables make a domain: use its root")
    working = store.work_folder(name, 1)
    with locked_folder(working, f"domain {name!r}"):
        parent = (options.parent, saved_parent_version(store, (name, 1), options.parent) or store.latest(options.parent))
        plan = {"parent version": parent[1], **options.planned(), **asdict(budget)}
        if store.versions(name):
            if (table := finished_table(store, (name, 1), corpus, plan)) is not None:
                return table
            raise InvalidInput(
                f"domain {name!r} is in {store.folder} already: add to it with `hplm domain update`, or choose another --name"
            )
        with resumed_build(store, (name, 1), corpus, plan, partial(store.remove_branch, name, 1)) as build:
            if not store.has_lower(name, 1) and not build.parts:
                _refuse_little(build.corpus(store).tokens, name, options)
            counts = build.count(store, store.counts_folder(name, 1))
            store.save_origin(name, 1, corpus, build.plan)
            keep = chosen_keep(counts, root=False, keep=options.keep)
            spec = table_spec(store.config, name, 1, parent, options.dtype, counts.tokens)
            adapt = partial(_adapt, store, (name, 1), options, budget, device)
            return _tabulated(store, build, spec, counts, keep, parent, adapt, device)


def _tabulated(
    store: Store, build: BuildFolder, spec: TableSpec, counts: Counts, keep: float, start: tuple[str, int], adapt: Adapt,
    device: torch.device, known: Table | None = None,
) -> Table:  # fmt: skip
    """Makes the lower stack of a branch from that of `start`, and then its table. Then its folder is empty."""
    if not store.has_lower(spec.domain, spec.version):
        check_table(store.folder, spec, counts, keep, store.lower(*start), device, known.meta.keys if known is not None else 0)
        adapt(build, start)
    store.chain(*start)  # fails if it was deleted meanwhile
    table = build_table(store, spec, counts, keep, store.lower(spec.domain, spec.version), device, known)
    clear_work_folder(build.folder)
    return table


@dataclass(frozen=True)
class UpdateOptions(TableOptions):
    """Without `keep` and `dtype`, they are those of the version before."""

    dtype: str | None = None
    learn: str | None = None


def update_domain(
    store: Store, name: str, corpus: list[Path], options: UpdateOptions, budget: Budget, device: torch.device
) -> Table:
    """Builds a branch's next version: the counts of the new corpus are added to the old ones.

    Without adaptation, the lower stack and all existing rows stay, and only new n-grams are computed. With it, the lower
    stack learns on, and every row is new. The same call after its end changes nothing.
    """
    plan = {**options.planned(), **asdict(budget)}
    with locked_next_version(store, name) as version:
        before = store.table(name, version - 1)
        with locked_folder(store.work_folder(name, version - 1), f"domain {name!r}"):
            if finished_table(store, (name, version - 1), corpus, plan) is not None:
                store.sweep()  # it may have been killed before
                return before
        dtype = options.dtype or before.meta.dtype
        parent = before.meta.parent_branch
        if parent is None and not budget.empty:
            raise InvalidInput(
                "the root's lower stack and the shared upper half were adapted together: give --minutes 0, or build a new root"
            )
        old_counts = Counts(store.counts_folder(name, version - 1))
        keep = Ranking(old_counts, root=parent is None).keep_for(before.meta.keys) if options.keep is None else options.keep
        with resumed_build(store, (name, version), corpus, plan, partial(store.remove_branch, name, version)) as build:
            counts = add_counts([old_counts, build.count(store, build.folder / "counts")], store.counts_folder(name, version))
            store.save_origin(name, version, [*store.corpus(name, version - 1), *corpus], build.plan)
            spec = table_spec(store.config, name, version, parent, dtype, counts.tokens)
            learned = not budget.empty
            known = before if not learned and dtype == before.meta.dtype else None
            adapt = partial(_adapt, store, (name, version), options, budget, device)
            table = _tabulated(store, build, spec, counts, keep, (name, version - 1), adapt, device, known)
        store.sweep()
        return table


def delete_domain(store: Store, name: str, version: int | None = None) -> list[int]:
    """Deletes all versions of a domain, or one. Refuses while tenants or other domains need it."""
    newest = store.latest(name)  # its error names the known domains
    if name == "root" and version is None:
        raise InvalidInput("the root cannot be deleted, since every domain falls back to it: remove the store instead")
    if version in (None, newest):
        holding = locked_next_version(store, name)
    else:
        holding = locked_folder(store.work_folder(name, version), f"domain {name!r}")
    with holding:
        versions = [found for found in store.versions(name) if version in (None, found)]
        if not versions:
            raise InvalidInput(f"domain {name!r} has no version {version}")
        _refuse_used(store, name, versions, version)
        if store.latest(name) in versions:
            store.remove_unfinished(name)
        for found in versions:
            store.remove_branch(name, found)
    return versions


def _refuse_used(store: Store, name: str, versions: list[int], version: int | None) -> None:
    users = store.users()
    standing = sorted(user for found in versions for user in users[name, found])
    if standing:
        which = f"domain {name!r}" if version is None else f"version {version} of domain {name!r}"
        raise InvalidInput(
            f"{which} is in use by {some(standing, NAMED)}: delete those first, or build them on another domain. "
            "Finish an interrupted build with its command, or remove its folder"
        )


def _refuse_little(tokens: int, name: str, options: DomainOptions) -> None:
    if tokens < options.min_tokens:
        raise InvalidInput(
            f"the corpus of domain {name!r} has {tokens:,} tokens, fewer than {options.min_tokens:,}: its table would "
            f"rarely be hit. Give more text, build the tenants on {options.parent!r}, or lower --min-tokens"
        )


def _adapt(
    store: Store, branch: tuple[str, int], options: DomainOptions | UpdateOptions, budget: Budget, device: torch.device,
    build: BuildFolder, start: tuple[str, int],
) -> None:  # fmt: skip
    """Makes the lower stack of `branch` from that of `start`."""
    known, learn = (LEARN_CAUSAL if store.config.is_decoder else LEARN), options.learn
    if learn is None:
        learn = next(iter(known))
    if learn not in known:
        kind = "a decoder's" if store.config.is_decoder else "an encoder's"
        raise InvalidInput(f"--learn {learn!r} does not fit {kind} domain: choose {' or '.join(known)}")
    lower = store.lower(*start)
    if (head := store.masked_head(*start)) is not None:
        store.save_masked_head(*branch, head)  # until training improves it
    if not budget.empty:
        documents = build.documents(store, options.seed)
        given = documents, budget, options.seed, device, build.folder / "learning.pt"
        report = known[learn](store, start, branch, lower, *given)
        save_report(store, *branch, {"learn": learn, **report})
    store.save_lower(*branch, lower)


def _masked(store: Store, start: tuple[str, int], branch: tuple[str, int], lower: LowerStack, *given: Any) -> dict[str, Any]:
    """Trains on masked words. The head is saved with the branch, so that an update need not train a new one."""
    head, head_is = MaskedHead(store.config), "the branch's"
    if (weights := store.masked_head(*start)) is not None:
        head.load_state_dict(weights)
    else:
        head, head_is = given_head(store.model, store.config), "the checkpoint's"
    head, report = further_pretrain(store.config, lower, store.upper(), head, head_is, *given)
    store.save_masked_head(*branch, head.state_dict())
    return report


def _distil(store: Store, start: tuple[str, int], branch: tuple[str, int], lower: LowerStack, *given: Any) -> dict[str, Any]:
    return distil(checkpoint_of(store.model, store.config), lower, store.upper(), *given, train_upper=False)


def _next(store: Store, start: tuple[str, int], branch: tuple[str, int], lower: LowerStack, *given: Any) -> dict[str, Any]:
    return learn_windows(None, store.config, lower, store.upper(), *given)


# masked: guess masked words of the corpus (HMI's further pretraining). distil: match the original model on the corpus.
LEARN = {"masked": _masked, "distil": _distil}
LEARN_CAUSAL = {"next": _next}  # guess the next token of the corpus
