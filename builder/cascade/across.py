"""Links a tenant to one of a larger backbone: profiles both on the same labelled texts, and chooses which texts go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from builder.cascade.candidates import MOST_TAIL, Answered, Candidate, Measured, candidates
from builder.cascade.kept import Kept
from builder.cascade.levels import open_levels, own
from builder.cascade.selection import Target, front_of, reported, select
from builder.cascade.workload import Workload, words_in
from builder.evaluation.unseen import UnseenTexts
from builder.store.links import link_of, save_link
from builder.store.resumable import digest_of
from builder.store.store import Store, TenantFile
from builder.training.examples import Reader
from builder.training.labelled import Example, Labelled
from builder.training.tasks import training_task
from hplm.engine.engine import Precision
from hplm.errors import Broken, InvalidInput
from hplm.levels.pruning import runs_of, without_words
from hplm.tenants.link import WITHOUT_LINKS, Link, has_links

FOLDER = "across"  # of kept answers


@dataclass(frozen=True)
class Side:
    """A tenant of one of the two backbones."""

    store: Store
    tenant: TenantFile

    @property
    def backbone(self) -> str:
        return self.store.config.name

    def __str__(self) -> str:
        return f"tenant {self.tenant.id!r} of backbone {self.backbone!r}"


def link_tenants(
    near: Side,
    far: Side,
    file: Path,
    target: Target,
    precisions: Sequence[Precision],
    device: torch.device,
    seen: Sequence[Path] = (),
    show_progress: bool = True,
) -> dict[str, Any]:
    """Stores the link beside the version of `near`, and returns what is known of its plan.

    `precisions`: in which both are served. `seen`: more files of texts to leave out, also moved ones; what the training of
    either tenant has seen is left out too.
    """
    check_sides(near, far)
    of_far = UnseenTexts(far.store, far.tenant, file, seen, "a link")
    unseen = UnseenTexts(near.store, near.tenant, file, [*seen, *of_far.files], "a link")
    both = _Both.opened(near, far, unseen, precisions, device, show_progress)
    measured = both.measured()
    last = len(measured.whole) - 1
    tried = [
        one
        for one in tqdm(candidates(measured), desc="trying plans", unit="plan", disable=not show_progress)
        if len(one.plan.steps) > 1 and one.plan.steps[-1].level == last
    ]
    if not tried:
        raise InvalidInput(
            f"{near}: each plan that goes on to {far} scores less than its levels do or takes {MOST_TAIL:g} times as long as "
            "the slower of them, so there is no link"
        )
    strong = measured.scores[last]
    try:
        chosen = select(front_of(tried, last), target, strong)[0]
    except InvalidInput as error:
        raise InvalidInput(f"{near}, which would go on to {far}: {error}") from None
    link = Link(far.backbone, far.tenant.id, far.tenant.version, chosen.plan)
    report = _report(near, far, unseen, measured, both, chosen)
    is_new = _current(near) != link
    save_link(near.store, near.tenant, link, report)
    both.near.answers.sweep()
    return {**report, "changed": is_new}


def check_sides(near: Side, far: Side) -> None:
    """Refuses tenants that cannot be linked."""
    if near.backbone == far.backbone:
        raise InvalidInput(
            f"both stores are of backbone {near.backbone!r}, and a link leads to another one: within a backbone, "
            "`hplm cascade build` makes levels"
        )
    for name, mine, other in (
        ("task", near.tenant.task, far.tenant.task),
        ("labels", ", ".join(near.tenant.labels), ", ".join(far.tenant.labels)),
    ):
        if mine != other:
            raise InvalidInput(
                f"{near} has the {name} {mine}, but {far} has {other}: build both from data with the same task and labels"
            )
    if not has_links(training_task(near.tenant.task).served):
        raise InvalidInput(
            f"{near} has the task {near.tenant.task}: {WITHOUT_LINKS}, because backbones divide a passage into other tokens"
        )


def _current(near: Side) -> Link | None:
    try:
        return link_of(near.store, near.tenant)
    except Broken:  # it is for other levels, and replaced now
        return None


@dataclass(frozen=True)
class _Both:
    """The levels of both tenants, and the same labelled texts, looked up in both backbones."""

    near: Workload
    far: Workload  # with one level

    @classmethod
    def opened(
        cls,
        near: Side,
        far: Side,
        unseen: UnseenTexts,
        precisions: Sequence[Precision],
        device: torch.device,
        show_progress: bool,
    ) -> _Both:
        levels, fresh, task = open_levels(near.store, near.tenant), unseen.fresh, unseen.task
        if levels[-1].calibration is None:
            raise InvalidInput(f"{near} has no calibration, so nothing says how sure it is: calibrate it with `hplm calibrate`")
        far_level = own(far.store, far.tenant)
        texts_of = {
            "texts": unseen.digest,
            "seen": unseen.seen,
            "tables": [one.store.chain_digest(one.tenant.domain, one.tenant.domain_version) for one in (near, far)],
            "tokenizer": digest_of(far.store.folder / "tokenizer.json"),
            "precision": [precision.name for precision in precisions],
            "device": device.type,
        }
        answers = Kept(near.store.tenant_folder(near.tenant.id, near.tenant.version), texts_of, FOLDER)
        loads: list[Workload] = []
        for side, own_levels, precision in zip((near, far), (levels, [far_level]), precisions, strict=True):
            reader = Reader(side.store, side.tenant.domain, side.tenant.domain_version)
            texts = reader.read(fresh, task, side.tenant.labels, show_progress)
            watched = side is near
            loads.append(
                Workload(
                    side.tenant, task, own_levels, fresh, reader, texts, precision, device, answers, last_is_watched=watched
                )
            )
        return cls(*loads)

    def measured(self) -> Measured:
        near, far = self.near.measured(), self.far.measured()
        last = len(near.whole)
        whole = [*near.whole, replace(far.whole[0], words=near.whole[0].words)]

        def pruned(first: int, later: int, alpha: float) -> Answered:
            assert near.pruned is not None
            return self._pruned(first, alpha) if later == last else near.pruned(first, later, alpha)

        return replace(
            near,
            whole=whole,
            pruned=cache(pruned) if near.pruned is not None else None,
            calibrations=[level.calibration for level in self.near.levels],
            depths=[level.layers / self.far.levels[0].layers for level in (*self.near.levels, *self.far.levels)],
            times=[*near.times, *far.times],
        )

    def _pruned(self, first: int, alpha: float) -> Answered:
        """Returns what the other backbone answers to texts without the words that a level leaves out."""
        near, far = self.near, self.far
        stay = near.stay(first, alpha)
        examples = [
            _left(example, words, places, own)
            for example, words, places, own in zip(near.labelled.examples, near.words, self._places, stay, strict=True)
        ]
        labelled = Labelled(near.labelled.path, examples)
        texts = far.reader.read(labelled, far.task, far.tenant.labels, show_progress=False)
        reading = replace(far, labelled=labelled, texts=texts)
        found = reading.answered_by(far.levels[0], left_by=near.levels[first].digest, alpha=alpha)
        return replace(found, words=words_in([words[own] for words, own in zip(near.words, stay, strict=True)]))

    @cached_property
    def _places(self) -> list[np.ndarray]:
        return self.near.reader.places(self.near.labelled, self.near.task)


def _left(example: Example, words: np.ndarray, places: np.ndarray, stay: np.ndarray) -> Example:
    """Returns the example as a server sends it on."""
    if stay.all():
        return example
    text, pair = without_words(example.text, example.pair, runs_of(words[stay], places[stay]))
    return replace(example, text=text, pair=pair)


def _report(near: Side, far: Side, unseen: UnseenTexts, measured: Measured, both: _Both, chosen: Candidate) -> dict[str, Any]:
    names = [*(level.name for level in both.near.levels), f"{far.backbone}/{far.tenant.id}"]
    metric = measured.task.score(near.tenant.labels, measured.examples, measured.answers[-1]).metric
    return {
        "tenant": near.tenant.id,
        "version": near.tenant.version,
        "to": {"backbone": far.backbone, "tenant": far.tenant.id, "version": far.tenant.version},
        "metric": metric,
        "file": str(unseen.file),
        "texts": len(measured.examples),
        "left_out": unseen.left_out,
        "levels": [
            {"name": name, "score": round(score, 4), "mean_ms": round(1000 * float(measured.alone(number).mean()), 4)}
            for number, (name, score) in enumerate(zip(names, measured.scores, strict=True))
        ],
        "plan": reported(chosen, names),
    }
