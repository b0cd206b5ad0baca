"""The texts that a version has seen, as hashes of 64 bits: their files may be moved, and no text can be read from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from hplm.errors import MISFITS, Broken


@dataclass(frozen=True)
class SeenTexts:
    """Of a version and of those that it was trained on."""

    learned: frozenset[int] = frozenset()  # by its weights
    dev: frozenset[int] = frozenset()  # have chosen an epoch
    students: frozenset[int] = frozenset()  # learned by students alone

    @property
    def all(self) -> frozenset[int]:
        return self.learned | self.dev | self.students

    @classmethod
    def load(cls, path: Path) -> SeenTexts:
        try:
            with np.load(path, allow_pickle=False) as stored:
                return cls(**{name: frozenset(stored[name].tolist()) for name in cls.__dataclass_fields__})
        except (*MISFITS, OSError, BadZipFile) as error:
            raise Broken(f"{path} does not say which texts were seen ({error}): build or copy the tenant again") from None

    def save(self, path: Path) -> None:
        with open(path, "wb") as file:
            np.savez(file, **{name: np.array(sorted(own), dtype=np.uint64) for name, own in asdict(self).items()})
