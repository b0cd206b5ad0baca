"""A state in a bucket: the commands of docs/cluster.md with the real rclone, and a folder as the bucket."""

import re
import shlex
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from hplm.tenants.manager import Manager
from tests.follow.machine import Machine, same, step, until_whole
from tests.follow.nginx import HOST, free_port, is_open
from tests.places import knowledge, make_place
from tests.support.message import mentions
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"


@pytest.fixture
def commands():
    if shutil.which("rclone") is None:
        pytest.skip("no rclone on PATH (Debian, Ubuntu: apt-get install rclone)")
    return [shlex.split(line) for line in re.findall(r"^rclone .*$", PAGE.read_text("utf-8"), re.MULTILINE)]


@contextmanager
def served(command, port):
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            eventually(lambda: is_open(port))
            yield f"http://{HOST}:{port}"
        finally:
            process.terminate()
            process.wait(PATIENCE)


def test_a_bucket_is_followed_through_rclone(commands, tmp_path):
    place = make_place(tmp_path)
    store, repository, state = place
    live, port = Manager.open(repository, state), free_port()
    values = {"state": str(state), "bucket:state": str(tmp_path / "bucket"), "127.0.0.1:8090": f"{HOST}:{port}"}
    *copying, serving = [[values.get(word, word) for word in command] for command in commands]

    def upload():
        for command in copying:
            subprocess.run(command, check=True)

    live.add("new-a", knowledge(store, "new-a"))
    upload()
    assert not list((tmp_path / "bucket").rglob("registry*")) and not list((tmp_path / "bucket").rglob("readers"))
    with served(serving, port) as url:
        machine = Machine(repository, tmp_path / "copy", url)
        with machine.following() as following:
            until_whole(following)
            assert same((repository, state), machine)
            live.add("new-b", knowledge(store, "new-b"))
            live.delete("tenant-1")
            upload()
            eventually(lambda: step(following) or following.copy.reached.whole == 3)
            assert same((repository, state), machine)
        assert sum(mentions(line, "managers") for line in machine.said) == 1
