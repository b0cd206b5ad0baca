"""Options of commands that read or change a served repository and its state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from hplm.cli.options import read
from hplm.errors import InvalidInput
from hplm.registry.store import Place, place_of

if TYPE_CHECKING:
    from hplm.tenants.manager import Manager

STATE = "the folder or the bucket of `hplm serve --state`, which holds changes"
StatePlace = Annotated[Place | None, read(place_of, help=STATE)]


@Parameter(name="*")
@dataclass(frozen=True)
class Served:
    """The options that name a served backbone and its state."""

    repository: Path = Path("model_repository")
    """the served model repository"""
    state: StatePlace = None
    backbone: str | None = None
    """name of the backbone (default: the only one of the repository)"""

    def checked(self) -> tuple[Path, Place | None, str | None]:
        """Returns the options for reading."""
        check_state(self.state)
        return self.repository, self.state, self.backbone

    def manager(self, begun: bool = True) -> Manager:
        """Opens the manager of the state.

        `begun`: refuses a state that does not exist, because a change of a mistyped one would count nowhere.
        """
        from hplm.tenants.manager import Manager

        if self.state is None:
            raise InvalidInput("--state is missing: give the folder of `hplm serve --state`, which holds all changes")
        manager = Manager.open(self.repository, self.state, self.backbone)
        if begun:
            manager.registry.pointer()
        return manager


@Parameter(name="*")
@dataclass(frozen=True)
class MaybeServed:
    """The same options, where a command may also concern a store alone."""

    repository: Path | None = None
    """the served model repository"""
    state: StatePlace = None
    backbone: str | None = None
    """name of the backbone (default: the only one of the repository)"""

    def found(self) -> Served | None:
        return Served(self.repository, self.state, self.backbone) if self.repository is not None else None


HERE, NOWHERE = Served(), MaybeServed()


def check_state(state: Place | None) -> None:
    """Raises if the state does not exist. Read-only commands call it: a missing folder is a mistake, not an empty state."""
    if isinstance(state, Path) and not state.is_dir():
        raise InvalidInput(f"--state {state} is not a folder: give the folder of `hplm serve --state`")


def settled(manager: Manager, said: str = "", **result: Any) -> dict[str, Any]:
    """Waits for servers after a change, and prints what was changed and which servers have not taken it. Returns the result."""
    late = manager.settle()
    if said:
        print(said, flush=True)
    if late:
        print(f"  not yet taken by {', '.join(late)}: check that these servers are running")
    return {**result, "late": late}
