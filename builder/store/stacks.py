"""The stacks of a store: the lower one of each branch, and the upper one that all share."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from builder.store.resumable import replaced
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
        suffixes = (".safetensors", ".json", ".png", ".html", ".head.safetensors")
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


def replace_weights(path: Path, weights: dict[str, Tensor]) -> None:
    path.parent.mkdir(exist_ok=True)
    with replaced(path) as temporary:
        save_weights(weights, temporary)
