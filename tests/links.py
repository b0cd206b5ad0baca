"""Two toy backbones: tenants of the first have levels and links to tenants of the second, which is wider and deeper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.calibrations import Calibrated, save_calibrated
from builder.store.levels import remove_ladder, save_ladder
from builder.store.links import save_link
from builder.store.store import Store, TenantFile
from hplm.levels.plan import Plan, Step
from hplm.tasks import TextAnswer
from hplm.tenants.link import Link
from hplm.tenants.snapshot import Snapshot, Tenant
from hplm.tenants.state import EXPORTED_TENANTS
from testing.random_store import random_store
from testing.reference import Reference
from testing.toy import CONFIG, DOMAINS
from tests.climb import Climb, joined
from tests.confidence import CALIBRATIONS
from tests.ladders import OWN, add_levels
from tests.tasks import TENANTS, make_tasks

FAR = "large"
LARGE = replace(CONFIG, name=FAR, hidden=48, intermediate=96, upper_layers=3)
FAR_IDS = {"many": "many", "mark": "mark-there", "pair": "pair", "word": "word"}  # tenants there, by those here
PLANS = {
    "many": Plan((Step(0, slope=1.0), Step(2, weight=0.6))),
    "mark": Plan((Step(1, cutoff=0.3, slope=1.0), Step(2, weight=0.6))),
    "pair": Plan((Step(0, 0.6, 1.0, 0.9), Step(1, 0.7, 1.0, weight=0.6), Step(2, weight=0.7))),
    "word": Plan((Step(0, slope=1.0), Step(2, weight=0.5))),
}
OPTIONS = ServingOptions(dtype="fp32", slots=4, batch_tokens=256)


@dataclass(frozen=True)
class Linked:
    near: Store
    far: Store
    repository: Path

    def model(self, store: Store) -> Path:
        return self.repository / store.config.name / "1"


def make_linked(
    folder: Path,
    links: Mapping[str, Link] = MappingProxyType({}),
    settings: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Linked:
    """`links`: instead of the usual ones, by tenant. `settings`: keys and limits of tenants there, as in a snapshot."""
    near = make_tasks(folder / "near", CALIBRATIONS).store
    add_levels(near)
    far = random_store(folder / "far", LARGE, [there(tenant) for tenant in near_tenants()], DOMAINS, spread=0.3, seed=9)
    for here, name in FAR_IDS.items():
        save_calibrated(far, far.tenant(name), Calibrated(CALIBRATIONS[here], {}, {}))
    for tenant in near_tenants():
        remove_ladder(near, tenant)
        link = links.get(tenant.id, Link(FAR, FAR_IDS[tenant.id], 1, PLANS[tenant.id]))
        save_link(near, tenant, link, {})
    save_ladder(near, near.tenant("pair"), (OWN,))  # a link and a ladder go together
    repository = folder / "repository"
    for store in (near, far):
        export(store, repository, OPTIONS)
    change(repository / FAR / "1" / EXPORTED_TENANTS, lambda tenant: replace(tenant, **settings.get(tenant.id, {})))
    return Linked(near, far, repository)


def near_tenants() -> list[TenantFile]:
    return [tenant for tenant in TENANTS if tenant.id in FAR_IDS]


def there(tenant: TenantFile) -> TenantFile:
    return replace(tenant, id=FAR_IDS[tenant.id])


def change(path: Path, changed: Callable[[Tenant], Tenant]) -> None:
    """Changes the tenants of an exported snapshot."""
    exported = Snapshot.load(path)
    Snapshot(0, exported.branches, [changed(tenant) for tenant in exported.tenants], exported.export).save(path)


class Crossing:
    """A text that may go on to the other backbone, in plain Python."""

    def __init__(self, near: Reference, far: Reference, tenant_id: str, text: str, pair: str | None, lookup: Any) -> None:
        tenant = near.backbone.view.snapshot.find(tenant_id)
        link = tenant.link
        assert link is not None
        self.climb = Climb(near, tenant_id, text, pair, link.plan, lookup)
        self.level, self.answer, self.confidence = self.climb.level, self.climb.answer, self.climb.confidence
        self.is_close = self.climb.is_close
        self.read: tuple[str, str | None] | None = None  # by the other backbone
        if self.climb.goes_across:
            self.read = _left(text, pair, self.climb.words_left)
            self._go_on(tenant, far, link, text)

    def _go_on(self, tenant: Tenant, far: Reference, link: Link, text: str) -> None:
        assert self.read is not None
        target, task = far.backbone.view.snapshot.find(link.tenant), tenant.task_object
        now = far.forward(self.read[0], link.tenant, self.read[1]).numpy()
        own = joined(tenant.task, self.answer.logits.astype(np.float64), now, link.weight, None)
        spans = np.array([[0, 0, len(text)]])
        if tenant.task == "tag":
            spans = np.column_stack([np.zeros(len(own), dtype=int), self.answer.spans])
        self.answer: TextAnswer = task.answer(own, spans, tenant.labels)
        self.confidence = task.confidence(target.all_levels[-1].calibration, own, spans, tenant.labels)
        self.level = len(tenant.all_levels) + 1


def _left(text: str, pair: str | None, left: set[int] | None) -> tuple[str, str | None]:
    """Returns the words that are left. The toy's words are those between spaces."""
    if left is None:
        return text, pair
    words, of_pair = text.split(), (pair or "").split()
    first = [word for number, word in enumerate(words) if number in left] or words
    second = [word for number, word in enumerate(of_pair, len(words)) if number in left] or of_pair
    return " ".join(first), " ".join(second) if pair is not None else None
