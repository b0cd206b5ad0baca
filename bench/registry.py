"""`hplm bench registry`: managers and servers on one bucket, while all of them are killed and the bucket goes away."""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Any

from bench.registry_judge import MIXED, Books, Expected, Judge, Owner
from bench.registry_parts import (
    CLOSED,
    KEPT,
    LOOK_SECONDS,
    OPEN,
    SILENT,
    START_SECONDS,
    WHOLE,
    Link,
    Machine,
    ManagerProcess,
    State,
    bucket,
)
from bench.rows import Positive, Rows, Whole, benchmark, rows_of, say
from bench.server import texts_of
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.errors import HplmError, InvalidInput
from loadtest.chaos.history import OK, UNANSWERED, WRONG, Answer, Question, expected_answers
from loadtest.server import ENGINE, SERVER
from testing.random_store import TOY, random_store, random_tenants

TARGETS = {
    "lost": ("<=", 0),  # acknowledged changes that the registry or a server does not have
    "wrong": ("<=", 0),  # answers of what a tenant was not, and refusals of what it was
    "mixed": ("<=", 0),  # answers of no version at all
    "unanswered": ("<=", 0),
    "away/open": (">=", 1),  # answers for tenants without keys, after the lease
    "away/keyed": ("<=", 0),  # answers for one with keys, after the lease
    "away/back_s": ("<=", 2.0),  # until each server answers that one again
    "cut/until_dead": (">=", 1),  # answers to a revoked key at the server that is cut off
    "cut/dead": ("<=", 0),  # after the printed time
}
KNOWLEDGE, RANK, LABELS, SPREAD = 6, 8, 4, 0.3
PARTS = ("toy-lookup", "toy-upper", ENGINE, SERVER, WHOLE)
CHANGE_SECONDS = 0.1  # about as long takes a change
AFTER = 3.0


