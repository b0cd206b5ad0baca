"""A registry in a bucket of this machine, and what may happen to it: it goes away, or a server hears nothing of it."""

from __future__ import annotations

import os
import random
import select
import socketserver
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import create_connection
from typing import Any
from unittest import mock

import testing.bucket
from hplm.location import location_of
from hplm.server.ports import LOOPBACK, free_ports
from hplm.server.process import Process
from hplm.tenants.manager import Manager
from loadtest.chaos.faults import Fault, WrongAnswer, asked
from loadtest.chaos.history import OK, Asker, TenantText
from loadtest.server import ServedCopy

STATE = location_of("s3://bucket/hplm")
START_S, END_S, LOOK_S = 60.0, 10.0, 0.05
LEASE_S = 10.0  # how long a server answers tenants with keys while the bucket is away
LATER_S = 3.0  # after the lease
OPEN, CLOSED, SILENT = "open", "closed", "silent"


class Link(socketserver.ThreadingTCPServer):
    """A server's way to the bucket. Once silent, a connection says nothing any more, as where a firewall has forgotten it."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__((LOOPBACK, 0), _Relay)
        self.bucket, self.state = (LOOPBACK, port), OPEN
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://{LOOPBACK}:{self.server_address[1]}"


class _Relay(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        link: Any = self.server
        with suppress(OSError), create_connection(link.bucket) as there:
            to, is_lost = {self.request: there, there: self.request}, False
            while link.state != CLOSED:
                is_lost |= link.state == SILENT
                for one in select.select([] if is_lost else list(to), [], [], LOOK_S)[0]:
                    if not (data := one.recv(1 << 16)):
                        return
                    to[one].sendall(data)


@contextmanager
def bucket(folder: Path) -> Iterator[Link]:
    """Runs an S3 server with an empty bucket, which this process reaches by its environment. Gives a way to it for a server."""
    (port,) = free_ports(1)
    server = Process("the bucket", [sys.executable, "-m", testing.bucket.__name__, str(port)], folder / "bucket.log")
    server.start()
    try:
        server.wait_until(lambda: "ready" in server.output(), START_S)
        address = {**testing.bucket.RIGHTS, "AWS_ENDPOINT": f"http://{LOOPBACK}:{port}"}
        with mock.patch.dict(os.environ, address), Link(port) as link:
            try:
                yield link
            finally:
                link.shutdown()
    finally:
        server.stop(END_S)


def with_key(manager: Manager, text: str) -> TenantText:
    """Gives the newest tenant a key, and returns a question to it. A last key cannot be revoked, so it gets another one."""
    tenant = manager.current().tenants[-1].id
    manager.add_key(tenant)
    return TenantText(tenant, text, manager.add_key(tenant)[0])


def faults(link: Link, keyed: TenantText) -> list[Fault]:
    """`keyed`: a question to a tenant that has a key."""

    @contextmanager
    def away(victim: ServedCopy, chance: random.Random) -> Generator[None]:
        """Tenants with keys are refused after the lease, and all others answered."""
        link.state = CLOSED
        try:
            yield
            _expect_none(victim, keyed, "after the lease, while the bucket is away")
        finally:
            link.state = OPEN

    @contextmanager
    def cut_off(victim: ServedCopy, chance: random.Random) -> Generator[None]:
        """A key is revoked while the server hears nothing of the bucket. It opens nothing after the time that was promised."""
        manager = victim.manager()
        secret, key = manager.add_key(keyed.tenant)
        new = TenantText(keyed.tenant, keyed.text, secret)
        if (answer := asked(victim, new, True)).outcome != OK:
            raise WrongAnswer(f"{keyed.tenant} is not answered with its newest key: {answer.reason}")
        link.state = SILENT
        try:
            dead = manager.revoke_key(keyed.tenant, key.id)
            time.sleep(max(0.0, dead - time.time()))
            _expect_none(victim, new, "with a key that was revoked while the server was cut off")
            yield
        finally:
            link.state = OPEN

    return [Fault("bucket away", away, (LEASE_S + LATER_S, LEASE_S + LATER_S)), Fault("server cut off", cut_off)]


def _expect_none(victim: ServedCopy, question: TenantText, when: str) -> None:
    with Asker(victim.address, victim.backbone) as asker:
        if asker.ask(question).outcome == OK:
            raise WrongAnswer(f"{question.tenant} is answered {when}")
