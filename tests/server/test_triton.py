"""A real tritonserver with tiny models: its answers, its refusals, and that no process remains."""

import json
import os
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tritonclient.utils import InferenceServerException

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.errors import HplmError
from hplm.server import TritonServer, process_group
from hplm.server.stubs import stubs
from tests.server.plain_models import ECHO, PORTS_TAKEN, REFUSES, SLOW, add_model
from tests.server.stock import LIBRARIES, Stock
from tests.support.message import mentioning, mentions
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow

HEADERS = ("authorization", "Authorization", "AUTHORIZATION", "Hplm-Tenant", "hplm-arrived")

# A program that ends four times as Triton ends itself when a model's process did not move for a second, and then becomes it.
STANDS_STILL = """#!/bin/sh
[ "$(cat "$0.times" 2>/dev/null)" = xxxx ] && exec {binary} "$@"
printf x >> "$0.times"
echo "terminate called after throwing an instance of 'boost::interprocess::lock_exception'" >&2
kill -ABRT $$
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of a model that answers, one that twice takes a port of the server, and a slow one."""
    folder = tmp_path_factory.mktemp("echo")
    for name, code in (("echo", ECHO), ("taker", PORTS_TAKEN + ECHO), ("slow", SLOW)):
        add_model(folder / "repository", name, code)
    server = TritonServer(folder / "repository", state=folder / "state", log_file=folder / "logs/triton.log")
    runs(server, folder / "stands-still", STANDS_STILL.format(binary=server.installation.binary))
    yield server
    server.stop(drain=0)


def runs(server: TritonServer, binary: Path, code: str, mode: int = 0o755) -> TritonServer:
    """Lets the server run a program instead of tritonserver."""
    binary.write_text(code)
    binary.chmod(mode)
    server.installation = replace(server.installation, binary=binary)
    return server


@pytest.fixture
def served(server):
    return server if server.pid else server.start()  # the last test stops it


@pytest.fixture(params=LIBRARIES)
def protocol(request) -> str:
    return request.param


def ask(stock: Stock, model: str = "echo", **options) -> str:
    text = stock.tensor("TEXT", "hello", dims=1)
    return stock.client.infer(model, [text], **options).as_numpy("SAID")[0].decode()


def leftovers(server: TritonServer, group: int = -1) -> list[str]:
    regions = [path.name for path in process_group.SHARED_MEMORY.glob(f"{server.id}*")]
    folders = [path.name for path in Path(tempfile.gettempdir()).glob(f"{server.id}*")]
    return [*(f"process {pid}" for pid in process_group.members(group)), *regions, *folders]


def test_it_was_started_again_because_it_stood_still_and_because_another_server_took_its_ports(served):
    assert Path(f"{served.installation.binary}.times").read_text() == "xxxx"
    assert len(list(served.repository.glob("taker/1/taken*"))) == 2 and ask(Stock(served, "http"), "taker")


def test_key_and_tenant_reach_the_model_in_any_case_of_the_header(served):
    for name in HEADERS:
        headers = {name: "Bearer K", f"x-{name}": "no", f"{name}-x": "no"}
        said = json.loads(ask(Stock(served, "http"), headers=headers, parameters={"tenant": "acme"}))
        assert said["parameters"] == {name: "Bearer K", "tenant": "acme"} and said["state"].endswith("/state")
    headers = {"authorization": "Bearer K", "hplm-arrived": "1", "hplm-tenant": "acme", "x-authorization": "no"}
    said = json.loads(ask(Stock(served, "grpc"), headers=headers))
    assert said["parameters"] == {"authorization": "Bearer K", "hplm-arrived": "1", "hplm-tenant": "acme"}


APIS = ("get_system_shared_memory_status", "get_model_repository_index", "get_log_settings", "get_trace_settings")


@pytest.mark.parametrize("api", APIS)
def test_calls_that_could_run_code_or_read_memory_need_the_secret(served, protocol, api):
    call, (name, secret) = getattr(Stock(served, protocol).client, api), served.admin_header
    prefix = "triton-grpc-protocol-" if protocol == "grpc" else ""
    for headers in ({}, {prefix + name: "guess"}):
        with pytest.raises(InferenceServerException, match="restricted"):
            call(headers=headers)
    call(headers={prefix + name: secret})


def test_it_listens_on_loopback_only(served):
    wanted = {f"{int(url.rpartition(':')[2]):04X}" for url in (served.http_url, served.grpc_url, served.metrics_url)}
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    listening = {tuple(row[1].split(":")) for row in rows if row[3] == "0A"}
    # 127.0.0.1 as the kernel prints it, and the same address in IPv6
    assert {address[-8:] for address, port in listening if port in wanted} == {"0100007F"}


def test_a_stop_answers_requests_in_flight_and_leaves_no_process(served):
    """A client keeps an idle connection, and a stub was killed: each of these makes Triton wait for its exit timeout.

    Takes long: Triton's slow end.
    """
    group, idle, repository = served.pid, Stock(served, "http"), served.repository
    with ThreadPoolExecutor(3) as pool:
        try:
            assert ask(idle)
            os.kill(next(stub.pid for stub in stubs(group) if stub.model == "echo"), signal.SIGKILL)
            answers = [pool.submit(ask, Stock(served, protocol), "slow") for protocol in LIBRARIES]
            eventually(lambda: len(list((repository / "slow").glob("asked-*"))) == len(LIBRARIES))
            control = served.control()
            stopping = pool.submit(served.stop, drain=PATIENCE)
            eventually(lambda: "slow" not in control.loaded())
            (repository / "answer").touch()
            assert [answer.result(PATIENCE) for answer in answers] == ["late", "late"]
            stopping.result(PATIENCE)
        finally:
            (repository / "answer").touch()
            served.stop(drain=0)
    assert leftovers(served, group) == []
    assert "Started HTTPService" in served.log_file.read_text()
    idle.client.close()


def test_errors_of_models_that_do_not_load_are_shown_and_no_process_remains(toy, tmp_path):
    repository = tmp_path / "repository"
    export(toy.store, repository, ServingOptions(dtype="fp32"))
    upper = repository / "toy-upper/config.pbtxt"
    upper.write_text(upper.read_text().replace('"timely"', '"slowest"'))
    add_model(repository, "bad", REFUSES)
    add_model(repository, "broken", ECHO)
    (repository / "broken/config.pbtxt").write_text('name: "broken" input [ {')
    server = TritonServer(repository)
    with pytest.raises(HplmError) as refused:
        server.start()
    assert mentions(refused.value, repository, repository / "broken/config.pbtxt")
    assert mentions(refused.value, "toy-upper", "slowest")
    assert "failed to load 'bad' version 1: Internal: ValueError: table bio/1 is truncated" in str(refused.value)
    assert server.pid is None and leftovers(server) == []


@pytest.mark.parametrize(
    ("code", "mode", "named"), [("", 0o644, ["Permission denied"]), ("#!/bin/sh\nexec sleep 600\n", 0o755, ["1 s"])]
)
def test_a_binary_that_does_not_run_or_does_not_become_ready_ends_the_start(server, tmp_path, code, mode, named):
    server = runs(TritonServer(server.repository, start_timeout=1), tmp_path / "tritonserver", code, mode)
    with pytest.raises(HplmError, match=mentioning("tritonserver", *named)):
        server.start()
    assert leftovers(server) == []
