"""Servers for tests: one of each configuration in each worker, servers of a test's own, and gateways before them.

A test asks a shared server by `@pytest.mark.server(NAME)`, with a name of CONFIGS, and the fixture `server`, a Lease. All such
tests run in one process, which has one of these servers at a time. A test that stops it says `stops=True`, and comes last.
"""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from builder.store.store import TenantVersion
from hplm.errors import HplmError
from hplm.server import TritonServer, process_group
from hplm.server.held import holders
from hplm.server.inherited import environment
from hplm.server.stubs import stubs
from hplm.tenants.manager import Manager
from hplm.tenants.registry_writer import registries_of
from hplm.tenants.snapshot import Snapshot
from hplm.tenants.state_folder import EXPORTED_TENANTS
from testing.random_store import random_knowledge
from testing.reference import Reference
from tests.server.stock import Stock, post
from tests.support.configurations import CONFIGS
from tests.support.configurations import SECRET as SECRET
from tests.support.wait import PATIENCE, eventually

START_SECONDS = 150.0  # of each of two tries


@dataclass(frozen=True)
class LiveTenant:
    id: str
    secret: str = ""  # of its key, if it has one

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.secret}"}


class Lease:
    """A running server, and what its tests need: clients, references, tenants of their own."""

    def __init__(self, name: str) -> None:
        self.name = name
        with ExitStack() as stack:
            self.folder = Path(tempfile.mkdtemp(prefix=f"hplm-test-{name}-"))
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self.state = self.folder / "state"
            self.built = CONFIGS[name](self.folder)
            self.repository = self.built.repository
            for registry in registries_of(self.repository, self.state).values():
                registry.begin()
            log = self.folder / "triton.log"
            given = {"state": self.state, "extra_args": self.built.options, "log_file": log}
            self.server = TritonServer(self.repository, start_timeout=START_SECONDS, **given)
            stack.enter_context(self.server)
            stack.callback(lambda: self.server.pid and process_group.kill(self.server.pid))
            self._open = stack.pop_all()
        own = self.server  # it keeps its addresses if it is started again
        self.http_url, self.grpc_url, self.metrics_url = own.http_url, own.grpc_url, own.metrics_url
        self._tenants: list[tuple[str, str]] = []
        self._made = 0
        self._gateway = ""

    def close(self) -> None:
        self._open.close()

    @property
    def gateway(self) -> str:
        """HOST:PORT of the gateway with OpenAI's interface."""
        self._gateway = self._gateway or self._open.enter_context(gateway_before(self.grpc_url))
        return self._gateway

    @property
    def held(self) -> int:
        """How many requests the server's models hold."""
        return sum(holder.held for holder in holders(self.server.id))

    def stock(self, protocol: str = "http") -> Stock:
        return Stock(self, protocol)

    def model_folder(self, backbone: str = "toy") -> Path:
        return self.repository / backbone / "1"

    def reference(self, backbone: str = "toy", eight_bits: bool = False) -> Reference:
        """Returns a reference that knows the tenants of now."""
        return _reference(self.model_folder(backbone), self.state, self.manager(backbone).state.current(), eight_bits)

    def manager(self, backbone: str = "toy") -> Manager:
        return Manager.open(self.repository, self.state, backbone)

    def tenant(self, backbone: str = "toy", keyed: bool = False, domain: str = "root", **limits: float) -> LiveTenant:
        """Adds a small classifier while the server runs. It is deleted after the test."""
        config, manager = self.built.stores[backbone].config, self.manager(backbone)
        file = TenantVersion(self.named("new", backbone), 1, domain, 1, "classify", ["x", "y"], 4)
        manager.add(file.id, random_knowledge(config, file, 0.3, seed=self._made))
        secret = manager.add_key(file.id)[0] if keyed else ""
        if limits:
            manager.limit(file.id, **limits)
        assert manager.settle() == [], "a model does not read the state"
        return LiveTenant(file.id, secret)

    def named(self, name: str, backbone: str = "toy") -> str:
        """Returns an id of a tenant that the test may add. If it does, the tenant is deleted after the test."""
        self._made += 1
        self._tenants.append((backbone, f"{name}-{self._made}"))
        return f"{name}-{self._made}"

    def ill(self) -> str:
        """Returns why the server cannot serve the next test; nothing if it can. Deletes the tenants of the test before."""
        if (code := self.server.wait(0)) is not None:
            return f"has ended with exit code {code}, and its log says:\n{self.server.last_words()}"
        try:
            for backbone, tenant in self._tenants:
                manager = self.manager(backbone)
                if any(known.id == tenant for known in manager.current().tenants):
                    manager.delete(tenant)
            self._tenants.clear()
            eventually(lambda: not self.held, PATIENCE)
            for backbone in self.built.stores:
                self._ask(backbone)
        except AssertionError as error:
            by_model = {one.model: one.held for one in holders(self.server.id) if one.held}
            return f"holds requests which nobody waits for: {by_model} ({error})"
        except (HplmError, InferenceServerException, OSError, http.client.HTTPException) as error:
            return f"does not answer a good request: {type(error).__name__}: {error}"
        return ""

    def _ask(self, backbone: str) -> None:
        known = Snapshot.load(self.model_folder(backbone) / EXPORTED_TENANTS).tenants
        tenant = next(one for one in known if one.task in ("classify", "generate") and not one.keys)
        if tenant.task == "classify":
            self.stock().ask(["a"], tenant.id, outputs=("LABEL",), model=backbone)
        else:
            status, said = post(self, "generate", backbone, text_input="a", tenant=tenant.id, max_tokens=1)
            if status != 200:
                raise HplmError(str(said))


