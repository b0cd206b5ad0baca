"""The page of a training or an import: one HTML file, without scripts. The report beside it has the same figures as JSON."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

from builder.console import duration
from builder.importing.reports import facts_of, shown, totals
from builder.store.resumable import replaced

TEMPLATE = Path(__file__).with_name("page.html")
MOST_CONFUSED = 10  # pairs of labels


def tenant_page(report: Mapping[str, Any], title: str, picture: Path) -> None:
    """Writes `report.html` beside the picture of a tenant's training."""
    dev, found = report["dev"], report["training"]["windows_found"]
    facts = {name: value for name, value in dev.items() if isinstance(value, int | float)}
    facts |= {"training texts": report["training"]["texts"], "of these cut": report["training"]["texts_cut"]}
    facts |= {f"windows found {_shortened(level)}": f"{share:.1%}" for level, share in enumerate(found)}
    facts |= {"adapter and head": f"{report['bytes'] / 1e6:.2f} MB", "trained for": duration(report["seconds"])}
    tables = {
        "By label": report["by_label"], "Most often confused": _confused(report.get("confusion", {})),
        "Worst mistakes": report["mistakes"], "Epochs": report["exams"],
    }  # fmt: skip
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


def tenants_page(path: Path, built: Sequence[Mapping[str, Any]], refused: Mapping[str, str]) -> None:
    """Writes the page of the tenants that one command has built. `built`: a row of each. `refused`: why, by tenant."""
    why = [{"tenant": name, "why": reason} for name, reason in refused.items()]
    facts = {"tenants built or left alone": len(built), "tenants refused": len(refused)}
    _write(path, "Tenants", facts, {"Tenants": built, "Refused": why})


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


def _confused(confusion: Mapping[str, Mapping[str, int]]) -> list[dict[str, Any]]:
    wrong = [
        {"right": right, "answered": answered or "(none)", "times": count}
        for right, answers in confusion.items() for answered, count in answers.items() if answered != right
    ]  # fmt: skip
    return sorted(wrong, key=lambda pair: -pair["times"])[:MOST_CONFUSED]


def _shortened(level: int) -> str:
    return f"after {level} shortenings" if level else "whole"
