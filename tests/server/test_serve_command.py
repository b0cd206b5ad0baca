"""`hplm serve` as a user runs it."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from hplm.cli.serve import has_decoder
from hplm.server import process_group
from tests.server.plain_models import ECHO, add_model
from tests.support.message import mentions
from tests.support.servers import until_ready
from tests.support.wait import eventually

pytestmark = pytest.mark.slow

SERVE = [sys.executable, "-m", "hplm.cli.main", "serve"]
ANY_PORTS = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]


@pytest.fixture
def serving(tmp_path):
    """Starts the command. Returns it with the process group of its tritonserver, and its output until it was ready."""
    add_model(tmp_path / "repository", "echo", ECHO)
    (tmp_path / "numpy.py").write_text("raise ImportError('a model imports what lies in the working directory')")
    command = [*SERVE, "--repository", str(tmp_path / "repository"), *ANY_PORTS]

    def as_from_a_terminal():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell lets its background processes ignore it

    piped = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, **piped, cwd=tmp_path, preexec_fn=as_from_a_terminal) as process:
        try:
            said = until_ready(process)
            yield process, group_of(process), said
        finally:
            process.kill()


def the_child(process, condition):
    """Returns the id of a process's child. Where other processes end, the list of children may be short for a moment."""
    found = []

    def look():
        listings = Path(f"/proc/{process.pid}/task").glob("*/children")  # of each of its threads
        found.clear()
        with suppress(OSError):  # a thread has just ended
            found[:] = [int(pid) for listing in listings for pid in listing.read_text().split() if condition(int(pid))]
        return found

    eventually(look)
    (child,) = found
    return child


def group_of(process):
    """Returns the process group of the tritonserver."""
    return the_child(process, lambda child: len(process_group.members(child)) == 2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_prints_its_addresses_and_a_signal_stops_it_cleanly(serving, tmp_path, number):
    process, group, said = serving
    for protocol in ("HTTP", "gRPC", "metrics"):
        assert re.search(rf"^{protocol} +127\.0\.0\.1:\d+", said, re.MULTILINE)
    assert mentions(said, "tritonserver", "echo", "--address 0.0.0.0")
    log = tmp_path / ".hplm" / "serve-0.log"
    assert str(log) in said
    assert log.is_file()
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out.count("\n"), err) == (0, 1, "")
    assert process_group.members(group) == []


def test_if_tritonserver_dies_it_serves_again_at_the_same_address(serving):
    process, group, said = serving
    os.kill(group, signal.SIGKILL)
    lines = iter(process.stdout.readline, "")
    assert mentions(next(lines), "restarting", "SIGKILL")
    assert next(lines).startswith("Ready again")
    url = re.search(r"^HTTP +(\S+)", said, re.MULTILINE)[1]
    with urllib.request.urlopen(f"http://{url}/v2/health/ready", timeout=60) as answer:
        assert answer.status == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    assert process_group.members(group) == []


@pytest.fixture
def with_gateway(tmp_path):
    """Starts the command with a gateway. Returns it with the gateway's address when it is ready."""
    add_model(tmp_path / "repository", "echo", ECHO)
    command = [*SERVE, "--repository", str(tmp_path / "repository"), *ANY_PORTS, "--openai-port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            said = until_ready(process)
            assert "no decoder" in said  # as is the case
            yield process, re.search(r"^OpenAI +(http://127\.0\.0\.1:\d+/v1)$", said, re.MULTILINE)[1]
        finally:
            process.kill()


def test_a_decoder_is_known_by_its_configuration(tmp_path):
    for name, backend in (("encoder-upper", "hplm_upper"), ("luna", "hplm_generate")):
        assert not has_decoder(tmp_path)
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text(f'name: "{name}"\nbackend: "{backend}"\n')
    assert has_decoder(tmp_path)


def test_the_gateway_is_started_again_and_ends_with_the_server(with_gateway):
    process, url = with_gateway
    first = gateway_of(process)
    assert models(url) == []
    os.kill(first, signal.SIGKILL)
    assert mentions(process.stdout.readline(), "restarting", "OpenAI", "SIGKILL")
    assert models(url) == []  # the connection waits until the gateway is there again
    second = gateway_of(process)
    assert second != first
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 0
    assert not os.path.exists(f"/proc/{second}")
    with pytest.raises(OSError):
        models(url)


def test_the_gateway_finds_a_server_that_was_started_again(with_gateway):
    process, url = with_gateway
    assert models(url) == []
    gateway = gateway_of(process)
    os.kill(group_of(process), signal.SIGKILL)
    while not process.stdout.readline().startswith("Ready again"):
        assert process.poll() is None

    def answers():
        try:
            return models(url) == []
        except urllib.error.HTTPError as error:
            assert error.code in (502, 503)

    eventually(answers)
    assert gateway_of(process) == gateway


def test_the_gateway_ends_when_the_command_is_killed(with_gateway):
    process, _ = with_gateway
    gateway = gateway_of(process)
    process.kill()
    eventually(lambda: not os.path.exists(f"/proc/{gateway}"))


def gateway_of(process):
    """Returns the id of the gateway's process."""
    return the_child(process, lambda child: b"hplm_openai" in command_line(child))


def command_line(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def models(url):
    with urllib.request.urlopen(f"{url}/models", timeout=60) as answer:
        return json.load(answer)["data"]


def test_a_folder_that_is_not_a_repository_is_one_line_of_error(tmp_path):
    done = subprocess.run([*SERVE, "--repository", str(tmp_path / "absent")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("hplm serve: ") and mentions(done.stderr, tmp_path / "absent")
    assert done.stderr.count("\n") == 1


def test_flags_after_two_dashes_go_to_tritonserver(tmp_path):
    add_model(tmp_path / "repository", "echo", ECHO)
    command = [*SERVE, "--repository", str(tmp_path / "repository"), *ANY_PORTS, "--", "--no-such-flag=1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 1
    assert "no-such-flag" in (tmp_path / ".hplm/serve-0.log").read_text("utf-8")
