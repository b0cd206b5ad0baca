"""Each command that needs no server, one after the other: what it says, and which packages it needs."""

import json
import os
import shutil
import tempfile
import time
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from builder.store.store import TenantVersion
from hplm.placement.cluster import Cluster, Device, Machine
from hplm.registry.folder import Folder
from hplm.registry.pointer import begin
from hplm.tenants.backup import LOST
from testing.random_store import random_tenant
from testing.toy import CONFIG, make_chat
from tests.backbones import placement_of_two, whole
from tests.cli.commands import Live, leaves, printed, process_without, refused
from tests.cli.conftest import TENANTS
from tests.deploy.image import NOT_IN_THE_IMAGE
from tests.placement.problems import write_cluster
from tests.support.message import mentions

pytestmark = pytest.mark.slow

CORE = f"cpu:{min(os.sched_getaffinity(0))}"
PACKAGES = ("builder", "bench", "research", "testing", "demo", "loadtest")  # the image has the folder of the first one
NEED_A_SERVER = {
    "serve", "watch", "drain", "infer", "generate",
    "doctor",  # which looks at the whole machine
}  # fmt: skip
TUNED = [tenant.id for tenant in TENANTS[:3]]
ACME = {"id": "acme", "backbone": "toy", "domain": "root", "version": 2, "task": "classify", "labels": ["x", "y"]}
LIMITS = "--rate 5 --texts-rate 60 --tokens-rate 7000 --in-flight 2 --homes 3 --deadline-ms 50"
CHANGED = {"rate": 5, "burst": 0, "texts_rate": 60, "tokens_rate": 7000, "in_flight": 2, "homes": 3, "deadline_us": 50000}
ACTIONS = [
    *("tenant add", "tenant update", "tenant update", "domain update", "domain update", "domain add"),
    *("tenant key add", "tenant key add", "tenant rollback", "tenant key add", "tenant key add", "tenant key revoke"),
    *("tenant apply", "tenant limit", "domain rollback", "domain delete", "tenant delete"),
]


def counts(rows):
    return {(row["domain"], row["version"]): row["tenants"] for row in rows}


# The answers of commands, in this order. Each is fields of the JSON, a condition on them, or words in the lines.
FROM_THE_STORE = [
    ("tenant add acme {store} {places}", {"generation": 1, "tenant": "acme", "before": None, "after": 1, "late": []}),
    ("tenant update tenant-3 {store} {places}", {"generation": 2, "before": 1, "after": 2}),
    ("tenant update acme {store} {places}", {"generation": 3, "before": 1, "after": 2}),
    ("tenant publish acme {store} {places}", {"generation": 3, "before": 2, "after": 2}),
    ("domain update --name bio --canary 0.4 {store} {places}", {
        "moved": lambda moved: len(moved) == 1, "waiting": lambda waiting: len(waiting) == 2, "behind": ["tenant-3"],
    }),
    ("domain list {places}", {"domains": lambda rows: counts(rows) == {("root", 1): 1, ("bio", 1): 3, ("bio", 2): 1}}),
    ("domain update --name bio {store} {places} ", [["moved"], ["behind", "tenant-3"]]),
    ("domain add --name law {store} {places}", {"generation": 6}),
    ("place emit --placement {folder}/all.json {exported} --to {folder}/groups", [["{folder}/groups/both"], ["4 tenants"]]),
]  # fmt: skip
WITHOUT_THE_BUILDER = [
    ("tenant list {places}", {
        "tenants": lambda rows: any(row.items() >= {**ACME, "homes": 1, "open": True}.items() for row in rows),
    }),
    ("tenant list {exported}", {"tenants": lambda rows: {row["id"] for row in rows} == {tenant.id for tenant in TENANTS}}),
    ("domain list {exported}", {"domains": lambda rows: counts(rows) == {("root", 1): 0, ("bio", 1): 4}}),
    ("tenant show acme {places}", ACME),
    ("tenant rollback acme {places}", {"before": 2, "after": 1}),
    ("tenant key add tenant-0 --days 1 {places}", {"secret": lambda one: "hplm_" in one, "expires": lambda at: at > 0}),
    ("tenant key add tenant-0 {places}", {"expires": 0}),
    ("tenant key list tenant-0 {places}", [["expires", time.strftime("%z")], ["does not expire"]]),
    ("tenant key list tenant-2 {places}", {"keys": lambda rows: len(rows) == 2 and all(row["expires"] == 0 for row in rows)}),
    ("tenant key revoke tenant-2 --key {key} {places}", {"revoked": "{key}"}),
    ("tenant apply {folder}/tenants.jsonl --yes {places}", {"tenants": ["tenant-1"]}),
    (f"tenant limit tenant-0 {LIMITS} {{places}}", {"rate": 5}),
    ("tenant show tenant-0 {places}", CHANGED),
    ("tenant list {places} ", [["tenant-0", "3", "with keys"]]),
    ("tenant limit luna --deadline-ms 0.5 {chat}", {"deadline_us": 500}),
    ("domain rollback --name bio {places}", {"moved": lambda moved: sorted(moved) == TUNED}),
    ("domain delete --name law {places}", {"late": []}),
    ("tenant delete acme {places}", {"after": None}),
    ("tenant compact {places}", {"bytes": 0}),  # requests in flight may need them for a minute
    ("tenant log {places}", {"changes": lambda changes: [change["action"] for change in changes] == ACTIONS}),
    ("verify {places}", {"tables": 4}),  # with that of law, as above
    ("backup --to {folder}/saved {places}", {"generation": len(ACTIONS)}),
    ("restore --from {folder}/saved --accept-old-keys {again}", {"backed_up": len(ACTIONS), "generation": len(ACTIONS) + LOST}),
    ("verify {again}", {"tables": 3}),
    ("place profile {places} --devices {core} --to {folder}/profile.json", {
        "backbones": lambda found: found["toy"]["tenants"] == 4 and found["toy"]["ms"]["1"]["16"] > 0,
    }),
    ("place search {problem} --slo-scale 100 --to {folder}/placement.json", {"screen": lambda one: one["attained"] == 1}),
    ("place simulate {folder}/placement.json {problem} --slo-scale 100", {"attained": 1}),
    ("begin {fresh}", {"begun": ["toy"]}),
    ("route --cluster {folder}/replicas.json --to {router}", []),
]  # fmt: skip
ROWS = FROM_THE_STORE + WITHOUT_THE_BUILDER
LIVE = "--store x --repository x --state x"
NEED_THE_BUILDER = [
    *("build root --model x --corpus x --store x", "build domain --name x --corpus x --store x"),
    *(
        "build counts --corpus x --to x --store x",
        "build tenants x --store x",
        "build tenant --id x --task tag --train x --store x",
        "check --train x",
        "import --id x --from x --store x",
        "export --store x",
    ),
    *("evaluate --id x --test x --store x", "calibrate --id x --texts x --store x", "tenant exits x --texts x --store x"),
    "tenant students x --layers 1 --store x",
    *("tenant export x --store x --to x", "place emit --placement x --repository x --to x"),
    "domain inspect --name x --store x",
    *(f"tenant {action} x {LIVE}" for action in ("add", "update", "publish")),
    *(f"domain {action} --name x {LIVE}" for action in ("add", "update")),
    *(f"root {action} x --store x" for action in ("pack", "unpack")),
    *("domain list --store x", "domain delete --name x --store x", "verify --store x", "tenant delete x --store x"),
]
NEED_THE_BENCHMARKS = ["bench", "bench --help", "bench serve --size minilm --json"]


