"""Locust as a user starts it, against a real Triton with the toy's tenants."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from csv import DictReader
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantFile
from hplm.server import TritonServer
from hplm.server.ports import free_ports
from testing.random_store import random_store
from testing.toy import CHAT, Toy
from tests.deploy.door import haproxy, require_haproxy
from tests.loadtest.small_server import SmallServer
from tests.support.message import mentions
from tests.support.servers import serving

pytestmark = pytest.mark.slow

LOCUSTFILE = Path(__file__).parents[2] / "loadtest" / "locustfile.py"


@pytest.fixture(scope="module")
def served(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("locust") / "repository"
    export(toy.store, repository, ServingOptions(dtype="fp32", threads=1))
    with serving(repository) as server:
        yield server


def command(server: TritonServer, *options: str) -> list[str]:
    return [
        sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "-H", f"http://{server.http_url}", "--grpc", server.grpc_url,
        "--repository", str(server.repository), *options,
    ]  # fmt: skip


def headless(server: TritonServer, folder: Path, *options: str) -> tuple[dict, subprocess.CompletedProcess]:
    done = subprocess.run(
        command(server, "--headless", "--only-summary", "--outcomes", "outcomes.json", *options),
        cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    path = folder / "outcomes.json"
    return json.loads(path.read_text()) if path.exists() else {}, done


def test_several_scenarios_run_together_and_write_their_reports(served, tmp_path) -> None:
    options = ("-u", "24", "-r", "24", "--rate", "30", "--duration", "3", "--csv", "run", "--html", "run.html")
    outcomes, done = headless(served, tmp_path, *options, "Poisson", "Gamma", "--zipf", "1", "--lengths", "normal:20,20,3,60")
    assert done.returncode == 0, done.stderr
    assert set(outcomes) == {"Poisson", "Gamma"}
    assert outcomes["Poisson"]["on_time"] == outcomes["Poisson"]["requests"] > 50
    assert "on time" in done.stderr and "Poisson" in (tmp_path / "run.html").read_text()
    with open(tmp_path / "run_stats.csv") as file:
        rows = {row["Name"]: row for row in DictReader(file)}
    assert int(rows["Poisson"]["Request Count"]) == outcomes["Poisson"]["requests"]


def test_a_trace_over_grpc_with_deadlines_that_cannot_be_kept(served, tmp_path) -> None:
    rows = [
        {"arrival": i / 50, "tokens": 12, "tenant": ["acme", "beta"][i % 2], "deadline_ms": 0.05 if i % 3 else 100_000}
        for i in range(60)
    ]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("-u", "10", "-r", "10", "--protocol", "grpc", "--trace", "trace.jsonl", "--csv", "run", "Replay")
    outcomes, done = headless(served, tmp_path, *options)
    replay = outcomes["Replay"]
    assert (replay["requests"], replay["on_time"]) == (60, 20), done.stderr
    assert replay["late"] + sum(replay["not_on_time"].values()) == 40
    assert done.returncode == 1  # Locust's exit code if some requests failed
    with open(tmp_path / "run_failures.csv") as file:
        failures = [row["Error"] for row in DictReader(file)]
    assert failures and all("[" in error for error in failures)  # one line for each word in brackets


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_requests_go_through_the_front_door(served, tmp_path, protocol) -> None:
    require_haproxy()
    options = (
        "-u",
        "10",
        "-r",
        "10",
        "--rate",
        "30",
        "--duration",
        "2",
        "--protocol",
        protocol,
        "--metrics",
        served.metrics_url,
    )
    with haproxy(tmp_path / "door", served.http_url, served.grpc_url, "toy") as door:
        at_door = ("-H", f"https://localhost:{door.port}", "--grpc", "", *options)  # after those of `command`, so these count
        outcomes, done = headless(served, tmp_path, *at_door, "--ca-file", str(door.certificate), "Poisson")
        assert done.returncode == 0, done.stderr
        assert outcomes["Poisson"]["on_time"] == outcomes["Poisson"]["requests"] > 20
        _, failed = headless(served, tmp_path, *at_door, "Poisson")
    assert failed.returncode != 0 and "NotTrusted" in failed.stderr + failed.stdout


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("chat")
    tenants = [TenantFile(name, 1, "root", 1, "generate", [], 0) for name in ("plain", "other")]
    store = random_store(folder / "store", CHAT, tenants, corpus_tokens=500, spread=0.3)
    export(store, folder / "repository", ServingOptions(dtype="fp32", threads=1, seats=8, cache_tokens=2048))
    with serving(folder / "repository") as server:
        yield server


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_answers_of_a_decoder_are_streamed_and_the_times_of_tokens_listed(decoder, tmp_path, protocol) -> None:
    options = ("-u", "8", "-r", "8", "--rate", "8", "--duration", "3", "--max-tokens", "12", "--protocol", protocol)
    options += ("--metrics", decoder.metrics_url)
    outcomes, done = headless(decoder, tmp_path, *options, "--csv", "run", "Chat")
    assert done.returncode == 0, done.stderr
    requests = outcomes["Chat"]["requests"]
    assert outcomes["Chat"]["on_time"] == requests > 8
    with open(tmp_path / "run_stats.csv") as file:
        rows = {row["Type"]: row for row in DictReader(file)}
    assert int(rows[protocol.upper()]["Request Count"]) == int(rows["FIRST TOKEN"]["Request Count"]) == requests
    assert requests < int(rows["TOKEN"]["Request Count"]) <= 11 * requests
    assert float(rows["FIRST TOKEN"]["Average Response Time"]) <= float(rows[protocol.upper()]["Average Response Time"])
    assert f"by the server's: {requests} " in done.stderr


def test_a_scenario_for_another_kind_of_backbone_is_reported_at_once(served, decoder, tmp_path) -> None:
    for server, scenario, tenant in ((served, "Chat", "'acme'"), (decoder, "Poisson", "'other'")):
        outcomes, done = headless(server, tmp_path, scenario)
        assert done.returncode != 0 and mentions(done.stderr, scenario, tenant, "--backbone") and not outcomes


def test_a_trace_keeps_its_priorities_and_a_rung_is_fixed(tmp_path) -> None:
    rows = [{"arrival": 0, "text": "a b c"}, {"arrival": 0, "text": "a b c", "priority": 3}]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with SmallServer() as server:
        stand_in = SimpleNamespace(http_url=f"127.0.0.1:{server.port}", grpc_url="127.0.0.1:1", repository="")
        options = ("--tenant-ids", "acme", "--backbone", "minilm", "--trace", "trace.jsonl", "--rung", "2", "Replay")
        outcomes, done = headless(stand_in, tmp_path, *options)
        assert outcomes["Replay"]["requests"] == 2, done.stderr
        heads = [json.JSONDecoder().raw_decode(body.decode("latin-1"))[0] for body in server.bodies]
    assert sorted(head["parameters"]["hplm_priority"] for head in heads) == [0, 3]
    assert [head["parameters"]["hplm_rung"] for head in heads] == [2, 2]


def test_refusals_are_counted_by_their_word(served, tmp_path) -> None:
    options = ("-u", "4", "--tenant-ids", "nobody", "--repository", "", "--duration", "1")
    outcomes, _ = headless(served, tmp_path, *options, "Poisson")
    assert set(outcomes["Poisson"]["not_on_time"]) == {"no_tenant"} and outcomes["Poisson"]["on_time_share"] == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--repository", "/nowhere", "Poisson"), ["--repository", "/nowhere", "--backbone"]),
        (("--repository", "", "Poisson"), ["--repository", "--tenant-ids"]),
        (("--tenant-ids", "nobody", "Poisson"), ["--tenant-ids", "'nobody'"]),
        (("--deadline", "soon", "Poisson"), ["--deadline", "'soon'"]),
        (("Replay",), ["Replay", "--trace"]),
        # With --processes, which is a master too, Locust may lose its workers and leave them running.
        (("--master", "--master-bind-port", str(free_ports(1)[0]), "Poisson"), ["--master", "--worker", "--processes"]),
    ],
)
def test_wrong_options_are_reported_at_once(served, tmp_path, options, named) -> None:
    outcomes, done = headless(served, tmp_path, *options)
    assert done.returncode != 0 and mentions(done.stderr + done.stdout, *named) and not outcomes


def test_a_run_starts_from_the_web_page(served, tmp_path) -> None:
    (port,) = free_ports(1)
    with subprocess.Popen(
        command(served, "--web-host", "127.0.0.1", "--web-port", str(port), "Poisson"),
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as locust:  # fmt: skip
        try:
            page = f"http://127.0.0.1:{port}"
            _wait_for(lambda: "--zipf" in _get(page) or "zipf" in _get(page))
            form = urlencode({"user_count": 8, "spawn_rate": 8, "host": f"http://{served.http_url}", "rate": 20, "duration": 2})
            assert json.loads(_get(f"{page}/swarm", form.encode()))["success"]
            _wait_for(lambda: json.loads(_get(f"{page}/outcomes")).get("Poisson", {}).get("requests", 0) > 20)
            _wait_for(lambda: json.loads(_get(f"{page}/stats/requests"))["state"] == "stopped")
            assert json.loads(_get(f"{page}/outcomes"))["Poisson"]["on_time_share"] == 1.0
        finally:
            os.kill(locust.pid, signal.SIGTERM)


def _get(url: str, body: bytes | None = None) -> str:
    with urlopen(url, body, timeout=10) as answer:
        return answer.read().decode()


def _wait_for(holds, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            if holds():
                return
        except OSError:
            pass  # the web page is not yet up
        assert time.monotonic() < end
        time.sleep(0.2)
