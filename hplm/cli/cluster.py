"""`hplm cluster`: a whole cluster on this machine, to try it: replicas that read one state, and the router."""

from __future__ import annotations

import hashlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hplm.cli.options import Json, Numbers, about
from hplm.cli.serve import say, until_stopped
from hplm.errors import InvalidInput

if TYPE_CHECKING:
    from hplm.cluster.pools import PlannedReplica

FOLDER = Path(".hplm/cluster")
REPLICAS = 2


Folder = Annotated[Path, about("where the cluster keeps its files")]


def up(
    *, repository: Path = Path("model_repository"), replicas: int | None = None, cores: Numbers = (), state: Path | None = None,
    port: int = 8000, placement: Path | None = None, folder: Folder = FOLDER,
) -> None:  # fmt: skip
    """Start several servers on this machine, which read one state, and HAProxy before them, and keep them running.

    They serve until Ctrl-C or SIGTERM. Changes that `hplm tenant` makes with this --state reach all servers. Needs haproxy.

    :param repository: the model repository to serve
    :param replicas: how many servers (default: 2)
    :param cores: the cores that the servers divide, such as 0,1 (default: all share all)
    :param state: the state that all servers read (default: FOLDER/state)
    :param port: of the router; 0: any free port
    :param placement: a pool of servers for each group of tenants, from `hplm place search`
    """
    from hplm.cluster.running import Cluster

    state = state or folder / "state"
    with until_stopped():
        pools = _pools(repository, replicas, cores, placement, folder, state)
        with Cluster(pools, state, folder, port, say) as cluster:
            where = f"--repository {shlex.quote(str(repository))} --state {shlex.quote(str(state))}"
            say(f"{'change':<13} hplm tenant ... {where}")
            say(f"Ready at {cluster.address}, for this machine only (loopback). Ctrl-C or SIGTERM stops it.")
            cluster.run()


def _pools(
    repository: Path, replicas: int | None, cores: tuple[int, ...], placement: Path | None, folder: Path, state: Path
) -> list[list[PlannedReplica]]:
    from hplm.cluster.pools import one_pool, placed_pools
    from hplm.server.repository import model_names

    model_names(repository)  # a wrong one is refused before anything starts
    if placement is None:
        count = REPLICAS if replicas is None else replicas
        return [one_pool(repository, count, cores)]
    if replicas is not None or cores:
        raise InvalidInput("the placement says how many servers there are, on which cores: leave out --replicas and --cores")
    from builder.publish.groups import emit
    from hplm.placement.placement import Placement

    if any(state.glob("*/*/CURRENT")):
        raise InvalidInput(f"{state} is of an earlier version, in which each group had a state: name a new --state")
    placed = Placement.read(placement)
    exported = sorted(repository.glob("*/1/tenants.json"))
    content = hashlib.sha256(b"".join(path.read_bytes() for path in (placement, *exported))).hexdigest()[:12]
    groups = folder / f"placed-{content}"
    pools = placed_pools(placed.groups, groups)
    if not groups.exists():
        emit(placed, repository, groups, state if any(state.glob("*/CURRENT")) else None)
    return pools


def roll(*, folder: Folder = FOLDER, json: Json = False) -> dict[str, Any]:
    """Replace all servers of the running cluster, one after the other, while the others serve."""
    return _asked(folder, "roll", json)


def status(*, folder: Folder = FOLDER, json: Json = False) -> dict[str, Any]:
    """Print a line for each server of the running cluster."""
    return _asked(folder, "status", json)


def _asked(folder: Path, what: str, as_json: bool) -> dict[str, Any]:
    from hplm.cluster.control import ask

    return ask(folder, what, lambda line: print(line, file=sys.stderr if as_json else sys.stdout, flush=True))
