"""`hplm doctor` prints its findings and exits with 1 if one is a problem."""

import json

import pytest

from hplm.cli import doctor
from hplm.cli.main import main


@pytest.fixture
def shared_memory(monkeypatch, tmp_path):
    """A folder instead of /dev/shm: other tests' servers have regions there."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(doctor, "SHARED_MEMORY", folder)
    monkeypatch.delenv("HPLM_ADMIN_KEY", raising=False)
    return folder


def found(capsys):
    return {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)["checks"]}


def test_the_exit_code_says_whether_there_is_a_problem(shared_memory, capsys, toy):
    options = ["doctor", "--json", "--triton", "26.06", "--repository", str(toy.repository)]
    assert main(options) == 0
    assert {finding["status"] for finding in found(capsys).values()} <= {"ok", "warning", "unknown"}
    assert main([*options, "--address", "0.0.0.0"]) == 1
    assert found(capsys)["tenants"]["status"] == "problem"


def test_it_says_what_to_do(shared_memory, capsys):
    (shared_memory / "hplm-1").touch(0o644)
    assert main(["doctor", "--triton", "24.10", "--address", "0.0.0.0"]) == 1
    printed = capsys.readouterr()
    assert "hplm-1" in printed.out and "CVE-2025-23310" in printed.out
    assert "regions" in printed.err and "triton" in printed.err


def test_a_file_of_secrets_must_be_there(shared_memory, capsys, tmp_path):
    assert main(["doctor", "--secrets", str(tmp_path / "absent")]) == 1
    assert str(tmp_path / "absent") in capsys.readouterr().err
