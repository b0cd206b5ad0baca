"""A tenant whose cascade is reported, and the texts on which it is examined: none of them has trained or chosen anything."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from builder.cascade.kept import Kept
from builder.cascade.ladder import profile_of
from builder.cascade.levels import OpenLevel, open_levels
from builder.cascade.profile import Profile
from builder.cascade.report.answers import Answers
from builder.cascade.workload import Workload
from builder.evaluation.tenant import find_tenant
from builder.evaluation.unseen import UnseenTexts
from builder.store.levels import ladder_of, levels_of
from builder.store.resumable import digest_of
from builder.store.store import Store, TenantFile
from builder.tables.text_files import check_file
from builder.training.examples import Reader
from hplm.engine.engine import resolve_precision
from hplm.errors import InvalidInput
from hplm.levels.plan import Plan

ANSWERS = "answers"  # the folder in that of the report in which computed answers are kept


@dataclass(frozen=True)
class Subject:
    store: Store
    tenant: TenantFile
    levels: Sequence[OpenLevel]  # the shallowest first
    profile: Profile
    ladder: tuple[Plan, ...]
    unseen: UnseenTexts

    @classmethod
    def open(cls, store: Store, tenant_id: str, file: Path, seen: Sequence[Path]) -> Subject:
        """`seen`: files that trained or chose something and were moved, and more files whose texts are left out.

        Raises if something is missing, before anything is computed.
        """
        tenant = find_tenant(store, tenant_id)
        levels = open_levels(store, tenant)
        if len(levels) < 2:
            raise InvalidInput(f"tenant {tenant.id!r} has no levels besides its own: make one with `hplm cascade build`")
        profile, ladder = profile_of(store, tenant, levels), ladder_of(store, tenant)
        if ladder is None:
            raise InvalidInput(f"tenant {tenant.id!r} has no ladder: choose one with `hplm cascade select`")
        check_file(file)
        chose = list(_files_that_chose(store, tenant, profile, file, seen))
        unseen = UnseenTexts(store, tenant, file, [*seen, *chose], "a report")
        unseen.check()
        return cls(store, tenant, levels, profile, ladder, unseen)

    @property
    def rung(self) -> int | None:
        """The dearest plan of the ladder with several levels, counted from 1; None if there is none."""
        return next((number for number, plan in enumerate(self.ladder, start=1) if len(plan.steps) > 1), None)

    @property
    def plan(self) -> Plan:
        return self.ladder[(self.rung or 1) - 1]

    def answers(self, home: Path, device: torch.device, show_progress: bool) -> Answers:
        """Computes all levels on the texts. `home`: a folder in which their answers stay."""
        store, tenant, asked = self.store, self.tenant, self.profile.asked
        precision = resolve_precision(asked["precision"], device)
        reader = Reader(store, tenant.domain, tenant.domain_version)
        texts = reader.read(self.unseen.fresh, self.unseen.task, tenant.labels, show_progress)
        shared = {
            "texts": self.unseen.digest,
            "seen": self.unseen.seen,
            "table": store.chain_digest(tenant.domain, tenant.domain_version),
            "precision": precision.name,
            "device": device.type,
        }
        workload = Workload(
            tenant, self.unseen.task, self.levels, self.unseen.fresh, reader, texts, precision, device,
            Kept(home, shared, ANSWERS), self.profile.times,
        )  # fmt: skip
        return Answers(workload.measured())


def _files_that_chose(store: Store, tenant: TenantFile, profile: Profile, file: Path, moved: Sequence[Path]) -> Iterator[Path]:
    """Yields the texts of the profile and of the levels' calibrations."""
    for path in moved:
        check_file(path)
    by_digest = {digest_of(path): path for path in moved}
    calibrated = [(level.calibrated.report, level.calibrated.asked) for level in levels_of(store, tenant)]
    own = digest_of(file)
    for report, asked in [(profile.report, profile.asked), *calibrated]:
        if asked["texts"] == own:
            raise InvalidInput(
                f"{file} has chosen the plans of tenant {tenant.id!r}, or calibrated its levels: give texts that have chosen "
                "nothing"
            )
        path = by_digest.get(asked["texts"], Path(report["file"]))
        if not path.is_file() or digest_of(path) != asked["texts"]:
            raise InvalidInput(
                f"the plans of tenant {tenant.id!r} were chosen, or its levels calibrated, on {path}, which was moved or "
                "changed since: name the file as it was with --seen"
            )
        yield path