@cache
def _reference(folder: Path, state: Path, generation: int, eight_bits: bool) -> Reference:
    return Reference.open(folder, state, eight_bits)


class Servers:
    """Has one server at a time: another one is started when the one before has been killed."""

    def __init__(self) -> None:
        self._lease: Lease | None = None
        self._failed: dict[str, str] = {}

    def get(self, name: str) -> Lease:
        if self._lease is None or self._lease.name != name:
            self.close()
            if name not in self._failed:
                try:
                    self._lease = self._started(name)
                except (HplmError, OSError, LookupError, AssertionError) as error:
                    self._failed[name] = f"{type(error).__name__}: {error}"
            if name in self._failed:
                pytest.fail(f"the server {name!r} does not start: {self._failed[name]}", pytrace=False)
        assert self._lease is not None
        return self._lease

    @staticmethod
    def _started(name: str) -> Lease:
        """Starts a server. On a busy machine some starts of Triton hang when all models have said that they serve."""
        try:
            return Lease(name)
        except HplmError as error:
            if "was not ready within" not in str(error):
                raise
            warnings.warn(f"the server {name!r} is started a second time: {error}", stacklevel=2)
            return Lease(name)

    def check(self, name: str, test: str) -> None:
        """Fails if a test has left its server unable to serve others, which then get a new one."""
        if self._lease is None or self._lease.name != name:
            return
        if self._lease.server.pid is None:  # a test has stopped it
            self.close()
        elif ill := self._lease.ill():
            self.close()
            pytest.fail(f"after {test} the server {name!r} {ill}", pytrace=False)

    def close(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.close()


@pytest.fixture
def server(request: pytest.FixtureRequest, servers: Servers) -> Lease:
    """The server that the test's mark names."""
    mark = request.node.get_closest_marker("server")
    assert mark, "name the server: @pytest.mark.server(NAME)"
    if "PYTEST_XDIST_WORKER" in os.environ:
        assert request.node.nodeid.endswith(f"@{mark.args[0]}"), "add --dist loadgroup: one process for a server"
    return servers.get(mark.args[0])


@pytest.fixture(autouse=True)
def _server_is_well(request: pytest.FixtureRequest) -> Iterator[None]:
    mark = request.node.get_closest_marker("server")
    servers = request.getfixturevalue("servers") if mark else None
    yield
    if mark and servers:
        servers.check(mark.args[0], request.node.name)


@contextmanager
def serving(*repository: object, **options: object) -> Iterator[TritonServer]:
    """A server of the test's own. Kills it when the test has passed, because Triton takes three seconds to end."""
    with TritonServer(*repository, **options) as server:
        yield server
        process_group.kill(server.pid)


@contextmanager
def server_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Gives this process the environment of a model process of a server that is not there. Yields the server's id."""
    name = f"hplm-test-{uuid.uuid4().hex[:12]}"
    for variable, value in environment(name, 0).items():
        monkeypatch.setenv(variable, value)
    yield name
    for path in process_group.SHARED_MEMORY.glob(f"{name}*"):
        path.unlink()


@contextmanager
def gateway_before(grpc_url: str) -> Iterator[str]:
    """Starts the gateway with OpenAI's interface as an operator starts it alone. Yields its HOST:PORT."""
    command = [sys.executable, "-m", "hplm_openai", "--url", grpc_url, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://(\S+)/v1", process.stdout.readline())
            assert found, "the gateway has not said its address"
            yield found[1]
        finally:
            process.terminate()


def kill_model(server: TritonServer, model: str) -> None:
    """Kills the process of a model, which has one instance."""
    (stub,) = [stub for stub in stubs(server.pid) if stub.model == model]
    os.kill(stub.pid, signal.SIGKILL)


def engine_of(server: TritonServer, model: str = "toy-upper") -> int | None:
    """Returns the process id of a model's engine, which the model's process has started; None if there is none."""
    parents = {str(stub.pid) for stub in stubs(server.pid or 0) if stub.model == model}
    members = process_group.members(server.pid) if server.pid is not None else []
    return next((pid for pid in members if process_group.facts(pid)[1] in parents), None)