@pytest.fixture(scope="module")
def places(made, tmp_path_factory):
    """Returns the values of the words in braces. tenant-3 has a second version in the store, on the exported table."""
    folder = shutil.copytree(made, tmp_path_factory.mktemp("commands") / "live")
    live = Live(folder)
    random_tenant(live.store, replace(TENANTS[3], version=2), 0.1, seed=5)
    chat = make_chat(folder / "chat", [TenantVersion("luna", 1, "root", 1, "generate", [], 0)])
    begin(Folder(folder / "chat/state/chat"))
    placement_of_two(folder / "repository", (CORE,), whole(CONFIG)).write(folder / "all.json")
    write_cluster(Cluster((Machine("m", (Device(CORE, 10**10),), 10**10),)), folder / "c.json")
    requests = [{"arrival": i, "tokens": 8, "tenant": "tenant-0"} for i in range(20)]
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, requests)))
    replica = {"id": 1, "name": "one", "http": "127.0.0.1:8000", "grpc": "127.0.0.1:8001"}
    described = {"kind": "hplm replicas", "format": 1, "repository": "repository", "replicas": [replica]}
    (folder / "replicas.json").write_text(json.dumps(described))
    (folder / "tenants.jsonl").write_text(json.dumps({"id": "tenant-1", "rate": 7}))
    exported = f"--repository {folder}/repository"
    with tempfile.TemporaryDirectory(prefix="hplm-") as router:  # short: the name of a socket has at most 93 bytes
        yield {
            **{"folder": folder, "router": router, "core": CORE, "exported": exported, "store": f"--store {folder}/store"},
            **{name: f"{exported} --state {folder}/{state}" for name, state in (
                ("places", "state"), ("again", "again"), ("fresh", "fresh"),
            )},
            "chat": f"--repository {chat.repository} --state {folder}/chat/state",
            "problem": f"--cluster {folder}/c.json --profiles {folder}/profile.json --trace {folder}/t.jsonl",
        }  # fmt: skip


@pytest.fixture(scope="module")
def done(places):
    """Exit code, output and errors of each command, in a process without the packages that the image lacks."""
    live = Live(places["folder"])

    def words(command, says=()):
        return [*command.format(**places).split(), *(["--json"] if isinstance(says, dict) else [])]

    with process_without(*PACKAGES[1:], *NOT_IN_THE_IMAGE) as run:
        first = [run(words(*row)) for row in FROM_THE_STORE]
    keys = [live.manager.add_key("tenant-2")[1].id for _ in range(2)]
    places["key"] = keys[0]
    named = [*NEED_THE_BUILDER, *NEED_THE_BENCHMARKS]
    with process_without(*PACKAGES) as run:
        alone = [*(run(words(*row)) for row in WITHOUT_THE_BUILDER), *(run(words(one)) for one in named)]
    return dict(zip([*(command for command, _ in ROWS), *named], first + alone, strict=True))


