"""Containers of the manifests at work on this machine: their commands, with folders for volumes and ports for services."""

from __future__ import annotations

import getpass
import http.client
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hplm.cli.main import main
from hplm.server.ports import Ports
from hplm.tenants.state import State
from tests.deploy.manifests import BASE, Object, built, container, find, words
from tests.deploy.programs import debian_program, run
from tests.support.wait import eventually

pytestmark = pytest.mark.slow

HPLM = [sys.executable, "-m", "hplm.cli.main"]
TOKEN = "a-token-of-followers"


class Pods:
    """Each volume is a folder, which containers share as their pods do. A config map's has its files."""

    def __init__(self, folder: Path, repository: Path) -> None:
        self.objects = built(BASE)
        self._folder = folder
        self._repository = repository
        self.port = Ports().claim("127.0.0.1").http

    def volume(self, pod: str, name: str) -> Path:
        if name == "repository":
            return self._repository
        folder = self._folder / pod / name
        folder.mkdir(parents=True, exist_ok=True)
        if name == "source-token":
            (folder / "token").write_text(TOKEN, "utf-8")
        if name == "source-config":
            (folder / "source.conf").write_text(find(self.objects, "ConfigMap", "hplm-source")["data"]["source.conf"], "utf-8")
        if name == "cluster":
            described = json.loads(find(self.objects, "ConfigMap", "hplm-cluster")["data"]["cluster.json"])
            (pool,) = described["pools"]
            described["state"], pool["repository"] = str(self.volume(pod, "state")), str(self._repository)
            for one in pool["replicas"]:  # names that are known here: HAProxy asks for each of them many times
                one |= {"http": f"localhost:{9000 + one['id']}", "grpc": f"localhost:{9100 + one['id']}"}
            (folder / "cluster.json").write_text(json.dumps(described), "utf-8")
        return folder

    def command(self, pod: str, name: str) -> tuple[list[str], dict[str, str]]:
        """Returns the container's command and variables, with the paths and addresses of this machine."""
        own = container(self.objects, pod, name)
        variables = {one["name"]: one.get("value", f"{pod}-0") for one in own.get("env", []) if "secretKeyRef" not in str(one)}
        here = [self._here(pod, own, word).replace("$(POD_NAME)", f"{pod}-0") for word in words(own)]
        return here, {**os.environ, **{name: self._here(pod, own, value) for name, value in variables.items()}}

    def _here(self, pod: str, own: Object, word: str) -> str:
        mounts = {mount["mountPath"]: str(self.volume(pod, mount["name"])) for mount in own["volumeMounts"]}
        any_mount = "|".join(sorted(map(re.escape, mounts), key=len, reverse=True))
        word = re.sub(rf"(?<![\w./])({any_mount})(?![\w-])", lambda found: mounts[found[0]], word)
        return word.replace("hplm-manager:", "127.0.0.1:").replace("8080", str(self.port))

    def run_hplm(self, pod: str, name: str) -> str:
        """Runs a container that ends by itself."""
        command, environment = self.command(pod, name)
        assert command[0] == "hplm"
        return run(HPLM[0], *HPLM[1:], *command[1:], env=environment)


@pytest.fixture
def pods(tmp_path_factory, toy):
    return Pods(tmp_path_factory.mktemp("p"), toy.repository)  # a socket's path must be short


@pytest.fixture
def source(pods):
    """The manager's nginx."""
    debian_program("nginx"), debian_program("envsubst")
    command, environment = pods.command("hplm-manager", "source")
    environment |= {"HPLM_USER": getpass.getuser(), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as server:
        try:
            eventually(lambda: server.poll() is not None or status(pods.port, "/") is not None)
            assert server.poll() is None, server.stderr and server.stderr.read()
            yield pods.port
        finally:
            server.terminate()


def status(port: int, path: str, token: str = "") -> int | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


def test_followers_get_the_truth_of_the_manager_and_the_router_starts_with_the_files_that_its_pod_writes(pods, source):
    """Takes more than five seconds, for the start of five commands of hplm."""
    manager = pods.volume("hplm-manager", "state")
    State(manager / "toy").begin()
    pods.run_hplm("hplm-all", "first-copy")  # a state without changes is enough
    repository = str(pods.volume("hplm-manager", "repository"))
    assert main(["tenant", "limit", "acme", "--rate", "50", "--repository", repository, "--state", str(manager)]) == 0
    assert status(source, "/toy/CURRENT", TOKEN) == 200 and status(source, "/toy/CURRENT") == 401
    assert status(source, "/toy/registry.sqlite", TOKEN) == 404
    for pod in ("hplm-all", "hplm-router"):
        pods.run_hplm(pod, "first-copy")
        assert (pods.volume(pod, "state") / "toy/CURRENT").exists()
    pods.run_hplm("hplm-router", "write")
    files = pods.volume("hplm-router", "router-files")
    assert (files / "homes.map").read_text("utf-8").startswith("acme ")
    command, environment = pods.command("hplm-router", "haproxy")
    run(debian_program(command[0]), "-c", *command[1:], env=environment)
