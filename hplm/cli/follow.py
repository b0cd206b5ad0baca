"""`hplm follow`: keeps a copy of the live state that another machine serves."""

from __future__ import annotations

import argparse
import signal
import threading
from pathlib import Path

from hplm.cli.serve import say


def register(commands: argparse._SubParsersAction) -> None:
    follow = commands.add_parser(
        "follow",
        help="keep a copy of another machine's live state, for the servers here",
        description="Keep a copy of the live state that nginx serves on another machine (docs/cluster.md), until Ctrl-C or "
        "SIGTERM. Give the copy to `hplm serve --state`. It can only be changed at its source. While the source is away, the "
        "copy stays as it is.",
    )
    follow.add_argument("--from", dest="source", required=True, metavar="URL", help="the source, such as http://10.0.0.1:8090")
    follow.add_argument(
        "--repository",
        type=Path,
        default=Path("model_repository"),
        metavar="DIR",
        help="the served model repository, the same as at the source (default: model_repository)",
    )
    follow.add_argument(
        "--state", type=Path, required=True, metavar="DIR", help="folder of the copy, on a disk of this machine"
    )
    follow.add_argument("--token-file", type=Path, metavar="FILE", help="file with the token that the source asks for")
    follow.add_argument(
        "--name", help="name of this machine in reports to the source; no other may have it (default: from the host name)"
    )
    follow.add_argument("--once", action="store_true", help="end when everything of the newest generation is here")
    follow.add_argument(
        "--state-must-exist",
        action="store_true",
        help="with --once: also wait until the source has a state, which `hplm begin` makes",
    )
    follow.add_argument(
        "--grace",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="how long to go on after SIGTERM or Ctrl-C while a server still reads the copy (default: 0)",
    )
    follow.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from hplm.errors import InvalidInput
    from hplm.follow.follower import Follower, usual_name
    from hplm.follow.source import Source

    token = args.token_file.read_text("utf-8").strip() if args.token_file is not None else ""
    if args.state_must_exist and not args.once:
        raise InvalidInput("--state-must-exist says how long --once waits: give --once too")
    if args.token_file is not None and not token:
        raise InvalidInput(f"{args.token_file} is empty: write the token of the source into it")
    stop = threading.Event()
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, lambda *_: stop.set())
    name = args.name or usual_name(args.state)
    follower = Follower(args.repository, args.state, lambda: Source(args.source, token), name, say)
    say(f"from          {args.source}")
    say(f"copy          {args.state}")
    say(f"reports as    {name}")
    try:
        follower.run(stop, args.once, args.state_must_exist)
        if stop.is_set():
            follower.finish(args.grace)
    finally:
        follower.close()
    if stop.is_set():
        say("stopped")
