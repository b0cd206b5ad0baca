"""`hplm watch` beside a server that it has not started."""

import os
import signal
import subprocess
import sys

import pytest

from hplm.server.stubs import stubs
from tests.support.message import mentions
from tests.support.servers import serving

pytestmark = pytest.mark.slow
WATCH = [sys.executable, "-m", "hplm.cli.main", "watch"]


def watch(server, *options: str, secret: bool = True, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HPLM_ADMIN": server.admin_header[1] if secret else ""}
    command = [*WATCH, "--url", server.http_url, *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)


@pytest.fixture(scope="module")
def server(toy):
    with serving(toy.repository) as server:
        yield server


def kill(server, model: str) -> None:
    os.kill(next(stub.pid for stub in stubs(server.pid) if stub.model == model), signal.SIGKILL)


def test_once_it_says_whether_all_models_work_and_then_revives_the_dead_one(server):
    well = watch(server, "--once")
    assert (well.returncode, well.stderr) == (0, "") and mentions(well.stdout, 3)
    assert watch(server, "--once", "--models", "toy-lookup", "toy-upper", secret=False).returncode == 0
    kill(server, "toy-lookup")
    dead = watch(server, "--once")
    assert dead.returncode == 1 and mentions(dead.stderr, "toy-lookup")
    environment = {**os.environ, "HPLM_ADMIN": server.admin_header[1]}
    with subprocess.Popen([*WATCH, "--url", server.http_url], env=environment, stdout=subprocess.PIPE, text=True) as watching:
        assert mentions(watching.stdout.readline(), "loaded", "toy-lookup")
        watching.kill()
    assert watch(server, "--once").returncode == 0
    kill(server, "toy-lookup")  # another watcher does not know how often it was loaded again
    with subprocess.Popen([*WATCH, "--url", server.http_url], env=environment, stdout=subprocess.PIPE, text=True) as watching:
        assert mentions(watching.stdout.readline(), "loaded", "toy-lookup")
        watching.kill()
    assert watch(server, "--once").returncode == 0


def test_a_model_that_the_server_does_not_have_is_an_error(server):
    absent = watch(server, "--once", "--models", "nobody")
    assert absent.returncode == 1 and mentions(absent.stderr, "nobody")


def test_without_the_secret_it_asks_for_it_or_for_names(server):
    refused = watch(server, "--once", secret=False)
    assert refused.returncode == 1 and mentions(refused.stderr, "HPLM_ADMIN")


def test_a_server_that_does_not_answer_is_an_error(server):
    absent = subprocess.run([*WATCH, "--url", "127.0.0.1:1", "--once"], capture_output=True, text=True, timeout=60)
    assert absent.returncode == 1 and absent.stderr.count("\n") == 1 and mentions(absent.stderr, "127.0.0.1:1", "--url")
