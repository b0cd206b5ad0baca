"""Owners behind the front door: a real HAProxy, `hplm manager` as a process, and a real Triton."""

import json
import random
import ssl
import subprocess
import sys

import httpx2
import openai
import pytest

from hplm.server.ports import free_ports, listens
from manager.pages import SESSION
from manager.rendering import ROOT
from testing.toy import WORDS
from tests.cluster.front import Front, read_answer
from tests.deploy.door import haproxy, require_haproxy
from tests.manager.forms import FORM, form
from tests.support.wait import PATIENCE, eventually

pytestmark = [pytest.mark.slow, pytest.mark.server("chat")]

LINES = [{"text": " ".join(random.Random(number).choices(WORDS, k=9)), "label": "xy"[number % 2]} for number in range(300)]
TRAIN = "".join(json.dumps(line) + "\n" for line in LINES).encode()


@pytest.fixture(scope="module")
def managed(servers, tmp_path_factory):
    """The manager's address, and the key of its owner `acme`."""
    server, folder = servers.get("chat"), tmp_path_factory.mktemp("manager")
    command, ours = [sys.executable, "-m", "hplm.cli.main", "manager"], ["--folder", folder / "records"]
    added = subprocess.run([*command, "owner", "add", "acme", *ours, "--json"], check=True, capture_output=True)
    port, places = free_ports(1)[0], ["--repository", server.repository, "--state", server.state, "--url", server.grpc_url]
    started = [*command, *ours, *places, "--store", server.built.stores["toy"].folder, "--port", port]
    with subprocess.Popen(list(map(str, started)), stdout=subprocess.DEVNULL) as process:
        try:
            eventually(lambda: listens(port) or process.poll() is not None)
            yield f"127.0.0.1:{port}", json.loads(added.stdout.splitlines()[-1])["secret"]
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def door(servers, managed, tmp_path_factory):
    """The owners' door."""
    require_haproxy()
    server, port = servers.get("chat"), free_ports(1)[0]
    settings = {"HPLM_PROBED": "hplm", "HPLM_MANAGER": managed[0], "HPLM_MANAGER_DOOR": f"127.0.0.1:{port}"}
    with haproxy(tmp_path_factory.mktemp("door"), server.http_url, server.grpc_url, "chat", **settings) as clients_door:
        assert clients_door.send("GET", "/v1/files").status == 404, "owners have a door of their own"
        yield Front(port, clients_door.certificate)


@pytest.fixture
def browser(door):
    """Sends forms as a browser does that has opened the console by the door's address."""
    at = f"https://localhost:{door.port}"
    trusted = ssl.create_default_context(cafile=door.certificate)
    with httpx2.Client(base_url=at, verify=trusted, headers={"origin": at}, timeout=PATIENCE) as browser:
        yield browser


@pytest.fixture
def client(door, managed):
    trusting = openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=door.certificate))
    url = f"https://localhost:{door.port}/v1"
    with openai.OpenAI(base_url=url, api_key=managed[1], max_retries=0, timeout=PATIENCE, http_client=trusting) as client:
        yield client


def head(path, secret, **headers):
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Connection: close", f"Authorization: Bearer {secret}"]
    return "\r\n".join([*lines, *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()), "", ""]).encode()


def test_a_job_s_events_come_as_they_happen_and_its_page_ends_it(client, browser, managed):
    secret = managed[1]
    file = client.files.create(file=("train.jsonl", TRAIN * 200), purpose="fine-tune")
    assert client.files.content(file.id).read() == TRAIN * 200, "an upload that the door's buffer does not hold"
    job = client.fine_tuning.jobs.create(model="toy", training_file=file.id, suffix="long", hyperparameters={"n_epochs": 50})
    headers = {"authorization": f"Bearer {secret}", "accept": "text/event-stream"}
    with browser.stream("GET", f"/v1/fine_tuning/jobs/{job.id}/events", headers=headers) as events:
        lines = (line for line in events.iter_lines() if line.startswith("data: "))
        assert "Created fine-tuning job" in next(lines)
        signed = browser.post(f"{ROOT}/sign-in", data={"key": secret})
        assert signed.status_code == 303 and "; Secure" in signed.headers["set-cookie"] and SESSION in browser.cookies
        page = f"{ROOT}/jobs/{job.id}"
        assert browser.post(f"{page}/cancel", headers={"origin": "https://evil.example"}).status_code == 403
        assert browser.post(f"{page}/cancel").headers["location"] == page
        *_, last, done = lines
        assert "has been cancelled" in last and done == "data: [DONE]"
    assert client.fine_tuning.jobs.retrieve(job.id).status == "cancelled"


def test_tokens_come_while_an_upload_is_on_its_way(door, server, managed):
    secret = managed[1]
    fields = form(("purpose", None, b"fine-tune"), ("file", "a.jsonl", TRAIN * 100))
    upload = head("/v1/files", secret, **FORM, content_length=len(fields)) + fields
    asked = json.dumps({"model": "single", "prompt": "a", "max_tokens": 16_000, "ignore_eos": True, "stream": True}).encode()
    with door.connect() as uploading, door.connect() as asking:
        uploading.sendall(upload[: len(upload) // 2])
        asking.sendall(head("/v1/completions", "none", content_length=len(asked)) + asked)
        assert asking.recv(1000).startswith(b"HTTP/1.1 200")
        assert server.held == 1, "the answer goes on"
        uploading.sendall(upload[len(upload) // 2 :])
        assert read_answer(uploading).status == 200
