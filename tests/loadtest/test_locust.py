"""Locust as a user starts it, against a real Triton with the toy's tenants. Each run of it takes several seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from csv import DictReader
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from hplm.server.ports import free_ports
from tests.deploy.door import haproxy, require_haproxy
from tests.support.fakes import SmallServer, answer
from tests.support.message import mentions
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow
on_toy, on_chat = pytest.mark.server("toy"), pytest.mark.server("chat")

LOCUSTFILE = Path(__file__).parents[2] / "loadtest" / "locustfile.py"
TOYS = ("--backbone", "toy", "--tenant-ids", "acme,beta")


def command(server, *options: str) -> list[str]:
    return [
        sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "-H", f"http://{server.http_url}", "--grpc", server.grpc_url,
        "--repository", str(server.repository), *options,
    ]  # fmt: skip


def headless(server, folder: Path, *options: str) -> tuple[dict, subprocess.CompletedProcess]:
    done = subprocess.run(
        command(server, "--headless", "--only-summary", "--outcomes", "outcomes.json", *options),
        cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    path = folder / "outcomes.json"
    return json.loads(path.read_text()) if path.exists() else {}, done


def rows_of(path: Path, name: str) -> dict[str, dict[str, str]]:
    with open(path) as file:
        return {row[name]: row for row in DictReader(file)}


@on_toy
def test_several_scenarios_run_together_through_the_front_door_and_write_their_reports(server, tmp_path) -> None:
    """Without a repository or tenants, the load goes to all tenants of model_repository. Most deadlines of the trace pass."""
    require_haproxy()
    (tmp_path / "model_repository").symlink_to(server.repository)
    rows = [{"arrival": i / 50, "tokens": 12, "tenant": "acme", "deadline_ms": 0.05 if i % 3 else 100_000} for i in range(60)]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("-u", "34", "-r", "34", "--rate", "30", "--duration", "3", "--csv", "run", "--html", "run.html")
    options += ("--repository", "", "--backbone", "toy", "--zipf", "1", "--lengths", "normal:20,20,3,60")
    options += ("--protocol", "grpc", "--trace", "trace.jsonl", "--metrics", server.metrics_url, "--grpc", "")
    with haproxy(tmp_path / "door", server.http_url, server.grpc_url, "toy") as door:
        at_door = ("-H", f"https://localhost:{door.port}", "--ca-file", str(door.certificate))  # the last -H counts
        outcomes, done = headless(server, tmp_path, *options, *at_door, "--scenario", "Poisson", "Gamma", "Replay")
    assert done.returncode == 1, done.stderr  # Locust's exit code if some requests failed
    assert set(outcomes) == {"Poisson", "Gamma", "Replay"}
    (requests, replay) = outcomes["Poisson"]["requests"], outcomes["Replay"]
    assert outcomes["Poisson"]["on_time"] == requests > 50 and (replay["requests"], replay["on_time"]) == (60, 20)
    assert replay["late"] + sum(replay["not_on_time"].values()) == 40
    assert "on time" in done.stderr and f"<td>{requests}</td><td>100.0%</td>" in (tmp_path / "run.html").read_text()
    assert int(rows_of(tmp_path / "run_stats.csv", "Name")["Poisson"]["Request Count"]) == requests
    assert all("[" in error for error in rows_of(tmp_path / "run_failures.csv", "Error"))  # a line for each word in brackets


@on_chat
def test_answers_of_a_decoder_are_streamed_and_the_times_of_tokens_listed(server, tmp_path) -> None:
    """Takes the time of a run of Locust."""
    options = ("-u", "8", "-r", "8", "--rate", "8", "--duration", "2", "--max-tokens", "12", "--protocol", "grpc")
    options += ("--backbone", "chat", "--tenant-ids", "plain,lora", "--metrics", server.metrics_url)
    outcomes, done = headless(server, tmp_path, *options, "--csv", "run", "Chat")
    requests, rows = outcomes["Chat"]["requests"], rows_of(tmp_path / "run_stats.csv", "Type")
    assert outcomes["Chat"]["on_time"] == requests > 4 and not done.returncode, done.stderr
    whole, first, token = (int(rows[kind]["Request Count"]) for kind in ("GRPC", "FIRST TOKEN", "TOKEN"))
    assert whole == first == requests < token <= 11 * requests and f"by the server's: {requests} " in done.stderr


def test_a_trace_keeps_its_priorities_a_rung_is_fixed_and_outcomes_are_written_without_metrics(tmp_path) -> None:
    """The metrics answer at the beginning, and are gone at the end."""
    rows = [{"arrival": 0, "text": "a b c"}, {"arrival": 0, "text": "a b c", "priority": 3}]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    closing = answer(headers="Connection: close\r\n")
    with SmallServer() as server, SmallServer(lambda *_: (metrics.listener.close(), closing)[1]) as metrics:
        fake = SimpleNamespace(http_url=server.url, grpc_url="127.0.0.1:1", repository="")
        options = ("--tenant-ids", "acme", "--backbone", "minilm", "--trace", "trace.jsonl", "--rung", "2")
        outcomes, done = headless(fake, tmp_path, *options, "--metrics", metrics.url, "Replay")
        assert outcomes["Replay"]["requests"] == 2, done.stderr
        heads = [json.JSONDecoder().raw_decode(body.decode("latin-1"))[0] for body in server.bodies]
    assert sorted(head["parameters"]["hplm_priority"] for head in heads) == [0, 3]
    assert [head["parameters"]["hplm_rung"] for head in heads] == [2, 2]


@on_toy
def test_a_master_without_processes_is_refused_at_once(server, tmp_path) -> None:
    """With --processes, which is a master too, Locust may lose its workers and leave them running."""
    outcomes, done = headless(server, tmp_path, "--master", "--master-bind-port", str(free_ports(1)[0]), "Poisson")
    assert done.returncode != 0 and mentions(done.stderr + done.stdout, "--master", "--worker", "--processes") and not outcomes


WRONG = {  # what somebody has typed into the web page, and what the refusal names
    ("deadline", "luck"): ["--deadline", "'luck'"],
    ("deadline", "5-1"): ["--deadline", "'5-1'"],
    ("tenant_ids", "nobody"): ["--tenant-ids", "'nobody'"],
    ("rate", "nan"): ["--rate", "nan"],
    ("zipf", "nan"): ["--zipf", "nan"],
    ("seed", "-1"): ["--seed", "-1"],
    ("scenario", "Chat"): ["Chat", "--backbone"],
    ("host", "http://127.0.0.1:99999"): ["--host", "99999"],
    ("host", "http://[::1]:1"): ["::1", "start the server"],
}


@on_toy
def test_a_run_starts_from_the_web_page(server, tmp_path) -> None:
    """Takes the time of a run of Locust."""
    (port,) = free_ports(1)
    with subprocess.Popen(
        command(server, "--web-host", "127.0.0.1", "--web-port", str(port), *TOYS),
        cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as locust:  # fmt: skip
        try:
            page = f"http://127.0.0.1:{port}"
            eventually(lambda: '"title": "Outcomes"' in _get(page))
            form = {"host": f"http://{server.http_url}", "metrics": "no:x", "user_count": 8, "spawn_rate": 8, "duration": 2}
            usual = {"rate": 20, "deadline": "0", "tenant_ids": "acme,beta", "scenario": "Gamma", "zipf": "0", "seed": "0"}

            def started(**more: object) -> dict:
                return json.loads(_get(f"{page}/swarm", urlencode({**form, **usual, **more}).encode()))

            def is_stopped() -> bool:
                return json.loads(_get(f"{page}/stats/requests") or "{}").get("state") == "stopped"

            for (name, value), named in WRONG.items():
                refused = started(**{name: value})
                assert not refused["success"] and mentions(refused["message"], *named), name
                eventually(is_stopped)
            assert started()["success"]
            eventually(lambda: json.loads(_get(f"{page}/outcomes") or "{}").get("Gamma", {}).get("requests", 0) > 10)
            eventually(is_stopped)
            outcomes = json.loads(_get(f"{page}/outcomes"))
            assert outcomes.keys() == {"Gamma"} and outcomes["Gamma"]["on_time_share"] == 1.0
            (shown,) = json.loads(_get(f"{page}/stats/requests"))["extended_stats"]
            assert shown["data"][0]["on_time_share"] == "100.0%" and 'id="outcomes"' in _get(f"{page}/stats/report")
        finally:
            os.kill(locust.pid, signal.SIGTERM)


def _get(url: str, body: bytes | None = None) -> str:
    try:
        with urlopen(url, body, timeout=PATIENCE) as answer:
            return answer.read().decode()
    except OSError:
        return ""  # the web page is not yet up
