"""Options and stores that several commands of the builder read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from builder.store.store import Store


def open_store(folder: Path) -> Store:
    from builder.store.store import Store

    return Store(folder)


def check_picture(picture: Path | None) -> None:
    """Refuses a file that is no picture, before anything is computed for it."""
    if picture is not None:
        from builder.pictures import check_picture

        check_picture(picture)