@pytest.mark.parametrize(("command", "says"), ROWS, ids=lambda one: one if isinstance(one, str) else "")
def test_a_command_works_without_the_packages_that_it_does_not_need(places, done, command, says):
    """The first one takes seconds: all of them run."""
    code, out, err = done[command]
    assert code == 0, f"{command} ended with {code}: {err}"
    if isinstance(says, list):
        for named in says:
            named = [one.format(**places) for one in named]
            assert any(mentions(line, *named) for line in out.splitlines()), f"{command} names no {named}: {out}"
        return
    answer = json.loads(out.splitlines()[-1])
    for name, expected in says.items():
        expected = expected.format(**places) if isinstance(expected, str) else expected
        holds = expected(answer[name]) if callable(expected) else answer[name] == expected
        assert holds, f"{command} says that {name} is {answer[name]!r:.300}, where {expected} is expected"


def test_secrets_are_shown_once_and_what_is_kept_is_not_written(places, done):
    secrets = {json.loads(out)["secret"] for command, (_, out, _) in done.items() if command.startswith("tenant key add")}
    showing = [command for command, (_, out, _) in done.items() if any(secret in out for secret in secrets)]
    assert len(secrets) == 2 and {command.partition(" tenant-0")[0] for command in showing} == {"tenant key add"}
    assert (Path(places["router"]) / "haproxy.cfg").exists()
    assert list((places["folder"] / "groups").glob("*/toy/1/tenants.json")), "no group was written"


@pytest.mark.parametrize("command", [*NEED_THE_BUILDER, *NEED_THE_BENCHMARKS])
def test_a_command_that_needs_another_package_says_how_to_install_it(done, command):
    package, extra = ("bench", "bench") if command in NEED_THE_BENCHMARKS else ("builder", "build")
    code, out, err = done[command]
    assert (code, out, err.count("\n")) == (1, "", 1), f"{command} ended with {code}: {out}{err}"
    named = f"hplm {command.split()[0]}: ", f"`{package}`", "not installed", f"pip install -e '.[{extra}]'"
    assert all(one in err for one in named), err


READ = ("tenant list", "tenant show", "tenant key list", "domain list", "verify", "place profile")
OF_A_STATE = dict.fromkeys(command.strip() for command, _ in ROWS if "{places}" in command)


@pytest.mark.parametrize("command", OF_A_STATE)
def test_a_command_needs_a_begun_state(places, tmp_path, capsys, command):
    """A mistyped path must not count as a state without changes, nor begin one."""
    none, words = tmp_path / "none", {**places, "key": "x", "folder": tmp_path}
    said = refused(capsys, *command.format(**{**words, "places": f"{places['exported']} --state {none}"}).split())
    assert (mentions(said, none) or mentions(said, none / "toy")) and not list(tmp_path.iterdir()), said
    if not command.startswith(READ):
        said = refused(capsys, *command.format(**{**words, "places": places["exported"]}).split())
        assert mentions(said, "--state"), said


def test_each_command_is_tested_here_or_needs_a_server():
    others = {point.name for point in entry_points(group="hplm.commands")}
    known = {" ".join(leaf) for leaf in leaves() if leaf[0] not in others} - NEED_A_SERVER
    run_here = [command for command, _ in WITHOUT_THE_BUILDER] + NEED_THE_BUILDER
    assert [name for name in known if not any(f"{one} ".startswith(f"{name} ") for one in run_here)] == []


def test_changes_wait_for_the_servers_and_name_those_that_are_late(live, capsys, monkeypatch):
    """A secret is printed before, because nobody can read it later; that a key is revoked is said after."""
    store, places = live
    said_before = []

    def wait(_, generation):
        said_before.append((generation, capsys.readouterr().out))
        return ["elsewhere-1-abc"]

    kept, _ = (live.manager.add_key("tenant-0")[1].id for _ in range(2))
    monkeypatch.setattr("hplm.tenants.state_folder.StateFolder.wait_for_readers", wait)
    for number, (command, early) in enumerate((
        (["tenant", "key", "add", "tenant-0"], "hplm_"), (["tenant", "key", "revoke", "tenant-0", "--key", kept], ""),
        (["tenant", "limit", "tenant-0", "--rate", 1], ""), (["tenant", "add", "acme", *store], ""),
        (["domain", "update", "--name", "bio", *store], ""), (["domain", "rollback", "--name", "bio"], ""),
        (["domain", "add", "--name", "law", *store], ""),
    )):  # fmt: skip
        said = printed(capsys, *command, *places)
        (generation, before), *_ = said_before
        said_before.clear()
        assert mentions(said, "elsewhere-1-abc") and generation == number + 3, f"{command}: {generation} {said}"
        assert early in before and (early or not before), f"{command} said {before!r} before it waited"
