"""A real tritonserver with tiny models: its answers, its refusals, and that no process remains."""

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from hplm.errors import HplmError
from hplm.server import TritonServer, process_group
from hplm.server.ports import Ports
from tests.server.plain_models import ECHO, REFUSES, SLOW, add_backend, add_config, add_model
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow

LIBRARIES = {"http": tritonclient.http, "grpc": tritonclient.grpc}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("echo")
    add_backend(folder / "backends", "toy_backend", ECHO)
    add_config(folder / "repository", "echo", backend="toy_backend")
    with TritonServer(folder / "repository", backends=folder / "backends", state=folder / "state") as server:
        yield server


@pytest.fixture
def no_backends(tmp_path) -> Path:
    (tmp_path / "backends").mkdir()
    return tmp_path / "backends"


@pytest.fixture(params=LIBRARIES)
def protocol(request) -> str:
    return request.param


def connect(server: TritonServer, protocol: str):
    return LIBRARIES[protocol].InferenceServerClient(getattr(server, f"{protocol}_url"))


def ask(client, protocol: str, model: str = "echo", **options) -> str:
    text = LIBRARIES[protocol].InferInput("TEXT", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"hello"], dtype=object))
    return client.infer(model, [text], **options).as_numpy("SAID")[0].decode()


def leftovers(server: TritonServer, group: int) -> list[str]:
    regions = [path.name for path in process_group.SHARED_MEMORY.glob(f"{server.id}*")]
    folders = [path.name for path in Path(tempfile.gettempdir()).glob(f"{server.id}*")]
    return [*(f"process {pid}" for pid in process_group.members(group)), *regions, *folders]


def test_a_backend_of_ours_answers_with_parameters_and_state(served, protocol):
    said = json.loads(ask(connect(served, protocol), protocol, parameters={"tenant": "acme"}))
    assert said["parameters"] == {"tenant": "acme"}
    assert said["state"].endswith("/state")


@pytest.mark.parametrize("name", ["authorization", "Authorization", "AUTHORIZATION", "Hplm-Tenant", "hplm-arrived"])
def test_key_and_tenant_reach_the_model_in_any_case_of_the_header(served, name):
    headers = {name: "Bearer K", f"x-{name}": "no", f"{name}-x": "no"}
    said = json.loads(ask(connect(served, "http"), "http", headers=headers))
    assert said["parameters"] == {name: "Bearer K"}


def test_key_and_tenant_reach_the_model_over_grpc(served):
    headers = {"authorization": "Bearer K", "hplm-arrived": "1", "hplm-tenant": "acme", "x-authorization": "no"}
    said = json.loads(ask(connect(served, "grpc"), "grpc", headers=headers))
    assert said["parameters"] == {"authorization": "Bearer K", "hplm-arrived": "1", "hplm-tenant": "acme"}


RESTRICTED = {
    "shared memory": lambda client, headers: client.get_system_shared_memory_status(headers=headers),
    "models": lambda client, headers: client.get_model_repository_index(headers=headers),
    "log": lambda client, headers: client.get_log_settings(headers=headers),
    "trace": lambda client, headers: client.get_trace_settings(headers=headers),
}


@pytest.mark.parametrize("api", RESTRICTED)
def test_calls_that_could_run_code_or_read_memory_need_the_secret(served, protocol, api):
    client, call = connect(served, protocol), RESTRICTED[api]
    name, secret = served.admin_header
    prefix = "triton-grpc-protocol-" if protocol == "grpc" else ""
    for headers in ({}, {prefix + name: "guess"}):
        with pytest.raises(InferenceServerException, match="restricted"):
            call(client, headers)
    call(client, {prefix + name: secret})


def test_calls_that_clients_need_are_open(served, protocol):
    client = connect(served, protocol)
    assert client.is_server_ready() and client.is_model_ready("echo")
    assert client.get_model_metadata("echo") and client.get_model_config("echo") and client.get_inference_statistics()


