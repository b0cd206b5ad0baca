"""Changes tenants while servers are harmed, asks all servers without a pause, and says which answers were wrong."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bench.registry_parts import Machine, ManagerProcess, State
from bench.rows import say
from hplm.arrays import Array
from hplm.errors import HplmError, NoTenant
from loadtest.chaos.history import OK, WRONG, Answer, Asker, Clients, Heard, Question

TENANTS = 4  # that each manager changes
KEYS = 3  # of a tenant at most
LAG = 10.0  # seconds in which a server that sees the bucket must have a change, on a machine that is full of work
MIXED = "mixed"
TOLD = 40  # entries of a tenant, where an answer was wrong: those of some minutes

Expected = Mapping[str, Sequence[Array]]  # the answers of all knowledge, by text


class Entry(NamedTuple):
    """Says what a tenant was or may have been, and when."""

    begin: float
    end: float
    knowledge: int | None
    secrets: tuple[str, ...]  # empty: it is open

    def answer(self, key: str) -> int | None:
        return self.knowledge if not self.secrets or key in self.secrets else None


class Books:
    """Keeps what all tenants were, as their managers have said."""

    def __init__(self) -> None:
        self._entries: dict[str, list[Entry]] = {}

    def may_be(self, tenant: str, state: State, secrets: Sequence[str] = ()) -> None:
        entry = Entry(time.monotonic(), float("inf"), state.now, tuple(secrets))
        self._entries[tenant] = [*self._entries.get(tenant, ()), entry]

    def is_now(self, tenant: str, state: State, secrets: Sequence[str] = ()) -> None:
        now, before = time.monotonic(), self._entries.get(tenant, [])
        self._entries[tenant] = [one._replace(end=min(one.end, now)) for one in before]
        self.may_be(tenant, state, secrets)

    def allowed(self, question: Question, since: float, until: float) -> set[int | None]:
        entries = self._entries.get(question.tenant, ())
        return {one.answer(question.key) for one in entries if one.end >= since and one.begin <= until}

    def question(self, tenant: str, text: str, chance: random.Random) -> Question:
        secrets = self._entries[tenant][-1].secrets
        return Question(tenant, text, chance.choice(secrets) if secrets else "")

    def told(self, tenant: str, now: float) -> str:
        """Returns what a tenant was last, and from and until how many seconds ago."""
        return ", ".join(f"{one.knowledge} {now - one.begin:.1f}-{now - one.end:.1f}" for one in self._entries[tenant][-TOLD:])

    def tenants(self) -> list[str]:
        return list(self._entries)


class Owner(threading.Thread):
    """Changes tenants that nobody else changes, and so knows what they are."""

    def __init__(self, number: int, knowledge: int, manager: ManagerProcess, witness: ManagerProcess, books: Books) -> None:
        super().__init__(daemon=True)
        self.manager, self._witness, self._books, self._knowledge = manager, witness, books, knowledge
        self._chance = random.Random(number)
        self._turns = threading.Semaphore(0)
        self.due = self.done = 0
        self.states = {f"owner-{number}-{i}": State() for i in range(TENANTS)}
        self._secrets: dict[str, str] = {}  # by key
        self.acknowledged: dict[int, tuple[str, str]] = {}  # action and tenant by generation
        self.unknown: Counter[str] = Counter()  # changes of which nobody has heard, by reason
        self.lost: list[str] = []
        for tenant in self.states:
            self._books.is_now(tenant, State())

    def change(self, count: int) -> None:
        """Has it make so many changes. They are made when `done` is `due`."""
        self.due += count
        self._turns.release(count)

    def run(self) -> None:
        while True:
            self._turns.acquire()
            self._change(self._chance.choice(list(self.states)))
            self.done += 1

    def _change(self, tenant: str) -> None:
        before = self.states[tenant]
        action, given, after = self._chosen(before)
        self._books.may_be(tenant, after, self._known(after))
        try:
            found, generation = self.manager.ask(action, tenant, *given)
        except HplmError as error:
            self.unknown[str(error).partition(" ")[0]] += 1
            after = self._resolved(tenant, before, after, action)
        else:
            self.acknowledged[generation] = action, tenant
            if action == "key add":
                key, secret = found
                self._secrets[key] = secret
                after = after._replace(keys=(*before.keys, key))
        self.states[tenant] = after
        self._books.is_now(tenant, after, self._known(after))

    def _chosen(self, state: State) -> tuple[str, tuple[object, ...], State]:
        """Returns a change, what it needs, and what the tenant is after it."""
        new = self._chance.choice([number for number in range(self._knowledge) if number != state.now])
        if state.now is None:
            return "add", (new,), State(new)
        choices: list[tuple[str, tuple[object, ...], State]] = [
            ("update", (new,), State(new, state.now, state.keys)),
            ("delete", (), State()),
        ]
        if state.before is not None:
            choices.append(("rollback", (), State(state.before, None, state.keys)))
        if len(state.keys) < KEYS:
            choices.append(("key add", (), state._replace(keys=(*state.keys, "new"))))
        if len(state.keys) > 1:
            gone = self._chance.choice(state.keys)
            left = tuple(key for key in state.keys if key != gone)
            choices.append(("key revoke", (gone,), state._replace(keys=left)))
        return self._chance.choice(choices)

    def _known(self, state: State) -> list[str]:
        return [self._secrets.get(key, key) for key in state.keys]

    def _resolved(self, tenant: str, before: State, after: State, action: str) -> State:
        """Returns what a tenant is after a change of which nobody has heard."""
        self._witness.ask("fence")
        (state,), _ = self._witness.ask("states", [tenant])
        named = state._replace(keys=tuple(key if key in before.keys else "new" for key in state.keys))
        if named not in (before, after):
            self.lost.append(f"{action} of {tenant}: {before} or {after}, but {state}")
        return state


class Judge(Clients):
    """Asks all servers without a pause, and compares each answer with what the books allow."""

    pauses = 0.05, 0.25

    def __init__(self, machines: Sequence[Machine], clients: int, books: Books, expected: Expected, kept: Question) -> None:
        """`kept`: what the first client of each machine asks."""
        self._machines, self._books, self._expected, self.kept = machines, books, expected, kept
        numbers = range(max(clients, len(machines)))
        self._chances = [random.Random(number) for number in numbers]
        super().__init__([Asker(machines[number % len(machines)].http, "toy") for number in numbers])

    def of_kept(self) -> Iterator[tuple[Machine, Heard]]:
        """Yields what the machines have answered for the tenant that is kept."""
        return ((machine, one) for machine, own in zip(self._machines, self.heard, strict=False) for one in own)

    def is_newest(self, machine: Machine, tenant: str) -> bool:
        """Whether a server answers as the tenant is now."""
        asker, now = Asker(machine.http, "toy"), time.monotonic()
        question = self._books.question(tenant, next(iter(self._expected)), random.Random(0))
        found = self._found(question, asker.ask(question))
        asker.close()
        return found in self._books.allowed(question, now, now)

    def question(self, client: int, turn: int) -> Question:
        if client < len(self._machines):
            return self.kept
        chance = self._chances[client]
        return self._books.question(chance.choice(self._books.tenants()), chance.choice(list(self._expected)), chance)

    def judged(self, client: int, question: Question, answer: Answer, asked: float, ended: float) -> tuple[str, str]:
        return self.verdict(self._machines[client % len(self._machines)], question, answer, asked, ended)

    def verdict(self, machine: Machine, question: Question, answer: Answer, asked: float, ended: float) -> tuple[str, str]:
        if (found := self._found(question, answer)) is None and answer.said != NoTenant.word:
            return answer.outcome, answer.said
        since = asked - LAG
        for begin, end in machine.blind:
            if begin < asked < end + LAG:
                since = min(since, begin - LAG)
        allowed = self._books.allowed(question, since, ended)
        if found in allowed:
            return answer.outcome, answer.said
        outcome = MIXED if found == -1 else WRONG
        why = f"{machine.name} answers {question.tenant} as {found}, not {allowed}, within {ended - asked:.1f} s"
        say(f"{outcome}: {why}; it was {self._books.told(question.tenant, ended)}")
        return outcome, machine.name

    def _found(self, question: Question, answer: Answer) -> int | None:
        """Returns whose knowledge answered; -1: nobody's. None: no answer."""
        if answer.outcome != OK:
            return None
        return next((n for n, one in enumerate(self._expected[question.text]) if answer.agrees_with(one)), -1)
