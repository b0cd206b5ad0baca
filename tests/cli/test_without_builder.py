"""With only `hplm` and `backends` installed, as in the container image, every command works that needs no store."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from builder.publish.live import add_domain, add_tenant, update_domain, update_tenant
from builder.store.store import Store
from hplm.cli.main import parser
from hplm.cli.place_renew import KEPT
from hplm.placement.cluster import Cluster, Device, Machine
from hplm.tenants.manager import Manager
from hplm.tenants.quarantine import Quarantine
from testing.random_store import random_table, random_tenant
from tests.cli.conftest import ACME
from tests.placement.profiles import write_cluster

pytestmark = pytest.mark.slow

PACKAGES = ("builder", "bench", "research", "testing", "demo", "loadtest")
NEED_A_STORE = {
    "build root": ["--model", "x", "--corpus", "x", "--store", "x"],
    "build domain": ["--name", "x", "--corpus", "x", "--store", "x"],
    "build tenant": ["--id", "x", "--task", "tag", "--train", "x", "--store", "x"],
    "import": ["--id", "x", "--from", "x", "--store", "x"],
    "export": ["--store", "x"],
    "evaluate": ["--id", "x", "--test", "x", "--store", "x"],
    "calibrate": ["--id", "x", "--texts", "x", "--store", "x"],
    "tenant exits": ["x", "--texts", "x", "--store", "x"],
    "place emit": ["--placement", "x", "--repository", "x", "--to", "x"],
    "tenant add": ["x", "--store", "x", "--repository", "x", "--state", "x"],
    "tenant update": ["x", "--store", "x", "--repository", "x", "--state", "x"],
    "tenant publish": ["x", "--store", "x", "--repository", "x", "--state", "x"],
    "domain add": ["--name", "x", "--store", "x", "--repository", "x", "--state", "x"],
    "domain update": ["--name", "x", "--store", "x", "--repository", "x", "--state", "x"],
    "domain inspect": ["--name", "x", "--store", "x"],
    "root pack": ["x", "--store", "x"],
    "root unpack": ["x", "--store", "x"],
}
NEED_A_SERVER = {
    "serve", "watch", "drain", "cluster up", "cluster roll", "cluster status", "infer", "generate",
    "doctor",  # which looks at the whole machine
}  # fmt: skip
NEED_A_REPOSITORY = {
    "tenant list", "tenant show", "tenant rollback", "tenant delete", "tenant limit", "tenant compact", "tenant log",
    "tenant release", "tenant key add", "tenant key list", "tenant key revoke", "domain list", "domain rollback",
    "domain delete",
    "verify", "begin", "backup", "restore", "route", "place profile", "place search", "place simulate", "place compare",
    "place renew",
}  # fmt: skip

# Reads commands as JSON, runs one after the other, and writes exit code, output and errors of each.
RUN = f"""
import contextlib, io, json, sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {PACKAGES}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from hplm.cli.main import main
done = []
for command in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(command)
        except SystemExit as ended:
            code = ended.code
    done.append([command, code, out.getvalue(), err.getvalue()])