def test_metrics_are_served(served):
    connection = http.client.HTTPConnection(served.metrics_url, timeout=10)
    connection.request("GET", "/metrics")
    assert b"nv_inference_request_success" in connection.getresponse().read()
    connection.close()


def test_it_listens_on_loopback_only(served):
    wanted = {f"{int(url.rpartition(':')[2]):04X}" for url in (served.http_url, served.grpc_url, served.metrics_url)}
    rows = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    listening = {tuple(row[1].split(":")) for row in rows if row[3] == "0A"}
    # 127.0.0.1 as the kernel prints it, and the same address in IPv6
    assert {address[-8:] for address, port in listening if port in wanted} == {"0100007F"}


def test_two_servers_run_side_by_side_and_a_stop_leaves_no_process(served, tmp_path, no_backends):
    """A client keeps an idle connection, and a stub was killed: each of these makes Triton wait for its exit timeout."""
    add_model(tmp_path / "repository", "echo", ECHO)
    log_file = tmp_path / "logs" / "triton.log"
    server = TritonServer(tmp_path / "repository", backends=no_backends, log_file=log_file).start()
    group = server.pid
    client = connect(server, "http")
    assert json.loads(ask(client, "http"))["state"] is None
    assert {server.http_url, server.grpc_url, server.metrics_url}.isdisjoint({served.http_url, served.grpc_url})
    (stub,) = set(process_group.members(group)) - {group}
    os.kill(stub, signal.SIGKILL)
    server.stop()
    assert leftovers(server, group) == []
    assert "Started HTTPService" in log_file.read_text()
    assert ask(connect(served, "http"), "http")  # the other server still answers
    client.close()


def test_requests_in_flight_are_answered_before_the_end(tmp_path, no_backends):
    repository = tmp_path / "repository"
    add_model(repository, "slow", SLOW)
    add_model(repository, "slower", SLOW)
    add_config(repository, "both", backend="")
    config = (repository / "both" / "config.pbtxt").read_text().replace('backend: ""', 'platform: "ensemble"')
    step = 'model_name: "{}", model_version: -1, input_map {{ key: "TEXT", value: "{}" }}, '
    step += 'output_map {{ key: "SAID", value: "{}" }}'
    steps = ", ".join(f"{{ {step.format(*names)} }}" for names in (("slow", "TEXT", "MIDDLE"), ("slower", "MIDDLE", "SAID")))
    (repository / "both" / "config.pbtxt").write_text(f"{config}\nensemble_scheduling {{ step [ {steps} ] }}\n")
    with ThreadPoolExecutor(2) as pool, TritonServer(repository, backends=no_backends) as server:
        answers = [pool.submit(ask, connect(server, protocol), protocol, "both") for protocol in LIBRARIES]
        while len(list((repository / "slow").glob("asked-*"))) < len(LIBRARIES):
            time.sleep(0.02)
        server.stop(drain=60)
        assert [answer.result() for answer in answers] == ["late", "late"]


def test_a_port_in_use_is_refused_before_anything_starts(served, tmp_path, no_backends):
    add_model(tmp_path / "repository", "echo", ECHO)
    port = int(served.grpc_url.rpartition(":")[2])
    server = TritonServer(tmp_path / "repository", backends=no_backends, grpc_port=port)
    with pytest.raises(HplmError, match=mentioning(port, "127.0.0.1", "--grpc-port")):
        server.start()
    assert server.pid is None


def test_if_another_process_takes_a_chosen_port_another_is_chosen(served, tmp_path, no_backends, monkeypatch):
    add_model(tmp_path / "repository", "echo", ECHO)
    lost = int(served.http_url.rpartition(":")[2])
    claims = []

    def claim(wanted, address, real=Ports.claim):
        ports = real(wanted, address)
        claims.append(ports)
        return Ports(lost, ports.grpc, ports.metrics) if len(claims) == 1 else ports

    monkeypatch.setattr(Ports, "claim", claim)
    with TritonServer(tmp_path / "repository", backends=no_backends) as server:
        assert len(claims) == 2
        assert server.http_url == f"127.0.0.1:{claims[1].http}"


