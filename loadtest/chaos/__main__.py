"""Harms a server under load, and counts what its clients see.

    python -m loadtest.chaos --repository model_repository --minutes 10 --json

A copy of the repository is served by `hplm serve`, clients ask without a pause, and faults come in random order, one at a time:
processes killed and stopped, files broken, disks filled, floods. Every answer is compared with the one before the first fault.
`--faults tenant` harms nothing: a tenant comes and goes, and the figures show what grows in a long run. As root, the run has a
small /dev/shm and state of its own (`unshare`), so that they can be filled.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any
from unittest import mock

from hplm.errors import HplmError
from hplm.tenants.manager import Manager
from loadtest.chaos import bucket
from loadtest.chaos.faults import Fault, Unable, WrongAnswer, faults
from loadtest.chaos.growth import ProcessSize, growth, later, taken
from loadtest.chaos.history import OK, OUTCOMES, Asker, History, Observation, TenantText, expected_answers
from loadtest.server import ServedCopy, at_least_one, command

QUICK = "--minutes 0 --clients 4 --faults 'stop toy-lookup' tenant"
TENANTS = 8
TEXTS = ("a small change that everybody expected", "where does it go from here, and why", "nothing else was said about it")
WITHIN = 120.0  # seconds in which the server must answer all tenants again, or the run ends
CALM = 3.0  # seconds of load between two faults
INSIDE = "HPLM_CHAOS_INSIDE"
SHARED_MEMORY_MB, STATE_MB = 256, 32


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if os.geteuid() == 0 and INSIDE not in os.environ and (code := _in_a_place_of_its_own(words)) is not None:
        return code
    return command("chaos", __doc__, options, run, QUICK, words)


def options(parser: argparse.ArgumentParser) -> None:
    add, where = parser.add_argument, "where changes of tenants are; a bucket has faults of its own (default: %(default)s)"
    add("--minutes", type=float, default=10.0, help="how long; each fault comes at least once (default: %(default)g)")
    add("--clients", type=at_least_one, default=128, help="clients, each with a request in flight (default: %(default)s)")
    add("--faults", nargs="+", default=[], help="only faults whose names begin so, such as kill (default: all)")
    add("--seed", type=int, default=0, help="for the order of the faults (default: %(default)s)")
    add("--registry", choices=("folder", "bucket"), default="folder", help=where)


def run(args: argparse.Namespace, folder: Path, found: dict[str, Any]) -> None:
    place = Path(os.environ.get(INSIDE, folder / "state"))
    with ExitStack() as stack:
        if args.registry == "folder":
            victim = stack.enter_context(ServedCopy(args.repository, folder, place, args.backbone))
            known, keyed = faults(victim), []
        else:
            victim, known, keyed = _with_bucket(args, folder, place, stack)
        questions = [TenantText(tenant, text) for text in TEXTS for tenant in victim.open_tenants()[:TENANTS]]
        expected = expected_answers(victim.address, victim.backbone, questions)
        askers = [Asker(victim.address, model) for model in islice(cycle(victim.models), args.clients)]
        with History(askers, expected) as history:
            each, samples = _harm(args, victim, history, known, [*expected, *keyed])
        counts = history.counts()
        found |= {
            "sent": counts.total(),
            **{outcome: counts[outcome] for outcome in OUTCOMES},
            "recovery_s_max": max((one["recovery_s"] for one in each if "recovery_s" in one), default=0.0),
            "recovered": all("recovery_s" in one or "unable" in one for one in each),
            "faults": each,
            "reasons": history.reasons(),
            **later(one for own in history.heard for one in own),
            **growth(samples),
            "serve_said": victim.output().splitlines(),
        }
    if found["unanswered"] or found["wrong"] or not found["recovered"]:
        raise HplmError("a request was unanswered or wrong, or the server has not recovered: see the figures")


def _with_bucket(
    args: argparse.Namespace, folder: Path, mirror: Path, stack: ExitStack
) -> tuple[ServedCopy, list[Fault], list[TenantText]]:
    """Returns a server whose registry is in a bucket, its faults, and a question to a tenant with a key."""
    link = stack.enter_context(bucket.bucket(folder))
    stack.enter_context(mock.patch.dict(os.environ, {"HPLM_MIRROR": str(mirror)}))
    manager = Manager.open(args.repository, bucket.STATE, args.backbone)
    manager.registry.begin(bucket.LEASE_S)
    keyed = bucket.with_key(manager, TEXTS[0])
    way = {"AWS_ENDPOINT": link.endpoint}
    victim = stack.enter_context(ServedCopy(args.repository, folder, bucket.STATE, args.backbone, way))
    return victim, [*faults(victim), *bucket.faults(link, keyed)], [keyed]


def _harm(
    args: argparse.Namespace, victim: ServedCopy, history: History, known: Sequence[Fault], questions: list[TenantText]
) -> tuple[list[dict[str, Any]], list[dict[str, ProcessSize]]]:
    """Makes one fault after another, each at least once, until one is not mended. Returns what the processes had after each."""
    chance = random.Random(args.seed)
    chosen = [one for one in known if not args.faults or one.name.startswith(tuple(args.faults))]
    if not chosen:
        names = ", ".join(one.name for one in known)
        raise HplmError(f"no fault begins with {' or '.join(args.faults)}: known are {names}")
    until = time.monotonic() + 60 * args.minutes
    done: list[dict[str, Any]] = []
    samples: list[dict[str, ProcessSize]] = []
    while len(done) < len(chosen) or time.monotonic() < until:
        if len(done) % len(chosen) == 0:
            chance.shuffle(chosen)
        time.sleep(CALM)
        before, fault = history.counts(), chosen[len(done) % len(chosen)]
        found = {"fault": fault.name, **made(fault, victim, questions, chance)}
        counts = history.counts()
        counts.subtract(before)
        done.append(found | {outcome: counts[outcome] for outcome in OUTCOMES})
        samples.append(taken(victim.processes()))
        print(", ".join(f"{name} {value}" for name, value in done[-1].items()), file=sys.stderr, flush=True)
        if found.keys() & {"not_recovered", "wrong_answer"}:
            break
    return done, samples


def made(fault: Fault, victim: ServedCopy, questions: list[TenantText], chance: random.Random) -> dict[str, Any]:
    """Makes a fault, and waits until all tenants are answered again. Returns how long after it that was."""
    seconds = chance.uniform(*fault.seconds)
    lasted = {"lasted_s": round(seconds, 1)} if seconds else {}
    try:
        with fault.begin(victim, chance):
            began = time.monotonic()
            time.sleep(seconds)
    except (Unable, OSError) as error:
        return {"unable": str(error)}
    except (WrongAnswer, HplmError) as error:
        return lasted | {"wrong_answer": str(error)}
    if seconds:
        began = time.monotonic()  # of its end
    if (last := _answered_again(victim, questions)).outcome != OK:
        return lasted | {"not_recovered": last.reason}
    return lasted | {"recovery_s": round(time.monotonic() - began, 1)}


def _answered_again(victim: ServedCopy, questions: list[TenantText]) -> Observation:
    """Waits until every tenant is answered by every model. Returns the last failure if that takes too long."""
    until = time.monotonic() + WITHIN

    def ask(model: str, question: TenantText) -> Observation:
        with Asker(victim.address, model) as asker:
            while (answer := asker.ask(question)).outcome != OK and time.monotonic() < until:
                time.sleep(0.1)
        return answer

    first = {question.tenant: question for question in questions}.values()
    with ThreadPoolExecutor(len(first) * len(victim.models)) as pool:
        answers = list(pool.map(ask, *zip(*product(victim.models, first), strict=True)))
    return next((answer for answer in answers if answer.outcome != OK), Observation(OK))


def _in_a_place_of_its_own(words: list[str]) -> int | None:
    """Runs this program again where /dev/shm and the state are small and its own. Returns None if the system refuses that."""
    with tempfile.TemporaryDirectory(prefix="hplm-chaos-") as state:
        mounts = f"mount -t tmpfs -o size={SHARED_MEMORY_MB}m none /dev/shm && mount -t tmpfs -o size={STATE_MB}m none {state}"
        apart = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
        try:
            if subprocess.run([*apart, mounts], capture_output=True).returncode:
                return None
        except FileNotFoundError:  # no `unshare` on this system
            return None
        environment = {**os.environ, INSIDE: state}
        command = [*apart, f'{mounts} && exec "$@"', "sh", sys.executable, "-m", "loadtest.chaos", *words]
        return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
