"""Checks repositories of whole models against their checksums, for `hplm verify`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hplm.engine.backbone import Backbone
from hplm.tenants.verification import Part, Progress, check_file, check_table, versions
from research.baselines.models import WholeConfig


def parts(folders: list[Path]) -> list[Part]:
    """Returns the parts to check. Bodies are often hard links to one file, which is checked once."""
    found: list[Part] = []
    bodies: dict[tuple[int, int], Path] = {}
    for folder in folders:
        found += [Part("table", table, check_table) for table in versions(folder / "plot")]
        found += [Part("file", folder / name, check_file) for name in (Backbone.CONFIG, Backbone.TOKENIZER)]
        found.append(Part("file", folder / WholeConfig.FILE, check_whole))
        found += [Part("file", head, check_file) for head in sorted(folder.glob("heads/*"))]
        bodies |= {(body.stat().st_dev, body.stat().st_ino): body for body in sorted(folder.glob("bodies/*"))}
    return found + [Part("file", body, check_file) for body in bodies.values()]


def check_whole(path: Path, progress: Progress) -> Iterator[str]:
    """Yields an error for each file that `whole.json` names and that does not exist."""
    try:
        whole = WholeConfig.load(path.parent)
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield f"file {path} cannot be read: {error}"
        return
    names = [f"{kind}/{tenant.weights}.safetensors" for tenant in whole.tenants for kind in ("bodies", "heads")]
    for name in [*names, *(f"plot/{branch.folder}" for branch in whole.tables)]:
        if not (path.parent / name).exists():
            yield f"file {path.parent / name} is missing: export the scheme again"
