"""Locust's users. Each scenario is a class whose requests are planned before the clock starts. Latency counts from due times.

An idle user takes the next request of the plan and sends it when it is due. So a slow server does not slow down the load, as
long as there are enough users. A request that is sent late because all users are busy counts as late.
"""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import gevent
from gevent.event import Event
from locust import User, task
from locust.exception import StopUser

from hplm.errors import InvalidInput
from hplm.simulate.arrivals import MILLISECOND, SECOND, Arrivals
from hplm.tasks.tasks import find_task
from hplm_client import HplmClient, HplmClientError
from loadtest.outcomes import CUT, LATE, ON_TIME, UNSENT, NotOnTime, OutcomeCounts
from loadtest.texts import TextSource
from loadtest.traffic import TCB, Mix, Recorded, burst, gamma, read_recorded, steady

FIRST_TOKEN, TOKEN = "FIRST TOKEN", "TOKEN"  # types of requests, to Locust


@dataclass(frozen=True)
class ScenarioTenant:
    id: str
    task: str = "classify"


@dataclass
class ScenarioLoad:
    """The requests of one scenario."""

    arrivals: Arrivals
    texts: list[str]
    started: float = 0.0
    answered: int = 0

    def __post_init__(self) -> None:
        self.waiting = iter(range(len(self.arrivals)))

    @property
    def done(self) -> bool:
        return self.answered == len(self.arrivals)


class Scenario(User):
    abstract = True
    generates = False  # whether its tenants answer with new text
    arrivals: ClassVar[Callable[[Namespace, Mix], Arrivals]]  # returns all requests of the scenario
    plan: ClassVar[ScenarioLoad]
    # All scenarios of a run share these:
    can_run: ClassVar[bool] = False  # else its options are wrong, and Locust starts users all the same
    options: ClassVar[Namespace]
    tenants: ClassVar[list[ScenarioTenant]]
    all_texts: ClassVar[TextSource]
    outcomes: ClassVar[OutcomeCounts]
    begun: ClassVar[Event]  # set when all users have started; then the clock of every plan starts

    @classmethod
    def check_tenants(cls) -> None:
        """Raises if the tenants are of another kind of backbone. Without a repository their tasks are not known."""
        for tenant in cls.tenants:
            if cls.options.repository and find_task(tenant.task).generates != cls.generates:
                raise InvalidInput(
                    f"{cls.__name__} does not ask tenant {tenant.id!r}, whose task is {tenant.task!r}: Chat asks decoders, and "
                    "all others ask encoders; --backbone chooses one"
                )

    @classmethod
    def prepare(cls) -> None:
        """Makes the scenario's plan, with all texts, so that sending does not have to make them."""
        own = cls.requests()
        each = zip(own.arrivals.tokens.tolist(), own.texts, strict=True)
        texts = [cls.all_texts.of(tokens, i) if text is None else text for i, (tokens, text) in enumerate(each)]
        cls.plan = ScenarioLoad(own.arrivals, texts)

    @classmethod
    def requests(cls) -> Recorded:
        given = cls.options
        arrivals = cls.arrivals(given, Mix(len(cls.tenants), given.zipf, given.lengths or TCB, given.deadline_ms))
        return Recorded(arrivals, [cls.all_texts.whole(i) if given.lengths is None else None for i in range(len(arrivals))])

    def on_start(self) -> None:
        if not self.can_run:
            raise StopUser
        given = self.options
        to = given.address[given.protocol], given.protocol, given.backbone, given.api_key, given.patience
        self.client = HplmClient(*to, retries=0, ca_file=given.ca_file)
        self.begun.wait()

    def on_stop(self) -> None:
        if self.can_run:
            self.client.close()

    @task
    def send_next(self) -> None:
        number = next(self.plan.waiting, None)
        if number is None:
            raise StopUser
        due = self.plan.started + int(self.plan.arrivals.at_ns[number]) / SECOND
        gevent.sleep(max(0.0, due - time.time()))
        try:
            self._send(number, due)
        finally:
            self.plan.answered += 1

    def _send(self, number: int, due: float) -> None:
        tenant = self.tenants[int(self.plan.arrivals.tenant[number]) % len(self.tenants)]
        allowed_ms = int(self.plan.arrivals.allowed_ns[number]) / MILLISECOND or math.inf
        lag_ms = max(0.0, _ms_since(due))
        failure: NotOnTime | None = None
        try:
            if lag_ms >= allowed_ms:
                raise NotOnTime(UNSENT, "no user was free before the deadline: start more users")
            self._ask(number, tenant, allowed_ms - lag_ms if allowed_ms < math.inf else None, due)
            if _ms_since(due) > allowed_ms:
                raise NotOnTime(LATE, "answered after the deadline")
        except NotOnTime as error:
            failure = error
        except HplmClientError as error:
            # A refusal's own words have times in them, and each would be a line of Locust's table.
            failure = NotOnTime(error.word or type(error).__name__, type(error).__name__ if error.word else str(error))
        outcome = failure.outcome if failure else ON_TIME
        self.outcomes.add(type(self).__name__, outcome, lag_ms)
        self._fire(self.options.protocol.upper(), _ms_since(due), due, tenant, outcome, failure)

    def _fire(
        self, kind: str, took_ms: float, since: float, tenant: ScenarioTenant, outcome: str, failure: Exception | None = None
    ) -> None:
        """Tells Locust of a time. `kind` is the type of request under which Locust lists it."""
        self.environment.events.request.fire(
            request_type=kind,
            name=type(self).__name__,
            response_time=took_ms,
            response_length=0,
            exception=failure and str(failure),
            context={"tenant": tenant.id, "outcome": outcome},
            start_time=since,
        )

    def _ask(self, number: int, tenant: ScenarioTenant, deadline_ms: float | None, due: float) -> None:
        """Sends a request of the plan and waits for its answer. Raises if there is none, or not the whole one."""
        text, priority = self.plan.texts[number], int(self.plan.arrivals.priority[number])
        question, passage = ("What is it about?", text) if find_task(tenant.task).needs_pair else (text, None)
        more = {"hplm_rung": self.options.rung} if self.options.rung else {}
        asked = {"deadline_ms": deadline_ms, "truncate": True, "priority": priority, "parameters": more}
        self.client.infer(question, tenant=tenant.id, pair=passage, embedding=find_task(tenant.task).is_vector, **asked)


