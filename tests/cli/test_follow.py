"""`hplm follow` as an operator runs it, before the real nginx."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hplm.cli.main import main
from hplm.tenants.manager import Manager
from tests.follow.machine import Machine, same
from tests.follow.nginx import TOKEN, nginx
from tests.places import knowledge, make_place
from tests.support.message import mentions
from tests.support.wait import eventually

pytestmark = pytest.mark.slow


@pytest.fixture
def place(tmp_path):
    return make_place(tmp_path)


@pytest.fixture
def token(tmp_path):
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    return tmp_path / "token"


def test_once_ends_when_all_is_here(place, token, tmp_path, capsys):
    store, repository, state = place
    Manager.open(repository, state).add("new-a", knowledge(store, "new-a"))
    with nginx(state, tmp_path / "nginx") as url:
        options = ["--from", url, "--repository", str(repository), "--state", str(tmp_path / "copy")]
        assert main(["follow", *options, "--token-file", str(token), "--once"]) == 0
        assert mentions(capsys.readouterr().out, "toy", "generation 1", "3 tenants")
        (tmp_path / "wrong").write_text("wrong")
        assert main(["follow", *options, "--token-file", str(tmp_path / "wrong"), "--once"]) == 1
        assert mentions(capsys.readouterr().err, "401", "--token-file")
        (tmp_path / "empty").write_text("\n")
        assert main(["follow", *options, "--token-file", str(tmp_path / "empty"), "--once"]) == 1
        assert mentions(capsys.readouterr().err, tmp_path / "empty")
    assert same((repository, state), Machine(repository, tmp_path / "copy", url))


def test_a_follower_goes_on_until_it_is_stopped(place, token, tmp_path, capsys):
    store, repository, state = place
    live = Manager.open(repository, state)
    state.mkdir()
    copy = Machine(repository, tmp_path / "copy", "")
    with nginx(state, tmp_path / "nginx") as url:
        command = [sys.executable, "-m", "hplm.cli.main", "follow", "--from", url, "--repository", str(repository)]
        command += ["--state", str(copy.root), "--token-file", str(token), "--name", "one"]
        with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as process:
            try:
                report = state / "toy/readers/one"
                eventually(lambda: report.exists() or process.poll() is not None)
                live.add("new-a", knowledge(store, "new-a"))
                eventually(lambda: report.read_text() == "1 1\n")
                assert live.settle_now() == []
                places = ["--repository", str(repository), "--state", str(copy.root)]
                assert doctor(capsys, places)["status"] == "ok"
            finally:
                process.send_signal(signal.SIGTERM)
            said = process.stdout.read()
    assert process.returncode == 0 and mentions(said, url, "generation 1", "stopped")
    assert report.read_text() == "-\n"
    assert same((repository, state), copy)
    found = doctor(capsys, places)
    assert found["status"] == "problem" and mentions(found["says"], copy.state.folder)


def doctor(capsys, places):
    capsys.readouterr()
    main(["doctor", *places, "--json"])
    checks = json.loads(capsys.readouterr().out.splitlines()[0])["checks"]
    return next(check for check in checks if check["check"] == "copies")
