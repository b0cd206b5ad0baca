"""Servers that have lost their state: the export knows of no key and no deletion, so nobody may be answered from it."""

import http.client
import os
import re
import shutil
import signal
import subprocess
from types import SimpleNamespace

import pytest
from tritonclient.utils import InferenceServerException

from hplm.cli.main import main
from hplm.errors import HplmError
from hplm.server import TritonServer, process_group
from hplm.tenants.manager import Manager
from hplm.tenants.state import State
from tests.server.stock import Stock
from tests.server.test_serve_command import ANY_PORTS, SERVE, triton_of
from tests.support.message import mentioning, mentions
from tests.support.servers import kill_model, until_ready
from tests.support.wait import PATIENCE

pytestmark = pytest.mark.slow


def from_a_terminal():
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell lets its background processes ignore it


def test_a_supervisor_that_has_seen_a_state_never_starts_without_it(toy, tmp_path):
    state = tmp_path / "state"
    command = [*SERVE, "--repository", str(toy.repository), "--state", str(state), *ANY_PORTS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, preexec_fn=from_a_terminal) as process:
        try:
            said = until_ready(process)
            assert mentions(said, state / "toy")  # a mistyped one would be seen here
            live = Manager.open(toy.repository, state)
            live.add_key("acme")
            assert live.settle_now() == []
            stock = Stock(SimpleNamespace(http_url=re.search(r"^HTTP +(\S+)", said, re.MULTILINE)[1]), "http")
            with pytest.raises(InferenceServerException, match=r"\[no_tenant\]"):
                stock.ask(["a few words"], "acme")
            shutil.rmtree(state)
            os.kill(triton_of(process), signal.SIGKILL)
            for line in iter(process.stdout.readline, ""):
                assert not line.startswith("Ready"), line
                if "CURRENT" in line:
                    assert mentions(line, "hplm begin")
                    break
            else:
                pytest.fail("it has ended")
            process.send_signal(signal.SIGINT)  # Ctrl-C while it tries
            process.communicate(timeout=PATIENCE)
            assert process.returncode == 0
        finally:
            process.kill()


def test_models_do_not_load_without_a_state_that_must_exist(toy, tmp_path, monkeypatch):
    """With it they do. At the end neither a dead model nor an idle connection keeps the server, as they keep Triton."""
    monkeypatch.setenv("HPLM_STATE_MUST_EXIST", "1")
    with pytest.raises(HplmError, match=mentioning("CURRENT", "hplm begin")), TritonServer(toy.repository, state=tmp_path):
        pass
    State(tmp_path / "toy").begin()
    log = tmp_path / "log"
    with TritonServer(toy.repository, state=tmp_path, log_file=log) as server:
        assert Stock(server, "http").ask(["a few words"], "acme")
        idle = http.client.HTTPConnection(server.http_url, timeout=PATIENCE)
        idle.request("GET", "/v2/health/live")
        idle.getresponse().read()
        group = server.pid
        kill_model(server, "toy-lookup")
    assert process_group.members(group) == []
    assert "Waiting for in-flight requests" not in log.read_text(), "Triton has waited"
    idle.close()


@pytest.mark.parametrize("said_by", ["--state-must-exist", "HPLM_STATE_MUST_EXIST"])
def test_the_command_does_not_begin_a_state_that_must_exist(toy, tmp_path, monkeypatch, capsys, said_by):
    options = ["--state-must-exist"] if said_by.startswith("--") else []
    monkeypatch.setenv("HPLM_STATE_MUST_EXIST", "" if options else "1")
    monkeypatch.setattr("hplm.server.TritonServer", None)  # none is started
    serve = ["serve", "--repository", str(toy.repository), *ANY_PORTS, *options]
    assert main([*serve, "--state", str(tmp_path / "state")]) == 1
    assert mentions(capsys.readouterr().err, tmp_path / "state/toy", "CURRENT", "hplm begin")
    assert not (tmp_path / "state").exists()
    if options:
        assert main(serve) == 1 and mentions(capsys.readouterr().err, "--state")
