"""`hplm drain` beside a server that it has not started, and `hplm doctor`."""

import json

import pytest

from hplm.cli import doctor
from hplm.cli.main import main
from hplm.server.held import Held
from hplm.server.inherited import Drain
from hplm.server.process_group import SHARED_MEMORY
from tests.support.message import mentions
from tests.support.servers import server_environment

AT_ONCE = ("--at-least", "0")


@pytest.fixture
def server(monkeypatch):
    with server_environment(monkeypatch) as name:
        yield name


def test_models_refuse_and_what_they_hold_is_awaited_but_not_what_a_dead_one_held(server, capsys):
    held = Held("toy-upper")
    assert not Drain().begun
    held.take()
    assert main(["drain", "--seconds", "0.3", *AT_ONCE]) == 0
    assert mentions(capsys.readouterr().out, "1", "left") and Drain().begun

    def dies():
        held.take()
        (shown,) = SHARED_MEMORY.glob(f"{server}-held-*@toy-upper")
        shown.rename(shown.with_name(f"{server}-held-{2**22 + 1}@toy-upper"))  # above the largest pid

    for ends in (held.answered, dies):
        ends()
        assert main(["drain", *AT_ONCE]) == 0
        assert mentions(capsys.readouterr().out, "all", "answered")


def test_without_the_servers_id_or_its_models_it_says_so(server, monkeypatch, capsys):
    assert main(["drain", *AT_ONCE]) == 1
    assert mentions(capsys.readouterr().err, server, "HPLM_SERVER_ID") and not Drain().begun
    monkeypatch.delenv("HPLM_SERVER_ID")
    assert main(["drain", *AT_ONCE]) == 1
    assert mentions(capsys.readouterr().err, "HPLM_SERVER_ID")


def test_the_doctors_exit_code_says_whether_there_is_a_problem(monkeypatch, tmp_path, capsys, toy):
    monkeypatch.setattr(doctor, "SHARED_MEMORY", tmp_path)  # other tests' servers have regions in /dev/shm
    monkeypatch.delenv("HPLM_ADMIN_KEY", raising=False)
    options = ["doctor", "--json", "--triton", "26.06", "--repository", str(toy.repository)]
    assert main(options) == 0
    assert {check["status"] for check in json.loads(capsys.readouterr().out)["checks"]} <= {"ok", "warning", "unknown"}
    (tmp_path / "hplm-1").touch(0o644)
    assert main([*options, "--address", "0.0.0.0"]) == 1
    said = capsys.readouterr()
    problems = {check["check"] for check in json.loads(said.out)["checks"] if check["status"] == "problem"}
    assert problems >= {"tenants", "regions"} and mentions(said.err, *problems)
