"""Finished numbers, a small file each, named by what was run: kept in the repository, so no machine computes them again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from builder.store.resumable import write_json
from hplm.errors import InvalidInput


class Results:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, run: dict[str, Any]) -> dict[str, Any] | None:
        path = self._path(run)
        if not path.exists():
            return None
        stored = json.loads(path.read_text("utf-8"))
        if stored["run"] != _plain(run):
            raise InvalidInput(f"{path} is the result of another run than its name says: remove it")
        return stored["result"]

    def put(self, run: dict[str, Any], result: dict[str, Any]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_json(self._path(run), {"run": _plain(run), "result": result})

    def _path(self, run: dict[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(_plain(run), sort_keys=True).encode()).hexdigest()[:12]
        return self._folder / f"{run['task']}-{run['scheme']}-{run['seed']}-{digest}.json"


def _plain(run: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(run))
