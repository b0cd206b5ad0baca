"""Options of commands that read or change a served repository and its state."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from hplm.cli.options import read
from hplm.errors import InvalidInput
from hplm.location import Location, location_of

if TYPE_CHECKING:
    from hplm.tenants.manager import Manager

VARIABLE = "HPLM_STATE"  # for servers and all commands
STATE = f"the folder or the bucket of `hplm serve --state`, which holds changes (default: the variable {VARIABLE})"
AS_EXPORTED = f"as exported: without --state or {VARIABLE}, later changes are not seen"
StateLocation = Annotated[Location | None, read(location_of, help=STATE)]


@Parameter(name="*")
@dataclass(frozen=True)
class ServedOptions:
    """The options that name a served backbone and its state."""

    repository: Path = Path("model_repository")
    """the served model repository"""
    state: StateLocation = None
    backbone: str | None = None
    """name of the backbone (default: the only one of the repository)"""

    def checked(self) -> tuple[Path, Location | None, str | None]:
        """Returns the options for reading. Without a state, says what is read."""
        state = checked_state(self.state)
        if state is None:
            print(AS_EXPORTED)
        return self.repository, state, self.backbone

    @property
    def source(self) -> dict[str, str | None]:
        """The registry that a result under --json was read from; without one: as exported."""
        state = state_of(self.state)
        return {"state": None if state is None else str(state)}

    def manager(self, begun: bool = True) -> Manager:
        """Opens the manager of the state.

        `begun`: refuses a state that does not exist, because a change of a mistyped one would count nowhere.
        """
        from hplm.tenants.manager import Manager

        state = state_of(self.state)
        if state is None:
            raise InvalidInput(
                f"--state is missing: give the folder of `hplm serve --state`, which holds all changes, or set {VARIABLE}"
            )
        manager = Manager.open(self.repository, state, self.backbone)
        if begun:
            manager.registry.pointer()
        return manager


@Parameter(name="*")
@dataclass(frozen=True)
class MaybeServedOptions:
    """The same options, where a command may also concern a store alone."""

    repository: Path | None = None
    """the served model repository"""
    state: StateLocation = None
    backbone: str | None = None
    """name of the backbone (default: the only one of the repository)"""

    def served_options(self) -> ServedOptions | None:
        return ServedOptions(self.repository, self.state, self.backbone) if self.repository is not None else None


HERE, NOWHERE = ServedOptions(), MaybeServedOptions()


def state_of(given: Location | None) -> Location | None:
    """Returns the state that a command works with: that of its option, or of the environment."""
    named = os.environ.get(VARIABLE)  # an empty one counts as unset
    return location_of(named) if given is None and named else given


def checked_state(given: Location | None) -> Location | None:
    """Returns the same. Raises if a folder is missing: for commands that only read, that is a mistake and no empty state."""
    state = state_of(given)
    if isinstance(state, Path) and not state.is_dir():
        option = f"{VARIABLE}=" if given is None else "--state "
        raise InvalidInput(f"{option}{state} is not a folder: give the folder of `hplm serve --state`")
    return state


def settled(manager: Manager, change: str = "", **result: Any) -> dict[str, Any]:
    """Waits for servers after a change, and prints what was changed and which servers have not taken it. Returns the result."""
    late = manager.settle()
    if change:
        print(change, flush=True)
    if late:
        print(f"  not yet taken by {', '.join(late)}: check that these servers are running")
    return {**result, "late": late}
