"""The stacks of a store: the lower one of each branch, the upper one, and shorter upper ones by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from builder.store.resumable import read_json, replaced, write_json
from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig
from hplm.model.stacks import LowerStack, UpperStack
from hplm.model.weights import load_weights, save_weights

UPPER = "upper.safetensors"


class Stacks:
    """The part of a `Store` that reads and writes its stacks."""

    folder: Path
    config: BackboneConfig

    def upper(self) -> UpperStack:
        upper = UpperStack(self.config)
        upper.load_state_dict(load_weights(self.folder / UPPER))
        return upper

    def lower(self, domain: str, version: int) -> LowerStack:
        lower = LowerStack(self.config)
        lower.load_state_dict(load_weights(self._below(domain, version)))
        return lower

    def has_lower(self, domain: str, version: int) -> bool:
        return self._below(domain, version).exists()

    def lower_files(self, domain: str, version: int) -> list[Path]:
        """Returns the files of a branch's lower stack, of which some may not exist."""
        suffixes = (".safetensors", ".json", ".png", ".head.safetensors")
        return [self._below(domain, version, suffix) for suffix in suffixes]

    def save_lower(self, domain: str, version: int, lower: LowerStack) -> None:
        replace_weights(self._below(domain, version), lower.state_dict())

    def masked_head(self, domain: str, version: int) -> dict[str, Tensor] | None:
        """Returns the head that guesses masked words on the branch's lower stack; None if the branch has none."""
        path = self._below(domain, version, ".head.safetensors")
        return load_weights(path) if path.exists() else None

    def save_masked_head(self, domain: str, version: int, weights: dict[str, Tensor]) -> None:
        """Saves the head. Call it before `save_lower`: a branch with a lower stack counts as adapted."""
        replace_weights(self._below(domain, version, ".head.safetensors"), weights)

    def _below(self, domain: str, version: int, suffix: str = ".safetensors") -> Path:
        return self.folder / "lower" / f"{domain}-{version}{suffix}"

    def stacks(self) -> list[str]:
        """Returns the names of the finished shorter upper stacks, in order."""
        return sorted(path.stem for path in self.folder.glob("stacks/*.safetensors"))

    def stack(self, name: str) -> UpperStack:
        return UpperStack.shorter(self._known(name), self.config)

    def stack_report(self, name: str) -> dict[str, Any]:
        self._known(name)
        return read_json(self.stack_file(name, ".json"))

    def save_stack(
        self, name: str, stack: UpperStack, report: dict[str, Any], draw: Callable[[Path], object] | None = None
    ) -> None:
        """Saves a shorter upper stack, its weights last: they make it a finished one. `draw` writes a picture to a path."""
        path = self.stack_file(name, ".json")
        path.parent.mkdir(exist_ok=True)
        write_json(path, report)
        if draw is not None:
            draw(self.stack_file(name, ".png"))
        replace_weights(self.stack_file(name), stack.state_dict())

    def stack_file(self, name: str, suffix: str = ".safetensors") -> Path:
        return self.folder / "stacks" / f"{name}{suffix}"

    def stack_files(self, name: str) -> list[Path]:
        """Returns the files of a shorter upper stack, of which the picture may not exist."""
        return [self.stack_file(name, suffix) for suffix in (".safetensors", ".json", ".png")]

    def stack_work_folder(self, name: str) -> Path:
        """Returns the folder in which a shorter upper stack is built."""
        return self.folder / "building" / "stacks" / name

    def _known(self, name: str) -> Path:
        if name not in (known := self.stacks()):
            raise InvalidInput(
                f"stack {name!r} is not in {self.folder}: known are {', '.join(known) or 'none yet'}; make one with "
                "`hplm build stack`"
            )
        return self.stack_file(name)


def replace_weights(path: Path, weights: dict[str, Tensor]) -> None:
    path.parent.mkdir(exist_ok=True)
    with replaced(path) as temporary:
        save_weights(weights, temporary)
