"""The results of a comparison on disk, so that each number is measured once, however often the command is interrupted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from builder.store.resumable import write_json
from hplm.errors import InvalidInput
from research.result_file import ResultFile

SETTINGS, NUMBERS = "settings.json", "numbers.jsonl"


@dataclass(frozen=True)
class Results:
    """Of one scenario: the numbers of each scheme and number of tenants, and the settings that they share."""

    folder: Path

    @classmethod
    def open(cls, folder: Path, settings: dict) -> Results:
        results = cls(folder)
        if (folder / SETTINGS).exists():
            given = json.loads(json.dumps(settings))  # as the file holds them: a tuple is a list there
            stored = results.settings()
            differs = sorted(key for key in given.keys() | stored.keys() if given.get(key) != stored.get(key))
            if differs:
                raise InvalidInput(
                    f"{folder} holds results that were measured with another {', '.join(differs)}: "
                    "give the same options to go on with them, or choose another --results"
                )
        else:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(folder / SETTINGS, settings)
        return results

    def settings(self) -> dict:
        stored = json.loads((self.folder / SETTINGS).read_text("utf-8"))
        server = stored.pop("setup", {})  # where earlier versions kept those of the server
        if "tenants" in server:
            server["known_tenants"] = server.pop("tenants")
        return {**server, **stored}

    def get(self, scheme: str, tenants: int) -> dict | None:
        return self._numbers.get({"scheme": scheme, "tenants": tenants})

    def put(self, scheme: str, tenants: int, measured: dict) -> None:
        self._numbers.put({"scheme": scheme, "tenants": tenants}, measured)

    def all(self) -> Iterator[tuple[str, int, dict]]:
        """In order of schemes and tenants."""
        found = [(run["scheme"], run["tenants"], measured) for run, measured in self._numbers]
        yield from sorted(found, key=lambda one: one[:2])

    @property
    def _numbers(self) -> ResultFile:
        return ResultFile(self.folder / NUMBERS)
