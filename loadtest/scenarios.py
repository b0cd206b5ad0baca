"""Locust's users. Each scenario is a class whose requests are planned before the clock starts. Latency counts from due times.

An idle user takes the next request of the plan and sends it when it is due. So a slow server does not slow down the load, as
long as there are enough users. A request that is sent late because all users are busy counts as late.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import gevent
from gevent.event import Event
from locust import User, task
from locust.exception import StopUser

from hplm.errors import InvalidInput
from hplm.scheduling.simulation.arrivals import MILLISECOND, SECOND, Arrivals
from hplm.tasks import find_task
from hplm_client import HplmClient, HplmClientError
from loadtest.outcomes import CUT, LATE, ON_TIME, UNSENT, NotOnTime, Outcomes
from loadtest.recorded import read_recorded
from loadtest.texts import Texts
from loadtest.traffic import Mix, burst, gamma, steady

FIRST_TOKEN, TOKEN = "FIRST TOKEN", "TOKEN"  # types of requests, to Locust


@dataclass(frozen=True)
class Tenant:
    id: str
    task: str = "classify"


@dataclass
class Plan:
    """The requests of one scenario."""

    arrivals: Arrivals
    texts: list[str]
    started: float = 0.0
    next: int = 0
    answered: int = 0

    def take(self) -> int | None:
        if self.next == len(self.arrivals):
            return None
        self.next += 1
        return self.next - 1

    @property
    def done(self) -> bool:
        return self.answered == len(self.arrivals)


@dataclass
class Field:
    """The data that all scenarios of a run share."""

    options: Namespace
    tenants: list[Tenant]
    texts: Texts
    outcomes: Outcomes
    begun: Event  # set when all users have started; then the clock of every plan starts


class Scenario(User):
    abstract = True
    generates = False  # whether its tenants answer with new text
    field: ClassVar[Field]
    plan: ClassVar[Plan]

    @classmethod
    @abstractmethod
    def arrivals(cls, options: Namespace, mix: Mix) -> Arrivals:
        """Returns all requests of the scenario."""

    @classmethod
    def check_tenants(cls) -> None:
        """Raises if the tenants are of another kind of backbone. Without a repository their tasks are not known."""
        for tenant in cls.field.tenants:
            if cls.field.options.repository and find_task(tenant.task).generates != cls.generates:
                raise InvalidInput(
                    f"{cls.__name__} does not ask tenant {tenant.id!r}, whose task is {tenant.task!r}: Chat asks decoders, and "
                    "all others ask encoders; --backbone chooses one"
                )

    @classmethod
    def prepare(cls) -> None:
        """Makes the scenario's plan, with all texts, so that sending does not have to make them."""
        field, options = cls.field, cls.field.options
        mix = Mix(len(field.tenants), options.zipf, options.lengths or Mix.lengths, options.deadline_ms)
        arrivals = cls.arrivals(options, mix)
        cls.plan = Plan(arrivals, cls.texts_of(arrivals))

    @classmethod
    def texts_of(cls, arrivals: Arrivals) -> list[str]:
        texts = cls.field.texts
        if cls.field.options.lengths is None:
            return [texts.whole(number) for number in range(len(arrivals))]
        return [texts.of(tokens, number) for number, tokens in enumerate(arrivals.tokens.tolist())]

    def on_start(self) -> None:
        options = self.field.options
        self.client = HplmClient(
            options.address[options.protocol],
            options.protocol,
            options.backbone,
            options.api_key,
            options.patience,
            retries=0,
            ca_file=options.ca_file,
        )
        self.field.begun.wait()

    def on_stop(self) -> None:
        self.client.close()

    @task
    def send_next(self) -> None:
        number = self.plan.take()
        if number is None:
            raise StopUser
        due = self.plan.started + int(self.plan.arrivals.at_ns[number]) / SECOND
        gevent.sleep(max(0.0, due - time.time()))
        try:
            self._send(number, due)
        finally:
            self.plan.answered += 1

    def _send(self, number: int, due: float) -> None:
        tenant = self.field.tenants[int(self.plan.arrivals.tenant[number]) % len(self.field.tenants)]
        allowed_ms = int(self.plan.arrivals.allowed_ns[number]) / MILLISECOND
        lag_ms = max(0.0, (time.time() - due) * 1e3)
        failure: Exception | None = None
        outcome = ON_TIME
        try:
            if allowed_ms and lag_ms >= allowed_ms:
                outcome = UNSENT
                failure = NotOnTime(UNSENT, "no user was free before the deadline: start more users")
            else:
                self._ask(number, tenant, allowed_ms - lag_ms if allowed_ms else None, due)
        except NotOnTime as error:
            outcome, failure = error.outcome, error
        except HplmClientError as error:
            outcome = error.word or type(error).__name__
            failure = NotOnTime(outcome, type(error).__name__)
        took_ms = (time.time() - due) * 1e3
        if failure is None and allowed_ms and took_ms > allowed_ms:
            outcome, failure = LATE, NotOnTime(LATE, "answered after the deadline")
        self.field.outcomes.add(type(self).__name__, outcome, lag_ms)
        self._fire(self.field.options.protocol.upper(), took_ms, due, tenant, outcome, failure)

    def _fire(
        self, kind: str, took_ms: float, since: float, tenant: Tenant, outcome: str, failure: Exception | None = None
    ) -> None:
        """Tells Locust of a time. `kind` is the type of request under which Locust lists it."""
        self.environment.events.request.fire(
            request_type=kind,
            name=type(self).__name__,
            response_time=took_ms,
            response_length=0,
            exception=failure,
            context={"tenant": tenant.id, "outcome": outcome},
            start_time=since,
        )

    def _ask(self, number: int, tenant: Tenant, deadline_ms: float | None, due: float) -> None:
        """Sends a request of the plan and waits for its answer. Raises if there is none, or not the whole one."""
        text, priority = self.plan.texts[number], int(self.plan.arrivals.priority[number])
        question, passage = ("What is it about?", text) if find_task(tenant.task).needs_pair else (text, None)
        rung = self.field.options.rung or None
        self.client.infer(
            question, tenant=tenant.id, pair=passage, deadline_ms=deadline_ms, truncate=True, priority=priority, rung=rung
        )


