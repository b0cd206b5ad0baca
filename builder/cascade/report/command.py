"""Makes the report of some tenants' cascades, and writes it as Markdown, JSON and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from builder.cascade.report.figures import Examined, across
from builder.cascade.report.page import page_of
from builder.cascade.report.pictures import draw_across, draw_all
from builder.cascade.report.subject import Subject
from builder.store.resumable import replaced, write_json
from builder.store.store import Store
from hplm.errors import InvalidInput

PAGE, FIGURES, PICTURE = "report.md", "report.json", "all-tenants.svg"


def report_cascades(
    store: Store,
    files: Mapping[str, Path],
    to: Path,
    device: torch.device,
    drop: float,
    seen: Sequence[Path] = (),
    show_progress: bool = True,
) -> dict[str, Any]:
    """Writes the report into the folder `to`, and returns its figures. `files`: labelled texts, by tenant.

    `drop`: the points that the single level of INFaaS may lose. `seen`: see `Subject.open`. Computed answers stay in the
    folder, so the same call after an interruption continues.
    """
    if to.exists() and not to.is_dir():
        raise InvalidInput(f"--to {to} is a file: give a folder")
    subjects = [Subject.open(store, tenant_id, file, seen) for tenant_id, file in files.items()]
    to.mkdir(parents=True, exist_ok=True)
    examined: list[Examined] = []
    tenants: list[dict[str, Any]] = []
    with tqdm(subjects, desc="report", unit="tenant", disable=not show_progress) as bar:
        for subject in bar:

            def done(part: str, name: str = subject.tenant.id) -> None:
                bar.set_postfix_str(f"{name}: {part}")

            done("levels")
            examined.append(Examined(subject, subject.answers(to, device, show_progress), drop))
            tenants.append(examined[-1].figures(done))
    report = {"drop": drop, "across": across(examined), "tenants": tenants}
    pictures = {figures["tenant"]: draw_all(figures, to) for figures in tenants}
    if len(tenants) > 1:
        draw_across(tenants, to / PICTURE)
        report["picture"] = PICTURE
    with replaced(to / PAGE) as temporary:
        temporary.write_text(page_of(report, pictures), "utf-8")
    write_json(to / FIGURES, report)
    return report
