"""A manager in this process, before a Triton that is not there, or as its command before a real one."""

from __future__ import annotations

import http.client
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from hplm.plot.index import IndexMeta
from hplm.plot.meta import TableMeta
from hplm.registry.store import Away
from hplm.server.ports import listen
from hplm_openai.__main__ import server_of
from hplm_openai.app import Gateway, RequestLimits
from hplm_openai.backbones import Backbones
from manager import children
from manager.app import application
from manager.console import Console
from manager.models import Base
from manager.rights import COMMAND_LINE
from manager.site import Site
from tests.support.wait import PATIENCE, eventually

NOWHERE = "127.0.0.1:1"


class Managed:
    """A running manager and the keys of its owners."""

    def __init__(self, site: Site, url: str) -> None:
        self.site, self.url = site, url
        self._secrets: dict[str, str] = {}

    def secret(self, owner: str) -> str:
        """Returns a key that manages. The owner is added if it is missing."""
        if owner not in self._secrets:
            self._secrets[owner] = self.site.rights.add_owner(owner, COMMAND_LINE)[0]
        return self._secrets[owner]

    def client(self, owner: str = "acme", **more: Any) -> openai.OpenAI:
        secret = more.pop("api_key", None) or self.secret(owner)
        return openai.OpenAI(base_url=f"http://{self.url}/v1", api_key=secret, max_retries=0, timeout=PATIENCE, **more)

    def ask(self, method: str, path: str, body: object = None, owner: str | None = "acme", **headers: str) -> tuple[int, Any]:
        """Returns the status and the JSON of an answer. `body`: bytes, or what is sent as JSON."""
        if owner is not None:
            headers.setdefault("authorization", f"Bearer {self.secret(owner)}")
        sent = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = http.client.HTTPConnection(self.url, timeout=PATIENCE)
        try:
            connection.request(method, path, sent, {name.replace("_", "-"): value for name, value in headers.items()})
            answer = connection.getresponse()
            said = answer.read()
            return answer.status, json.loads(said) if "json" in (answer.getheader("content-type") or "") else said
        finally:
            connection.close()


@contextmanager
def side_by_side() -> Iterator[None]:
    """Lets jobs compute beside other tests, and not when all of them wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(children.Manner, "nice", 0)
        yield


@contextmanager
def managing(
    folder: Path, bases: Sequence[Base] = (), grpc_url: str = NOWHERE, servers: Sequence[str] = (), **options: Any
) -> Iterator[Managed]:
    site = Site.open(folder, bases, **options)
    listening = listen("127.0.0.1", 0, "--port")
    gateway = Gateway(lambda: Backbones(grpc_url, [], PATIENCE), RequestLimits())
    server = server_of(application(site, gateway, Console(site, gateway, servers).routes()))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    with side_by_side():
        try:
            eventually(lambda: server.started or not thread.is_alive())
            assert thread.is_alive(), "the manager has not started"
            yield Managed(site, "{}:{}".format(*listening.getsockname()))
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
            site.close()


class Registry:
    """A registry that nobody changes, and that may be away."""

    def __init__(self) -> None:
        self.is_away = False

    def pointer(self) -> None:
        if self.is_away:
            raise Away("the registry does not answer")


def fake_base(store: Path, domains: Sequence[str] = ("root", "law")) -> Base:
    """A backbone `toy` without tenants. Commands are those of `fake_hplm.py`: `faked`. Tables that a store has stay."""
    for domain in domains:
        if (meta := store / "plot" / domain / "1" / "meta.json").exists():
            continue
        meta.parent.mkdir(parents=True)
        sizes = {"n": 3, "causal": False, "vocabulary": 9, "hidden": 4, "dtype": "fp16", "corpus_tokens": 9, "keys": 8}
        parent = {"parent": None, "parent_version": None, "least_cosine": 1.0, "index": IndexMeta(8, 1, 2, {})}
        TableMeta(domain=domain, version=1, **sizes, **parent).save(meta)
    branches = [SimpleNamespace(id=(domain, 1), domain=domain) for domain in domains]
    served: Any = SimpleNamespace(current=lambda: SimpleNamespace(branches=branches, tenants=()), registry=Registry())
    return Base("toy", store, store / "repository", store / "state", served)


@contextmanager
def faked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(children, "HPLM", (sys.executable, "-S", str(Path(__file__).with_name("fake_hplm.py"))))
        yield


def commands(base: Base, tenant: str) -> list[str]:
    """Returns the commands that were given for a tenant, without their options."""
    path = base.store / "commands"
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return [" ".join(words[:2]) for words in lines if tenant in words]
