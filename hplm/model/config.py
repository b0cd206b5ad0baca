"""The configuration of a backbone: sizes, where it is split, and the ids of its special tokens."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hplm.errors import MISFITS, InvalidInput
from hplm.model.windows import TRIGRAMS, Window

FORMAT = 2


@dataclass(frozen=True)
class BackboneConfig:
    name: str
    vocabulary: int
    hidden: int
    heads: int
    intermediate: int
    lower_layers: int
    upper_layers: int
    positions: int  # the most tokens of a sequence, including special tokens
    segments: int
    activation: str
    norm_eps: float
    cls_id: int
    sep_id: int
    unk_id: int
    mask_id: int
    window: Window = TRIGRAMS  # tokens that the lower stack sees at once
    entry_eps: float | None = None  # epsilon of the norm before the upper layers (default: norm_eps)
    format: int = FORMAT

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", "utf-8")

    @classmethod
    def load(cls, path: Path) -> BackboneConfig:
        try:
            stored: dict[str, Any] | list[Any] | None = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            raise InvalidInput(f"{path.parent} contains no backbone: {path.name} is missing") from None
        except ValueError as error:
            raise InvalidInput(f"{path} is not JSON: {error}") from None
        if not isinstance(stored, dict):
            raise InvalidInput(f"{path} holds no JSON object: export the repository again")
        if stored.get("format") != FORMAT:
            raise InvalidInput(
                f"{path} has format {stored.get('format')!r}, but this version of hplm reads {FORMAT}: "
                "export the repository again with this version, or install the version that wrote it"
            )
        known = {field.name: field.type for field in fields(cls)}
        values: dict[str, Any] = {key: value for key, value in stored.items() if key in known}
        kinds: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}
        try:
            for name, kind in known.items():
                if name in values and not isinstance(values[name], kinds.get(str(kind), (object,))):
                    raise TypeError(f"{name!r} is {values[name]!r}")
            values["window"] = Window(**stored["window"])
            return cls(**values)
        except MISFITS as error:
            raise InvalidInput(f"{path} does not describe a backbone ({error}): export the repository again") from None
