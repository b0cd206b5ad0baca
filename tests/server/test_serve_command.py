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
from contextlib import suppress
from pathlib import Path

import pytest

from hplm.cli.serve import has_decoder
from hplm.server import process_group
from tests.server.plain_models import ECHO, add_model
from tests.support.message import mentions
from tests.support.servers import until_ready
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow

SERVE = [sys.executable, "-m", "hplm.cli.main", "serve"]
ANY_PORTS = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]


@pytest.fixture
def command(tmp_path):
    """The command for a repository with one model, with a gateway."""
    add_model(tmp_path / "repository", "echo", ECHO)
    (tmp_path / "numpy.py").write_text("raise ImportError('a model imports what lies in the working directory')")
    return [*SERVE, "--repository", str(tmp_path / "repository"), *ANY_PORTS, "--openai-port", "0"]


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


def triton_of(process):
    """Returns the id of the tritonserver, which leads its process group."""
    return the_child(process, lambda child: any("--model-repository" in word for word in process_group.arguments(child)))


def gateway_of(process):
    return the_child(process, lambda child: "hplm_openai" in process_group.arguments(child))


def models(url):
    with urllib.request.urlopen(f"{url}/models", timeout=PATIENCE) as answer:
        return json.load(answer)["data"]


def test_what_ends_is_started_again_until_a_signal_stops_all(command, tmp_path):
    """Takes two starts of Triton and two of the gateway."""
    piped = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, **piped, cwd=tmp_path) as process:
        try:
            said = until_ready(process)
            for protocol in ("HTTP", "gRPC", "metrics"):
                assert re.search(rf"^{protocol} +127\.0\.0\.1:\d+", said, re.MULTILINE)
            log = tmp_path / ".hplm" / "serve-0.log"
            assert mentions(said, "tritonserver", "echo", "no decoder", "--address 0.0.0.0", log) and log.is_file()
            url = re.search(r"^OpenAI +(http://127\.0\.0\.1:\d+/v1)$", said, re.MULTILINE)[1]

            first = gateway_of(process)
            assert models(url) == []
            os.kill(first, signal.SIGKILL)
            assert mentions(process.stdout.readline(), "restarting", "OpenAI", "SIGKILL")
            assert models(url) == []  # the connection waits until the gateway is there again
            gateway, group = gateway_of(process), triton_of(process)
            assert gateway != first

            os.kill(group, signal.SIGKILL)
            assert mentions(process.stdout.readline(), "restarting", "SIGKILL")
            assert process.stdout.readline().startswith("Ready again")
            address = re.search(r"^HTTP +(\S+)", said, re.MULTILINE)[1]
            with urllib.request.urlopen(f"http://{address}/v2/health/ready", timeout=PATIENCE) as answer:
                assert answer.status == 200
            eventually(lambda: lists(url))
            assert gateway_of(process) == gateway and triton_of(process) != group

            group = triton_of(process)
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=PATIENCE)
            assert (process.returncode, out.count("\n"), err) == (0, 1, "")
            assert process_group.members(group) == [] and not process_group.lives(gateway)
            with pytest.raises(OSError):
                models(url)
        finally:
            process.kill()


def lists(url):
    """Whether the gateway has found the server that was started again."""
    try:
        return models(url) == []
    except urllib.error.HTTPError as error:
        assert error.code in (502, 503)
        return False


def test_nothing_outlives_a_command_that_is_killed(command, tmp_path):
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            until_ready(process)
            gateway, group = gateway_of(process), triton_of(process)
            (identity,) = [word.partition("=")[2] for word in process_group.arguments(group) if word.startswith("--id=")]
            assert len(process_group.members(group)) == 2
            assert left_by(identity)
        finally:
            process.kill()
    eventually(lambda: not process_group.members(group) and not process_group.lives(gateway))
    eventually(lambda: not left_by(identity))


def left_by(identity):
    return [*process_group.SHARED_MEMORY.glob(f"{identity}*"), *Path(tempfile.gettempdir()).glob(f"{identity}*")]


def test_a_decoder_is_known_by_its_configuration(tmp_path):
    for name, backend in (("encoder-upper", "hplm_upper"), ("luna", "hplm_generate")):
        assert not has_decoder(tmp_path)
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text(f'name: "{name}"\nbackend: "{backend}"\n')
    assert has_decoder(tmp_path)


def test_a_folder_that_is_not_a_repository_is_one_line_of_error(tmp_path):
    done = subprocess.run([*SERVE, "--repository", str(tmp_path / "absent")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("hplm serve: ") and mentions(done.stderr, tmp_path / "absent")
    assert done.stderr.count("\n") == 1


def test_flags_after_two_dashes_go_to_tritonserver(command, tmp_path):
    done = subprocess.run([*command, "--", "--no-such-flag=1"], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 1
    assert "no-such-flag" in (tmp_path / ".hplm/serve-0.log").read_text("utf-8")