class Steady(Scenario):
    """Every tenant sends a request every `--period` seconds (HMI 7.4: 20), 100 times."""

    @classmethod
    def arrivals(cls, options: Namespace, mix: Mix) -> Arrivals:
        return steady(mix, options.seed, options.period)


class Burst(Scenario):
    """250 users start, one every 0.05 s. Each sends 50 requests, one every 1.2 s (HMI 7.4)."""

    @classmethod
    def arrivals(cls, options: Namespace, mix: Mix) -> Arrivals:
        return burst(mix, options.seed)


class Poisson(Scenario):
    """`--rate` requests a second for `--duration` seconds, even if the server is slower."""

    @classmethod
    def arrivals(cls, options: Namespace, mix: Mix) -> Arrivals:
        return gamma(mix, options.rate, options.duration, 1.0, options.seed)


class Gamma(Scenario):
    """Like Poisson, but the gaps have the coefficient of variation `--cv`. Above 1, requests come in bursts."""

    @classmethod
    def arrivals(cls, options: Namespace, mix: Mix) -> Arrivals:
        return gamma(mix, options.rate, options.duration, options.cv, options.seed)


class Chat(Poisson):
    """Poisson for the tenants of a decoder: each request is a prompt, and its answer of `--max-tokens` tokens is streamed.

    Locust lists the times to the first token, which count from due times, and the times of each token after it.
    """

    generates = True

    def _ask(self, number: int, tenant: Tenant, deadline_ms: float | None, due: float) -> None:
        pieces = self.client.stream(
            self.plan.texts[number],
            tenant=tenant.id,
            deadline_ms=deadline_ms,
            truncate=True,
            priority=int(self.plan.arrivals.priority[number]),
            max_tokens=self.field.options.max_tokens,
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
    def prepare(cls) -> None:
        field = cls.field
        if field.options.trace is None:
            raise InvalidInput(
                "Replay needs --trace FILE: give JSONL with arrival, tokens or text, deadline_ms, tenant, priority"
            )
        known = [tenant.id for tenant in field.tenants]
        recorded = read_recorded(Path(field.options.trace), known)
        lengths = recorded.arrivals.tokens.tolist()
        texts = [
            text if text is not None else field.texts.of(tokens, number)
            for number, (text, tokens) in enumerate(zip(recorded.texts, lengths, strict=True))
        ]
        cls.plan = Plan(recorded.arrivals, texts)
