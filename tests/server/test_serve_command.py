"""`hplm serve` as a user runs it."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
from tritonclient.utils import InferenceServerException

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantVersion
from hplm.cli.main import main
from hplm.cli.serve import open_tenants
from hplm.registry.folder import Folder
from hplm.registry.pointer import begin
from hplm.server import process_group
from hplm.tenants.manager import Manager
from testing.toy import SERVED, make_chat
from tests.cli.commands import process_without
from tests.server.plain_models import ECHO, add_model
from tests.server.stock import Stock
from tests.support.message import mentions
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow

HPLM = [sys.executable, "-m", "hplm.cli.main"]
THE_TWO = ("--model-repository", "hplm_openai")  # words in the commands of the tritonserver and of the gateway
ANY_PORTS = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]


@contextmanager
def running(command, folder):
    """Yields the process of `hplm serve`, and what it says until it is ready."""
    piped = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, **piped, cwd=folder) as process:
        try:
            yield process, until_ready(process)
        finally:
            process.kill()


def until_ready(process):
    """Returns what `hplm serve` prints until it is ready."""
    said = [""]
    while not said[-1].startswith("Ready"):
        said.append(process.stdout.readline())
        assert said[-1], f"it ended with {process.wait(PATIENCE)}: {''.join(said)}{process.stderr.read()}"
    return "".join(said)


def children_of(process):
    """Returns the ids of the tritonserver, which leads its process group, and of the gateway. Others end in the meantime."""
    found = []

    def look():
        listings = Path(f"/proc/{process.pid}/task").glob("*/children")  # of each of its threads
        with suppress(OSError):  # a thread has just ended
            children = [int(pid) for listing in listings for pid in listing.read_text().split()]
            found[:] = [pid for word in THE_TWO for pid in children if word in " ".join(process_group.arguments(pid))]
        return len(found) == 2

    eventually(look)
    return found


def identity_of(triton):
    (identity,) = [word.partition("=")[2] for word in process_group.arguments(triton) if word.startswith("--id=")]
    return identity


def models(url):
    """Returns the names that the gateway lists; None while it has not found a server that was started again."""
    try:
        with urllib.request.urlopen(f"{url}/models", timeout=PATIENCE) as answer:
            return {model["id"] for model in json.load(answer)["data"]}
    except urllib.error.HTTPError as error:
        assert error.code in (502, 503)
        return None


def test_what_ends_is_started_again_but_never_without_the_state_that_was_seen(toy, tmp_path):
    """Takes two starts of Triton, attempts at a third one, and two starts of the gateway."""
    state, repository = tmp_path / "state", ["--repository", str(toy.repository)]
    serve = [*HPLM, "serve", *repository, "--state", str(state), *ANY_PORTS, "--openai-port", "0"]
    with running(serve, tmp_path) as (process, said):
        for protocol in ("HTTP", "gRPC", "metrics"):
            assert re.search(rf"^{protocol} +127\.0\.0\.1:\d+", said, re.MULTILINE)
        log = tmp_path / ".hplm" / "serve-0.log"
        assert mentions(said, "tritonserver", "toy-lookup", "--address 0.0.0.0", log, len(SERVED), "acme")
        assert mentions(said, state / "toy") and log.is_file()  # a mistyped one would be seen here
        url = re.search(r"^gateway +(http://127\.0\.0\.1:\d+/v1)$", said, re.MULTILINE)[1]
        stock = Stock(SimpleNamespace(http_url=re.search(r"^HTTP +(\S+)", said, re.MULTILINE)[1]), "http")

        live = Manager.open(toy.repository, state)
        live.add_key("acme")
        assert live.settle() == []

        group, first = children_of(process)
        listed = models(url)
        assert "echo" in listed and "acme" not in listed  # it has a key
        os.kill(first, signal.SIGKILL)
        assert mentions(process.stdout.readline(), "restarting", "gateway", "SIGKILL")
        assert models(url) == listed  # the connection waits until the gateway is there again
        gateway = children_of(process)[1]
        assert gateway != first

        environment = {**os.environ, "HPLM_SERVER_ID": identity_of(group)}
        drain = [*HPLM, "drain", "--notice", "0"]
        done = subprocess.run(drain, env=environment, capture_output=True, text=True, timeout=2 * PATIENCE)
        assert (done.returncode, done.stderr) == (0, "") and mentions(done.stdout, "all", "answered")
        with pytest.raises(InferenceServerException, match=r"\[draining\]"):
            stock.ask(["a"], "echo")
        os.kill(group, signal.SIGKILL)
        assert mentions(process.stdout.readline(), "restarting", "SIGKILL")
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d{4} Ready again", process.stdout.readline())
        assert stock.ask(["a"], "echo")["LABEL"].size  # at the same address, and it drains no more
        with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
            stock.ask(["a"], "acme")
        eventually(lambda: models(url) == listed)
        other, same = children_of(process)
        assert same == gateway and other != group

        state.rename(tmp_path / "elsewhere")
        os.kill(other, signal.SIGKILL)
        lines = iter(process.stdout.readline, "")
        (line,) = [next(line for line in lines if "CURRENT" in line or line.startswith("Ready"))]
        assert mentions(line, "CURRENT", "hplm begin")
        process.send_signal(signal.SIGINT)  # Ctrl-C while it tries
        out, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, err) == (0, "") and "Ready" not in out
        assert not process_group.lives(gateway)


def test_a_signal_stops_all_when_a_stream_on_its_way_is_whole(toy, tmp_path):
    """Without a state the exports answer. Flags after two dashes have gone to tritonserver. Takes a start of Triton."""
    chat = make_chat(tmp_path / "chat", [TenantVersion("plain", 1, "root", 1, "generate", [], 0)])
    export(toy.store, chat.repository, ServingOptions(dtype="fp32"))
    command = [*HPLM, "serve", "--repository", str(chat.repository), *ANY_PORTS, "--openai-port", "0"]
    command += ["--notice", "0", "--", "--log-verbose=1"]
    with running(command, tmp_path) as (process, said):
        url = re.search(r"^gateway +(\S+)$", said, re.MULTILINE)[1]
        group, gateway = children_of(process)
        assert "--log-verbose=1" in process_group.arguments(group)
        stock = Stock(SimpleNamespace(http_url=re.search(r"^HTTP +(\S+)", said, re.MULTILINE)[1]), "http")
        assert stock.ask(["a"], "acme", outputs=("LABEL",))
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE) as client:
            few = {"max_tokens": 60, "extra_body": {"ignore_eos": True}}  # a slow, busy machine makes as many while it drains
            chunks = client.completions.create(model="plain", prompt="a", stream=True, temperature=0, **few)
            next(iter(chunks))
            process.send_signal(signal.SIGTERM)
            *_, last = chunks
            assert last.choices[0].finish_reason == "length"
            out, err = process.communicate(timeout=PATIENCE)
            assert (process.returncode, out.count("\n"), err) == (0, 2, "") and "0 s" in out
            assert process_group.members(group) == [] and not process_group.lives(gateway)
            with pytest.raises(openai.APIConnectionError):
                client.models.list()


def test_nothing_outlives_a_command_that_is_killed(tmp_path):
    add_model(tmp_path / "repository", "echo", ECHO)
    (tmp_path / "numpy.py").write_text("raise ImportError('a model imports what lies in the working directory')")
    command = [*HPLM, "serve", "--repository", str(tmp_path / "repository"), *ANY_PORTS, "--openai-port", "0"]
    with running(command, tmp_path) as (process, _):
        group, gateway = children_of(process)
        identity = identity_of(group)
        assert len(process_group.members(group)) == 2
        assert left_by(identity)
    eventually(lambda: not process_group.members(group) and not process_group.lives(gateway))
    eventually(lambda: not left_by(identity))


def left_by(identity):
    return [*process_group.SHARED_MEMORY.glob(f"{identity}*"), *Path(tempfile.gettempdir()).glob(f"{identity}*")]


def test_the_command_does_not_begin_a_state_that_must_exist(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HPLM_STATE_MUST_EXIST", "1")
    serve = ["serve", "--repository", str(toy.repository), *ANY_PORTS, "--start-timeout", "1e-9"]  # none is started
    assert main([*serve, "--state", str(tmp_path / "state")]) == 1
    assert mentions(capsys.readouterr().err, tmp_path / "state/toy", "CURRENT", "hplm begin")
    assert not (tmp_path / "state").exists()
    for off in ("", "0", "False"):
        monkeypatch.setenv("HPLM_STATE_MUST_EXIST", off)
        state = tmp_path / f"begun{off}"
        assert main([*serve, "--state", str(state)]) == 1 and (state / "toy/CURRENT").exists()


def test_without_our_backends_the_way_to_install_them_is_said(tmp_path):
    add_model(tmp_path, "echo", ECHO)
    with process_without("backends") as run:
        code, _, said = run(["serve", "--repository", str(tmp_path), *ANY_PORTS])
    assert code == 1 and mentions(said, "backends", sys.executable, "pip install")


def test_tenants_without_keys_are_found(toy, tmp_path):
    begin(Folder(tmp_path / "state/toy"))
    Manager.open(toy.repository, tmp_path / "state").add_key("acme")
    assert open_tenants(toy.repository, tmp_path / "state") == sorted(tenant.id for tenant in SERVED[1:])