# Ends its server as Triton ends itself when a model's process did not move for a second. The second time it starts.
ENDS_ONCE = """
import os, pathlib, signal, sys

once = pathlib.Path(__file__).with_name("once")
if not once.exists():
    once.touch()
    print("terminate called after throwing an instance of 'boost::interprocess::lock_exception'", file=sys.stderr, flush=True)
    os.kill(os.getppid(), signal.SIGABRT)
"""


def test_a_server_that_ends_because_a_starting_model_stood_still_is_started_again(tmp_path, no_backends):
    add_model(tmp_path / "repository", "echo", ENDS_ONCE + ECHO)
    with TritonServer(tmp_path / "repository", backends=no_backends) as server:
        assert (tmp_path / "repository/echo/1/once").exists() and "hello" not in ask(connect(server, "http"), "http")


def test_the_error_of_a_model_that_does_not_load_is_shown_and_no_process_remains(tmp_path, no_backends):
    add_model(tmp_path / "repository", "echo", ECHO)
    add_model(tmp_path / "repository", "bad", REFUSES)
    server = TritonServer(tmp_path / "repository", backends=no_backends)
    with pytest.raises(HplmError) as refused:
        server.start()
    assert mentions(refused.value, tmp_path / "repository")
    assert "failed to load 'bad' version 1: Internal: ValueError: table bio/1 is truncated" in str(refused.value)
    assert server.pid is None
    assert leftovers(server, group=-1) == []


def test_the_error_of_a_broken_configuration_is_shown(tmp_path, no_backends):
    add_model(tmp_path / "repository", "bad", ECHO)
    (tmp_path / "repository/bad/config.pbtxt").write_text('name: "bad" input [ {')
    with pytest.raises(HplmError, match=r"failed to read text proto from .*/repository/bad/config.pbtxt"):
        TritonServer(tmp_path / "repository", backends=no_backends).start()


def test_a_binary_that_cannot_be_run_is_named(tmp_path, no_backends):
    add_model(tmp_path / "repository", "echo", ECHO)
    binary = tmp_path / "tritonserver"
    binary.write_text("")
    server = TritonServer(tmp_path / "repository", backends=no_backends)
    server.installation = replace(server.installation, binary=binary)
    with pytest.raises(HplmError, match=mentioning(binary, "Permission denied")):
        server.start()
    assert leftovers(server, group=-1) == []


def test_a_model_that_loads_too_long_ends_the_start(tmp_path, no_backends):
    add_model(tmp_path / "repository", "stuck", REFUSES.replace("raise", "import time; time.sleep(600); raise"))
    server = TritonServer(tmp_path / "repository", backends=no_backends, start_timeout=2)
    with pytest.raises(HplmError, match=mentioning("tritonserver", "2 s")):
        server.start()
    assert leftovers(server, group=-1) == []


def test_nothing_outlives_a_parent_that_is_killed(tmp_path, no_backends):
    add_model(tmp_path / "repository", "echo", ECHO)
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(f"""
            import time
            from pathlib import Path
            from hplm.server import TritonServer
            server = TritonServer(Path({str(tmp_path / "repository")!r}), backends=Path({str(no_backends)!r})).start()
            print(server.pid, server.id, flush=True)
            time.sleep(600)
        """),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        group, identity = parent.stdout.readline().split()
        assert len(process_group.members(int(group))) == 2
        parent.kill()
    process_group.wait_until_gone(int(group), timeout=30)
    assert process_group.members(int(group)) == []
    deadline = time.monotonic() + 30
    while [*process_group.SHARED_MEMORY.glob(f"{identity}*"), *Path(tempfile.gettempdir()).glob(f"{identity}*")]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
