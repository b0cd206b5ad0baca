"""`hplm tenant apply`: many tenants, their keys and limits in one change, shown first, and made once."""

import hashlib
import json
import stat
import time

import pytest

from hplm.registry.store import Away
from hplm.tenants.authorize import admit
from hplm.tenants.registry_writer import Registry
from tests.cli.commands import printed, refused, run
from tests.support.message import mentions

pytestmark = pytest.mark.slow

MINE = "my own secret"
DIGEST = hashlib.sha256(MINE.encode()).hexdigest()
LINES = [
    {"id": "acme", "keys": 2, "days": 7, "rate": 5},  # only in the store
    {"id": "tenant-0", "keys": [DIGEST], "tokens_rate": 700.5, "deadline_us": 20000},
    {"id": "tenant-1", "keys": 1, "in_flight": 3},
    {"id": "tenant-3"},  # as it is
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tenants.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)) + "\n\n")
    return path


def secrets_in(path):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = {}
    for line in map(json.loads, path.read_text().splitlines()):
        found.setdefault(line["tenant"], []).append(line["secret"])
    return found


def test_a_file_is_shown_first_then_made_in_one_change_and_changes_nothing_again(live, file, capsys, tmp_path):
    store, places = live
    run(capsys, "domain", "update", "--name", "bio", *store, *places)
    live.manager.limit("tenant-1", in_flight=3)
    before = live.manager.current()
    words = ["tenant", "apply", file, *store, *places, "--secrets", tmp_path / "secrets"]
    shown = printed(capsys, *words)
    assert mentions(shown, "acme", "2 more keys", "rate 5 (was 0)", "tenant-0", "tokens_rate 700.5", "--yes")
    assert "in_flight" not in shown, "a limit that is so already is shown"
    assert live.manager.current().generation == before.generation and not (tmp_path / "secrets").exists()
    assert set(run(capsys, *words)["tenants"]) >= {"acme", "tenant-0", "tenant-1"}

    done = run(capsys, *words, "--yes")
    after = live.manager.current()
    assert done["generation"] == after.generation == before.generation + 1
    acme, own, other = (after.find(name) for name in ("acme", "tenant-0", "tenant-1"))
    assert (len(acme.keys), acme.rate, acme.task) == (2, 5, "classify") and acme.keys[0].expires > time.time()
    assert (own.tokens_rate, own.deadline_us, other.in_flight, len(other.keys)) == (700.5, 20000, 3, 1)
    made = secrets_in(tmp_path / "secrets")
    assert {name: len(secrets) for name, secrets in made.items()} == {"acme": 2, "tenant-1": 1}
    for name, secret in [("tenant-0", MINE), *((name, one) for name, secrets in made.items() for one in secrets)]:
        assert admit(after, {"tenant": name, "authorization": f"Bearer {secret}"}, time.time()).id == name
    audit = live.manager.registry.audit()[-1]
    assert audit["action"] == "tenant apply" and set(audit["tenants"]) == set(done["tenants"])

    again = ["tenant", "apply", file, *store, *places, "--yes"]  # nothing to make, so no file for secrets
    assert run(capsys, *again)["tenants"] == [] and live.manager.current().generation == after.generation
    live.manager.limit("acme", rate=9)
    live.manager.add_key("acme")
    assert mentions(printed(capsys, *again), "acme", "rate 5 (was 9)")
    assert live.manager.current().find("acme").rate == 5 and len(live.manager.current().find("acme").keys) == 3


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", ["line 1"]),
        ('{"id": "tenant-0", "rates": 5}', ["line 1", "rates"]),
        ('{"id": "tenant-0", "rate": -1}', ["line 1", "rate"]),
        ('{"id": "tenant-0", "in_flight": 2.5}', ["line 1", "in_flight"]),
        ('{"id": "tenant-0", "keys": ["x"]}', ["line 1", "keys"]),
        ('{"id": "tenant-0", "keys": 1}', ["--secrets"]),
        ('{"id": "tenant-0", "days": -1}', ["line 1", "days"]),
        ('{"id": "tenant-0"}\n{"id": "tenant-0"}', ["line 2", "tenant-0"]),
        ('{"id": "nobody", "rate": 5}', ["nobody", "--store"]),
        ("", ["no tenants"]),
    ],
)
def test_a_wrong_line_is_named_and_nothing_is_changed(live, capsys, tmp_path, line, named):
    (file := tmp_path / "tenants.jsonl").write_text(line)
    before = live.manager.current().generation
    (_, places) = live
    assert mentions(refused(capsys, "tenant", "apply", file, *places, "--yes"), *named)
    assert live.manager.current().generation == before


def test_secrets_are_written_before_the_change_into_a_new_file_or_nothing_is_changed(live, file, capsys, tmp_path, monkeypatch):
    (store, places), kept = live, tmp_path / "secrets"
    run(capsys, "domain", "update", "--name", "bio", *store, *places)
    kept.write_text("of others")
    words = ["tenant", "apply", file, *store, *places, "--yes", "--secrets"]
    before = live.manager.current().generation
    assert mentions(refused(capsys, *words, kept), kept, "--secrets")
    assert kept.read_text() == "of others" and live.manager.current().generation == before

    def cut_off(registry, *_):
        assert secrets_in(tmp_path / "new")
        raise Away("the bucket is away")

    monkeypatch.setattr(Registry, "_publish", cut_off)
    assert mentions(refused(capsys, *words, tmp_path / "new"), tmp_path / "new", "hplm tenant key list")