@benchmark(changes=6, clients=6, servers=1, kills=1, lease=2.0, away=3.0)
def registry(
    *,
    changes: Whole = 500,
    clients: Whole = 64,
    servers: Whole = 3,
    managers: Whole = 2,
    kills: Whole = 40,
    lease: Positive = 30.0,
    away: Positive = 90.0,
    seed: int = 0,
) -> Rows:
    """Runs managers and servers on one bucket of this machine (an S3 server by moto), and harms all of them.

    :param changes: adds, updates, rollbacks and deletions of tenants, and keys that are added and revoked
    :param clients: requests in flight, over all servers
    :param servers: each with a copy of the registry
    :param managers: each changes tenants of its own
    :param kills: `kill -9` of a manager, of a server or of a part of it
    :param lease: seconds that a server answers for tenants with keys while the bucket is away
    :param away: seconds that the bucket is away
    :param seed: of what is killed
    """
    if away <= lease:
        raise InvalidInput(f"--away {away:g} is not longer than --lease {lease:g}, so no lease would end: give more")
    with tempfile.TemporaryDirectory(prefix="hplm-") as name, ExitStack() as stack:
        folder = Path(name)
        store = random_store(folder / "store", TOY, random_tenants(KNOWLEDGE, RANK, LABELS), spread=SPREAD, corpus_tokens=5_000)
        export(store, folder / "repository", ServingOptions(slots=16, dtype="fp32"))
        port = stack.enter_context(bucket(folder))
        links = [stack.enter_context(Link(port)) for _ in range(servers + managers + 1)]
        made = [ManagerProcess(folder / "repository", store.folder, link) for link in links[servers:]]
        (*of_owners, witness), books = made, Books()
        witness.ask("begin", lease)
        witness.ask("add", KEPT, 0)
        keys = [witness.ask("key add", KEPT)[0] for _ in range(2)]
        books.is_now(KEPT, State(0), [secret for _, secret in keys])
        owners = [Owner(number, KNOWLEDGE, manager, witness, books) for number, manager in enumerate(of_owners)]
        machines = [Machine(n, folder, folder / "repository", link) for n, link in enumerate(links[:servers])]
        run = Run(machines, owners, random.Random(seed))
        say("the servers start")
        for machine in machines:
            stack.callback(machine.stop)
            machine.start()
        run.until_ready()
        for number in range(KNOWLEDGE):
            books.is_now(f"tenant-{number}", State(number))
        judge = Judge(machines, clients, books, _expected(machines[0].http), Question(KEPT, _texts()[0], keys[0][1]))
        stack.callback(judge.stop)
        for owner in owners:
            owner.start()
        each = -(-changes // (managers * kills))
        run.harm(kills // 2, each)
        figures: dict[str, Any] = {"away": _away(run, judge, links[:-1], lease, away)}
        run.harm(kills - kills // 2, each)
        losses = run.losses(witness, judge, books)
        figures["cut"] = _cut_off(run, judge, witness, books, keys)
        judge.stop()
        for line in losses:
            say(f"lost: {line}")
        counted = judge.counts()
        counts = {name: counted[name] for name in (WRONG, MIXED, UNANSWERED)}
        yield from rows_of({"lost": len(losses), **counts, **figures, **run.figures(judge)}, TARGETS)


def _texts() -> list[str]:
    return texts_of(TOY, [12, 20])


def _expected(address: str) -> Expected:
    """Returns the answers of all knowledge. They differ by more than they may, so each says whose it is."""
    exported = [f"tenant-{number}" for number in range(KNOWLEDGE)]
    found = {text: [*expected_answers(address, "toy", [Question(one, text) for one in exported]).values()] for text in _texts()}
    for answers in found.values():
        if any(Answer(OK, logits=one).agrees_with(other) for one, other in combinations(answers, 2)):
            raise HplmError("two tenants have nearly the same answers: give them weights of another seed")
    return found


class Run:
    def __init__(self, machines: Sequence[Machine], owners: Sequence[Owner], chance: random.Random) -> None:
        self.machines, self._owners, self._chance = machines, owners, chance
        self._killed: Counter[str] = Counter()

    def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Waits, and starts servers again that have ended. Returns whether it came true."""
        end = time.monotonic() + seconds
        while not (came := condition()) and time.monotonic() < end:
            for machine in self.machines:
                machine.look(say)
            time.sleep(LOOK_SECONDS)
        return came

    def wait(self, seconds: float) -> None:
        self.until(lambda: False, seconds)

    def until_ready(self) -> None:
        if not self.until(lambda: all(machine.is_ready() for machine in self.machines), START_SECONDS):
            raise HplmError(f"a server does not start within {START_SECONDS:g} s: {self.machines[0].server.last_words()}")

    def change(self, each: int) -> None:
        for owner in self._owners:
            owner.change(each)

    def until_changed(self) -> None:
        if not self.until(lambda: all(owner.done == owner.due for owner in self._owners), START_SECONDS):
            raise HplmError(f"a manager has not made its changes within {START_SECONDS:g} s")

    def harm(self, kills: int, each: int) -> None:
        """Kills something while changes are made, again and again."""
        for number in range(kills):
            self.change(each)
            self.wait(self._chance.uniform(0, each * CHANGE_SECONDS))
            part = self._chance.choice((*PARTS, "manager", "manager"))
            if part == "manager":
                self._chance.choice(self._owners).manager.kill()
            elif not self._chance.choice(self.machines).kill(part):
                part = "nothing"  # it is starting
            self._killed[part] += 1
            say(f"{number + 1} of {kills}: kill -9 of {part}")
            self.until_changed()

    def first_good(self, judge: Judge, since: float) -> float:
        """Returns when each server has answered a request from after `since`, for the tenant that is kept."""
        servers = len(self.machines)
        if not self.until(lambda: None not in judge.first(since)[:servers], START_SECONDS):
            raise HplmError(f"a server has not answered for {KEPT} within {START_SECONDS:g} s: {judge.reasons()}")
        return max(first for first in judge.first(since)[:servers] if first is not None)

    def losses(self, witness: ManagerProcess, judge: Judge, books: Books) -> list[str]:
        """Returns the acknowledged changes that are not in the registry, or not at a server."""
        found = [line for owner in self._owners for line in owner.lost]
        audit = {one["generation"]: (one["action"], one.get("tenant")) for one in witness.ask("audit")[0]}
        for owner in self._owners:
            for generation, (action, tenant) in owner.acknowledged.items():
                if audit.get(generation) != (f"tenant {action}", tenant):
                    found.append(f"{action} of {tenant} in generation {generation}: {audit.get(generation)}")
            states, _ = witness.ask("states", list(owner.states))
            pairs = zip(owner.states.items(), states, strict=True)
            found += [f"{tenant} is {there}, but was {here}" for (tenant, here), there in pairs if here != there]
        self.until_ready()
        for machine in self.machines:
            for tenant in books.tenants():
                if not self.until(lambda one=machine, name=tenant: judge.is_newest(one, name), 10 * AFTER):
                    found.append(f"{tenant} is not the newest at {machine.name}")
        return found

    def figures(self, judge: Judge) -> dict[str, Any]:
        return {
            "changes": sum(owner.done for owner in self._owners),
            "acknowledged": sum(len(owner.acknowledged) for owner in self._owners),
            "unheard": dict(sum((owner.unknown for owner in self._owners), Counter[str]())),
            "killed": dict(self._killed),
            "requests": judge.counts().total(),
            "reasons": judge.reasons(),
        }


def _away(run: Run, judge: Judge, links: Sequence[Link], lease: float, away: float) -> dict[str, Any]:
    """The bucket is away for all, while managers try to change tenants."""
    run.until_ready()
    run.first_good(judge, time.monotonic())
    say(f"the bucket is away for {away:g} s")
    for link in links:
        link.state = CLOSED
    began = max([machine.cut(CLOSED) for machine in run.machines])
    run.change(1)
    run.wait(began + lease - time.monotonic())
    answered = judge.counts()[OK]
    run.wait(began + away - time.monotonic())
    found: dict[str, Any] = {
        "open": judge.counts()[OK] - answered,
        "keyed": sum(one.is_answered and one.asked >= began + lease for _, one in judge.of_kept()),
    }
    for link in links:
        link.state = OPEN
    back = max([machine.mend() for machine in run.machines])
    found["back_s"] = round(run.first_good(judge, back) - back, 2)
    run.until_changed()
    return found


def _cut_off(run: Run, judge: Judge, witness: ManagerProcess, books: Books, keys: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """A key is revoked while a server hears nothing of the bucket, and is told nothing."""
    run.until_ready()
    run.first_good(judge, time.monotonic())
    say("a key is revoked while a server is cut off")
    machine, ((key, _), (_, other)) = run.machines[-1], keys
    machine.cut(SILENT)
    books.may_be(KEPT, State(0), [other])
    at, _ = witness.ask("key revoke", KEPT, key)
    revoked, dead = time.monotonic(), time.monotonic() + at - time.time()
    books.is_now(KEPT, State(0), [other])
    run.wait(dead + AFTER - time.monotonic())
    answered = [(where, one.asked) for where, one in judge.of_kept() if one.is_answered]
    found = {
        "until_dead": sum(where is machine and revoked <= asked < dead for where, asked in answered),
        "dead": sum(asked >= dead for _, asked in answered),
    }
    judge.kept = Question(KEPT, judge.kept.text, other)
    back = machine.mend()
    return found | {"back_s": round(run.first_good(judge, back) - back, 2)}
