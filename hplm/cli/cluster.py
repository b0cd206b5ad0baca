"""`hplm cluster`: a whole cluster on this machine, to try it: replicas that read one state, and the router."""

from __future__ import annotations

import argparse
import hashlib
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hplm.errors import InvalidInput

if TYPE_CHECKING:
    from hplm.cluster.pools import LocalPool

FOLDER = Path(".hplm/cluster")
REPLICAS = 2


def register(commands: argparse._SubParsersAction) -> None:
    cluster = commands.add_parser("cluster", help="run several servers behind one address on this machine")
    actions = cluster.add_subparsers(dest="action", required=True, metavar="ACTION")
    up = actions.add_parser(
        "up",
        help="start a cluster and keep it running",
        description="Start several servers on this machine, which read one state, and HAProxy before them. Serve until Ctrl-C "
        "or SIGTERM; what ends by itself is started again. Changes that `hplm tenant` makes with this --state reach all "
        "servers. Needs haproxy.",
    )
    up.add_argument("--repository", type=Path, default=Path("model_repository"), metavar="DIR",
                    help="the model repository to serve (default: %(default)s)")  # fmt: skip
    up.add_argument("--replicas", type=int, metavar="N", help=f"how many servers (default: {REPLICAS})")
    up.add_argument(
        "--cores", type=_cores, default=(), metavar="0,1", help="the cores that the servers divide (default: all share all)"
    )
    up.add_argument("--state", type=Path, metavar="DIR", help="the state that all servers read (default: FOLDER/state)")
    up.add_argument("--port", type=int, default=8000, help="of the router; 0: any free port (default: %(default)s)")
    up.add_argument(
        "--placement", type=Path, metavar="FILE", help="a pool of servers for each group of tenants, from `hplm place search`"
    )
    _folder_option(up)
    up.set_defaults(run=run_up)
    for name, run, text in (
        ("roll", run_roll, "replace all servers of the running cluster, one after the other, while the others serve"),
        ("status", run_status, "print a line for each server of the running cluster"),
    ):
        action = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        _folder_option(action)
        action.add_argument("--json", action="store_true", help="end with one line of JSON")
        action.set_defaults(run=run)


def _folder_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=FOLDER, metavar="DIR",
                        help="where the cluster keeps its files (default: %(default)s)")  # fmt: skip


def _cores(given: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in given.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{given!r}: give numbers of cores, such as 0,1") from None


def run_up(args: argparse.Namespace) -> None:
    from hplm.cluster.running import Cluster

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # from here on SIGTERM and Ctrl-C are the same
    state = args.state or args.folder / "state"
    pools = _pools(args, state)
    try:
        with Cluster(pools, state, args.folder, args.port, say) as cluster:
            where = f"--repository {shlex.quote(str(args.repository))} --state {shlex.quote(str(state))}"
            say(f"{'change':<13} hplm tenant ... {where}")
            say(f"Ready at {cluster.address}, for this machine only (loopback). Ctrl-C or SIGTERM stops it.")
            cluster.run()
    except KeyboardInterrupt:
        say("stopped")


def _pools(args: argparse.Namespace, state: Path) -> list[LocalPool]:
    from hplm.cluster.pools import LocalPool, placed_pools, replicas_of
    from hplm.server.repository import model_names

    model_names(args.repository)  # a wrong one is refused before anything starts
    if args.placement is None:
        count = REPLICAS if args.replicas is None else args.replicas
        return [LocalPool("all", args.repository, replicas_of(args.repository, count, args.cores))]
    if args.replicas is not None or args.cores:
        raise InvalidInput("the placement says how many servers there are, on which cores: leave out --replicas and --cores")
    from builder.publish.groups import emit
    from hplm.placement.placement import Placement

    if any(state.glob("*/*/CURRENT")):
        raise InvalidInput(f"{state} is of an earlier version, in which each group had a state: name a new --state")
    placement = Placement.read(args.placement)
    exported = sorted(args.repository.glob("*/1/tenants.json"))
    content = hashlib.sha256(b"".join(path.read_bytes() for path in (args.placement, *exported))).hexdigest()[:12]
    folder = args.folder / f"placed-{content}"
    pools = placed_pools(placement.groups, {group.name: folder / group.name for group in placement.groups})
    if not folder.exists():
        emit(placement, args.repository, folder, state if any(state.glob("*/CURRENT")) else None)
    return pools


def run_roll(args: argparse.Namespace) -> dict[str, Any]:
    from hplm.cluster.control import ask

    return ask(args.folder, "roll", _progress(args))


def run_status(args: argparse.Namespace) -> dict[str, Any]:
    from hplm.cluster.control import ask

    return ask(args.folder, "status", _progress(args))


def _progress(args: argparse.Namespace):
    return (lambda line: print(line, file=sys.stderr, flush=True)) if args.json else say


def say(line: str) -> None:
    print(line, file=sys.stdout, flush=True)
