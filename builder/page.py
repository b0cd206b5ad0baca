"""The page of a build: one HTML file, without a server or scripts. The reports beside it have the same figures as JSON."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

from builder.importing.reports import facts_of, shown, totals
from builder.said import duration
from builder.store.resumable import read_json, replaced
from builder.store.store import Store
from builder.tables.corpus import FOLDER, Corpus
from builder.tables.inspection import cover, sampled
from hplm.plot.table import Table

TEMPLATE = Path(__file__).with_name("page.html")


def tenant_page(report: Mapping[str, Any], title: str, picture: Path) -> None:
    """Writes `report.html` beside the picture of a tenant's training."""
    dev, found = report["dev"], report["training"]["windows_found"]
    facts = {name: value for name, value in dev.items() if isinstance(value, int | float)}
    facts |= {"training texts": report["training"]["texts"], "of these cut": report["training"]["texts_cut"]}
    facts |= {f"windows found {_shortened(level)}": f"{share:.1%}" for level, share in enumerate(found)}
    facts |= {"adapter and head": f"{report['bytes'] / 1e6:.2f} MB", "trained for": duration(report["seconds"])}
    tables = {"By label": report["by_label"], "Worst mistakes": report["mistakes"], "Epochs": report["exams"]}
    _write(picture.with_name("report.html"), title, facts, tables, picture)


def import_page(report: Mapping[str, Any], title: str, picture: Path) -> None:
    """Writes `report.html` beside the picture of a checkpoint's import."""
    tables = {"Other answers than the checkpoint's, where it was surest": report["differing"], "Epochs": report["exams"]}
    _write(picture.with_name("report.html"), title, facts_of(report), tables, picture)


def imports_page(path: Path, matched: Mapping[str, Mapping[str, Any]], refused: Mapping[Path, str]) -> None:
    """Writes the page of many imports. `matched`: reports by tenant. `refused`: why, by folder."""
    facts = {**shown(totals([*matched.values()])), "folders that were refused": len(refused)}
    rows = [{"tenant": name, **facts_of(report)} for name, report in matched.items()]
    why = [{"folder": str(folder), "why": reason} for folder, reason in refused.items()]
    _write(path, "Imports", facts, {"Those that agree least first": rows, "Refused": why})


def branch_page(store: Store, table: Table, work: Path) -> None:
    """Writes the page of a root or a domain beside the report of how its lower layers learned, unless it is there.

    `work`: the folder of its build, with its corpus, if it has one.
    """
    meta = table.meta
    page = store.page(meta.domain, meta.version)
    if page.exists():
        return
    report, tables = page.with_suffix(".json"), dict[str, Sequence[Mapping[str, Any]]]()
    facts: dict[str, Any] = {"n-grams": f"{meta.keys:,}", "table": f"{sum(meta.sizes().values()) / 1e6:,.2f} MB, {meta.dtype}"}
    facts |= {"tokens of the corpus": f"{meta.corpus_tokens:,}", "least cosine of a stored row": meta.least_cosine}
    if (work / FOLDER).exists():
        coverage = cover(store, meta.domain, meta.version, sampled(Corpus(work / FOLDER)))
        facts["tokens looked up"] = f"{coverage.tokens:,}"
        found = [{"found as": name, "share": f"{share:.2%}"} for name, share in coverage.levels.items()]
        tables |= {"Windows of the corpus": found, "With smaller tables": coverage.rows}
    if report.exists():
        learned = read_json(report)
        facts |= {"steps": f"{learned['steps']:,}", "learned for": duration(learned["seconds"])}
        tables["Exams"] = learned["exams"]
    _write(page, f"{meta.domain} version {meta.version}", facts, tables, report.with_suffix(".png"))


def _write(
    path: Path,
    title: str,
    facts: Mapping[str, Any],
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
    picture: Path | None = None,
) -> None:
    shown = base64.b64encode(picture.read_bytes()).decode("ascii") if picture is not None and picture.exists() else None
    template = Environment(autoescape=True).from_string(TEMPLATE.read_text("utf-8"))
    path.parent.mkdir(exist_ok=True)
    with replaced(path) as writing:
        writing.write_text(template.render(title=title, facts=facts, tables=tables, picture=shown), "utf-8")


def _shortened(level: int) -> str:
    return f"after {level} shortenings" if level else "whole"