json.dump(done, sys.stdout)
"""


def run(commands, missing=PACKAGES):
    """Runs commands, and returns (command, exit code, output, errors) of each."""
    command = [sys.executable, "-c", RUN.replace(repr(PACKAGES), repr(missing))]
    folder = Path(__file__).parents[2]
    done = subprocess.run(command, input=json.dumps(commands), capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def place(live):
    """The folder, and the keys of a tenant: acme and bio have two versions, and law has no tenants."""
    manager = live.manager
    add_tenant(manager, live.store, "acme")
    random_tenant(live.store, replace(ACME, version=2), 0.3, seed=2)
    update_tenant(manager, live.store, "acme")
    update_domain(manager, live.store, "bio")
    add_domain(manager, live.store, "law")
    return live.folder, [manager.add_key("tenant-2")[1].id for _ in range(2)]


@pytest.fixture
def router():
    """A short path: the name of a socket has at most 93 bytes."""
    with tempfile.TemporaryDirectory(prefix="hplm-") as folder:
        yield Path(folder)


def test_every_command_that_needs_no_store_works(place, router):
    (folder, keys), core = place, min(os.sched_getaffinity(0))
    state = ["--repository", str(folder / "repository"), "--state", str(folder / "state")]
    again = [*state[:3], str(folder / "again")]
    profile_file, placement_file = str(folder / "profile.json"), str(folder / "placement.json")
    problem = ["--cluster", str(folder / "c.json"), "--profiles", profile_file, "--trace", str(folder / "t.jsonl")]
    write_cluster(Cluster((Machine("m", (Device(f"cpu:{core}", 10**10),), 10**10),)), folder / "c.json")
    Quarantine(folder / "repository/toy").put("tenant-2")
    requests = [{"arrival": i, "tokens": 8, "tenant": "tenant-0"} for i in range(20)]
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, requests)))
    renewal = ["--slo-scale", "100", "--test-seconds", "5", "--to", str(folder / "next.json")]
    replica = {"id": 1, "name": "one", "http": "127.0.0.1:8000", "grpc": "127.0.0.1:8001"}
    pool = {"name": "all", "repository": str(folder / "repository"), "state": str(folder / "state"), "replicas": [replica]}
    (folder / "pools.json").write_text(json.dumps({"kind": "hplm replicas", "format": 1, "pools": [pool]}))
    commands = [
        ["tenant", "list", *state],
        ["tenant", "show", "acme", *state],
        ["tenant", "rollback", "acme", *state],
        ["tenant", "limit", "acme", "--rate", "5", *state],
        ["tenant", "key", "add", "acme", "--days", "1", *state],
        ["tenant", "key", "list", "tenant-2", *state],
        ["tenant", "key", "revoke", "tenant-2", "--key", keys[0], *state],
        ["domain", "list", *state],
        ["domain", "rollback", "--name", "bio", *state],
        ["domain", "delete", "--name", "law", *state],
        ["tenant", "delete", "acme", *state],
        ["tenant", "compact", *state],
        ["tenant", "log", *state],
        ["verify", *state],
        ["backup", "--to", str(folder / "saved"), *state],
        ["restore", "--from", str(folder / "saved"), *again],
        ["verify", *again],
        ["place", "profile", *state, "--devices", f"cpu:{core}", "--rounds", "1", "--to", profile_file],
        ["place", "search", *problem, "--slo-scale", "100", "--to", placement_file],
        ["place", "simulate", placement_file, *problem, "--slo-scale", "100"],
        ["place", "compare", placement_file, *problem],
        ["place", "renew", placement_file, *problem, *renewal],
        ["begin", *state[:3], str(folder / "fresh")],
        ["tenant", "release", "tenant-2", *state],
    ]
    route = ["route", "--cluster", str(folder / "pools.json"), "--to", str(router), "--unchecked"]
    run_here = [" ".join(one) for one in (*commands, route)]
    assert not [name for name in NEED_A_REPOSITORY if not any(one.startswith(name) for one in run_here)]
    answers = {}
    for command, code, out, err in run([*([*command, "--json"] for command in commands), route]):
        assert code == (KEPT if command[:2] == ["place", "renew"] else 0), (command, err)  # the only placement stays
        if command != route:
            answers[" ".join(command[:2])] = json.loads(out.splitlines()[-1])
    assert (router / "haproxy.cfg").exists() and not (folder / "next.json").exists()
    assert answers["tenant key"]["revoked"] == keys[0]
    assert answers["tenant log"]["changes"][-1]["action"] == "tenant delete"
    assert answers["place search"]["screen"]["attained"] == answers["place simulate"]["screen"]["attained"] == 1
    manager = Manager.open(folder / "repository", folder / "again")
    assert {tenant.id for tenant in manager.current().tenants} == {f"tenant-{number}" for number in range(4)}


def test_changes_from_a_store_need_no_more_than_the_folder_of_the_builder(place):
    """The image has it, without the packages of the extra `build`."""
    folder, _ = place
    store = Store(folder / "store")
    random_tenant(store, replace(ACME, id="late"), 0.3, seed=5)
    random_tenant(store, replace(ACME, version=3), 0.3, seed=6)
    random_table(store, "med", 1, ("root", 1), 500, seed=7)
    random_table(store, "law", 2, ("root", 1), 500, seed=8)
    places = [f"--{name}={folder / name}" for name in ("store", "repository", "state")]
    missing = (*PACKAGES[1:], "transformers", "matplotlib", "scipy", "seqeval", "zstandard")
    commands = [["tenant", "add", "late"], ["tenant", "update", "acme"], ["tenant", "publish", "late"]]
    commands += [["domain", "add", "--name=med"], ["domain", "update", "--name=law"]]
    for command, code, _, err in run([[*command, *places] for command in commands], missing):
        assert code == 0, (command, err)


def leaves(parser, name=()):
    """Returns all commands of a parser, as words."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        return [name]
    return [leaf for word, below in groups[0].choices.items() for leaf in leaves(below, (*name, word))]


def test_commands_that_need_the_builder_say_how_to_install_it(tmp_path):
    others = {point.name for point in entry_points(group="hplm.commands")}
    known = {" ".join(leaf) for leaf in leaves(parser()) if leaf[0] not in others}
    assert known == NEED_A_REPOSITORY | NEED_A_SERVER | NEED_A_STORE.keys(), "each command is tested here or needs a server"
    commands = [[*name.split(), *arguments] for name, arguments in NEED_A_STORE.items()]
    commands += [["domain", "list", "--store", "x"], ["domain", "delete", "--name", "x", "--store", "x"]]
    commands += [["verify", "--store", "x"], ["tenant", "delete", "x", "--store", "x"]]
    folder = tmp_path / "dedicated" / "1"
    folder.mkdir(parents=True)
    for name in ("backbone.json", "whole.json"):
        (folder / name).write_text("{}")
    for command, code, out, err in run([*commands, ["verify", "--repository", str(tmp_path)]]):
        assert (code, out) == (1, "") and err.count("\n") == 1, command
        if command in commands:
            assert err.startswith(f"hplm {command[0]}: ") and "`builder`" in err and "pip install -e '.[build]'" in err, command
        else:
            assert str(folder.parent) in err and "export it again" in err  # whole models have no checksums
