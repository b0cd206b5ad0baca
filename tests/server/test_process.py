"""Processes of a cluster or a gateway: they are started again, stopped, and end with the process that started them."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from hplm.errors import HplmError
from hplm.server import GatewayProcess, process_group
from hplm.server.process import Process
from tests.support.message import mentioning, mentions
from tests.support.wait import PATIENCE, Clock, eventually

SLEEPING = [sys.executable, "-c", "print('Ready', flush=True); import time; time.sleep(600)"]


@pytest.fixture
def make(tmp_path):
    made = []

    def make(command, **options):
        made.append(Process("it", command, tmp_path / "logs" / "it.log", **options))
        return made[-1]

    yield make
    for process in made:
        process.stop(0)


def kill(process):
    os.kill(process.pid, signal.SIGKILL)
    eventually(lambda: process.pid is None)


def test_a_process_that_ends_is_started_again_unless_it_was_asked_to_end(make):
    clock, said = Clock(), []
    process = make(SLEEPING, clock=clock)
    process.start()
    first = process.pid
    kill(process)
    clock.sleep(60)  # it has run for so long that it is started at once
    process.look(said.append)
    assert process.pid not in (None, first)
    assert len(said) == 1 and "SIGKILL" in said[0]
    process.ask_to_end()
    eventually(lambda: process.pid is None)
    process.look(said.append)
    assert len(said) == 1
    process.start()
    kill(process)
    process.look(said.append)
    assert len(said) == 2, "it was started since"


def test_a_process_that_ends_at_once_is_started_after_longer_and_longer_pauses(make):
    clock, said = Clock(), []
    process = make(["sh", "-c", "exit 1"], clock=clock)
    process.start()
    for pause in ("1 s", "2 s"):
        eventually(lambda: process.look(said.append) or said)
        assert mentions(said.pop(), "restarting", "code 1", pause)
        eventually(lambda: process.pid is None)
        process.look(said.append)
        assert not said, "it was started before its time"
        clock.sleep(2)
        process.look(said.append)


def test_a_process_that_cannot_be_started_is_tried_again_later(make, tmp_path):
    clock, said, room = Clock(), [], tmp_path / "room"
    room.mkdir()
    process = make(SLEEPING, clock=clock, folder=room)
    process.start()
    kill(process)
    clock.sleep(60)
    room.rmdir()
    process.look(said.append)
    room.mkdir()
    process.look(said.append)
    assert len(said) == 2 and mentions(said[-1], "does not start", room, "1 s") and process.pid is None
    clock.sleep(1)
    process.look(said.append)
    assert len(said) == 2 and process.pid is not None


def test_a_process_is_asked_to_end_once(make):
    """A second signal would break off the drain of a server. Here it would end the process."""
    traps = "trap 'trap - TERM; echo asked' TERM; trap 'echo lives' WINCH"
    process = make(["sh", "-c", f"{traps}; echo Ready; while :; do sleep 0.05; done"])
    process.start()
    process.wait_until(process.output, PATIENCE)
    process.ask_to_end()
    eventually(lambda: "asked" in process.output())
    process.ask_to_end()
    os.kill(process.pid, signal.SIGWINCH)
    eventually(lambda: "lives" in process.output())


@pytest.mark.parametrize("end", ["killed", "stopped"])
def test_the_whole_group_ends_with_a_process_although_it_does_not_listen(make, end):
    process = make(["sh", "-c", "trap '' TERM; sleep 600 & echo $!; wait; wait"])
    process.start()
    eventually(lambda: process.output().strip())
    child = int(process.output())
    if end == "killed":
        kill(process)
        process.look(lambda _: None)
    else:
        process.stop(0.2)
        assert process.pid is None
    eventually(lambda: not process_group.lives(child))


def test_it_is_pinned_to_its_cores_with_as_many_threads(make):
    core = min(os.sched_getaffinity(0))
    process = make(["sh", "-c", "grep Cpus_allowed_list /proc/self/status; echo $OMP_NUM_THREADS"], cores=[core])
    process.start()
    process.finish(60)
    assert mentions(process.output(), f"Cpus_allowed_list:\t{core}\n1\n")


def test_a_failure_is_an_error_with_the_last_words_of_the_last_start(make):
    process = make(["sh", "-c", "echo port 8000 is taken; exit 3"])
    for wait in (lambda: process.wait_until(lambda: False, 60), lambda: process.finish(60)):
        process.start()
        with pytest.raises(HplmError, match="port 8000 is taken"):
            wait()
        assert process.output() == "port 8000 is taken\n"


def test_it_ends_with_the_process_that_has_started_it(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from hplm.server.process import Process\n"
        f"process = Process('it', ['sh', '-c', 'echo runs; exec sleep 600'], Path({str(tmp_path / 'it.log')!r}))\n"
        "process.start(); process.wait_until(process.output, 300); print(process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
    eventually(lambda: not process_group.lives(child))


def test_a_gateway_names_a_port_in_use_and_a_missing_package(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(HplmError, match=mentioning("--openai-port", port)):
            GatewayProcess("127.0.0.1", port, print)
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # it is not installed
    with pytest.raises(HplmError, match=mentioning("--openai-port", "uvicorn", "pip install")):
        GatewayProcess("127.0.0.1", 0, print)

    class Forbidding:
        def find_spec(self, name, path=None, target=None):
            raise ModuleNotFoundError(f"{name} is forbidden here")

    monkeypatch.delitem(sys.modules, "uvicorn")
    monkeypatch.setattr(sys, "meta_path", [Forbidding()])
    with pytest.raises(HplmError, match=mentioning("--openai-port", "forbidden")):
        GatewayProcess("127.0.0.1", 0, print)


@pytest.mark.slow
def test_a_gateway_that_ends_is_started_again_by_a_thread_of_its_own(tmp_path):
    """Because `hplm serve` may be busy for minutes with a server that does not start."""
    said = []
    with GatewayProcess("127.0.0.1", 0, said.append) as gateway:
        gateway.start("no url", tmp_path / "log")
        eventually(lambda: said)
    assert gateway.pid is None and mentions(said[0], "restarting", "gateway", "code 1")
    assert "no url" in (tmp_path / "log").read_text()
