"""Results of a comparison on disk: a file a number, so that what is measured is measured once, however often one is cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hplm.errors import InvalidInput


@dataclass(frozen=True)
class Results:
    """Those of one scenario: `<scheme>-<tenants>.json`, and what was asked of all of them in `settings.json`."""

    folder: Path

    @classmethod
    def open(cls, folder: Path, settings: dict) -> Results:
        path = folder / "settings.json"
        if path.exists():
            differs = sorted(key for key, value in cls(folder).settings().items() if settings.get(key) != value)
            if differs:
                raise InvalidInput(
                    f"{folder} holds results that were measured with another {', '.join(differs)}: "
                    "give the same options to go on with them, or choose another --results"
                )
        else:
            _write(path, settings)
        return cls(folder)

    def settings(self) -> dict:
        return _read(self.folder / "settings.json")

    def get(self, scheme: str, tenants: int) -> dict | None:
        path = self._path(scheme, tenants)
        return _read(path) if path.exists() else None

    def put(self, scheme: str, tenants: int, measured: dict) -> None:
        _write(self._path(scheme, tenants), measured)

    def all(self) -> Iterator[tuple[str, int, dict]]:
        """In order of tenants."""
        found = [path for path in self.folder.glob("*-*.json") if path.stem.rpartition("-")[2].isdecimal()]
        named = [(path.stem.rpartition("-")[0], int(path.stem.rpartition("-")[2])) for path in found]
        for scheme, tenants in sorted(named, key=lambda one: (one[0], one[1])):
            yield scheme, tenants, _read(self._path(scheme, tenants))

    def _path(self, scheme: str, tenants: int) -> Path:
        return self.folder / f"{scheme}-{tenants}.json"


def _read(path: Path) -> dict:
    return json.loads(path.read_text("utf-8"))


def _write(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".writing")
    temporary.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    temporary.rename(path)