def _ms_since(due: float) -> float:
    return (time.time() - due) * 1e3


class Steady(Scenario):
    """Every tenant sends a request every `--period` seconds (HMI 7.4: 20), 100 times."""

    arrivals = staticmethod(lambda options, mix: steady(mix, options.seed, options.period))


class Burst(Scenario):
    """250 users start, one every 0.05 s. Each sends 50 requests, one every 1.2 s (HMI 7.4)."""

    arrivals = staticmethod(lambda options, mix: burst(mix, options.seed))


class Poisson(Scenario):
    """`--rate` requests a second for `--duration` seconds, even if the server is slower."""

    arrivals = staticmethod(lambda options, mix: gamma(mix, options.rate, options.duration, 1.0, options.seed))


class Gamma(Scenario):
    """Like Poisson, but the gaps have the coefficient of variation `--cv`. Above 1, requests come in bursts."""

    arrivals = staticmethod(lambda options, mix: gamma(mix, options.rate, options.duration, options.cv, options.seed))


class Chat(Poisson):
    """Poisson for the tenants of a decoder: each request is a prompt, and its answer of `--max-tokens` tokens is streamed.

    Locust lists the times to the first token, which count from due times, and the times of each token after it.
    """

    generates = True

    def _ask(self, number: int, tenant: ScenarioTenant, deadline_ms: float | None, due: float) -> None:
        pieces = self.client.stream(
            self.plan.texts[number],
            tenant=tenant.id,
            deadline_ms=deadline_ms,
            truncate=True,
            priority=int(self.plan.arrivals.priority[number]),
            max_tokens=self.options.max_tokens,
            ignore_eos=True,
        )
        before = 0.0  # when the last piece came
        for piece in pieces:
            now = time.time()
            if not before:
                self._fire(FIRST_TOKEN, (now - due) * 1e3, due, tenant, ON_TIME)
            elif piece.tokens:
                self._fire(TOKEN, (now - before) * 1e3 / piece.tokens, before, tenant, ON_TIME)
            before = now
            if piece.finish_reason == "deadline":
                raise NotOnTime(CUT, "the deadline came before the last token")


class Replay(Scenario):
    """Replays a recorded trace (`--trace`): its times, tenants, deadlines, priorities, and texts or their lengths."""

    @classmethod
    def requests(cls) -> Recorded:
        if cls.options.trace is None:
            raise InvalidInput(
                "Replay needs --trace FILE: give JSONL with arrival, tokens or text, deadline_ms, tenant, priority"
            )
        return read_recorded(Path(cls.options.trace), [tenant.id for tenant in cls.tenants])
