"""`hplm tenant publish`: a version, under a name, with its keys, in one change that is made once."""

import hashlib
from contextlib import nullcontext
from dataclasses import replace

import pytest

from hplm.errors import NoTenant
from hplm.tenants.authorize import admit
from testing.random_store import random_tenant
from tests.cli.commands import printed, refused, run
from tests.cli.conftest import ACME
from tests.support.message import mentions

pytestmark = pytest.mark.slow


def digest(secret):
    return hashlib.sha256(secret.encode()).hexdigest()


def test_a_version_is_published_with_its_keys_in_one_change_which_is_made_once(live, capsys, tmp_path):
    store, places = live
    random_tenant(live.store, replace(ACME, version=2), 0.3, seed=2)
    (keys := tmp_path / "keys").write_text(f"{digest('one')}\n\n{digest('two')}  -\n{digest('three')} 1\n{digest('one')}\n")
    command, candidate = ["tenant", "publish", "acme", *store, *places], ["--version", 2, "--as", "acme.v2", "--keys", keys]
    done = run(capsys, *command, "--version", 1, "--keys", keys)
    assert (done["before"], done["after"], done["generation"], len(done["keys"])) == (None, 1, 1, 3)
    (keys := tmp_path / "fewer").write_text(digest("one"))
    assert mentions(
        printed(capsys, *command, "--version", 1, "--keys", keys), "version 1", "nothing was changed", "generation 1"
    )
    candidate[-1] = keys
    for generation in (2, 2):  # the second time nothing is changed
        done = run(capsys, *command, *candidate)
        assert (done["tenant"], done["after"], done["generation"]) == ("acme.v2", 2, generation)
    (keys := tmp_path / "more").write_text(f"{digest('four')} {2**33}")
    assert mentions(printed(capsys, *command, "--keys", keys), "version 1 -> 2", "new keys", "generation 3")
    assert mentions(printed(capsys, *command[:2], *command[3:], "--keys", keys, status=3), "acme", "new keys", "generation 4")
    now, audit = live.manager.current(), live.manager.registry.audit()
    assert [audit[number].get("keys") == [key.id for key in now.find(name).keys[start:]] for number, name, start in (
        (1, "acme.v2", 0), (2, "acme", 3),
    )] == [True, True]  # fmt: skip
    assert [key.expires for key in now.find("acme").keys] == [0, 0, 1, 2**33]
    for secret, name, is_open in (
        ("one", "acme", True),
        ("three", "acme", False),
        ("one", "acme.v2", True),
        ("x", "acme", False),
    ):
        given = {"tenant": name, "authorization": f"Bearer {secret}"}
        with nullcontext() if is_open else pytest.raises(NoTenant):
            assert admit(now, given, 2.0**31).id == name
    assert live.manager.roll_back("acme").after == 1, "the version before is the one that was served first"


@pytest.mark.parametrize(
    ("options", "content", "named"),
    [
        (["--keys", "{}"], "", ["open to everybody"]),
        (["--keys", "{}"], digest("x") + "\nmy secret\n", ["sha256sum"]),
        (["--keys", "{}"], b"\xff\0", ["sha256sum"]),
        (["--version", 3], "", ["'acme'", 3, 1]),
        (["--as", "../x"], "", ["'../x'"]),
        (["--as", "tenant-1"], "", ["'tenant-1'", "labels"]),
    ],
)
def test_wrong_keys_versions_and_names_publish_nothing(live, capsys, tmp_path, options, content, named):
    (keys := tmp_path / "keys").write_bytes(content if isinstance(content, bytes) else content.encode())
    store, places = live
    words = [str(one).format(keys) for one in options]
    said = refused(capsys, "tenant", "publish", "acme", *store, *places, *words)
    assert mentions(said, *named) and "my secret" not in said and not live.manager.current().generation
    if "--keys" not in options:
        assert mentions(refused(capsys, "tenant", "publish", *store, *places, *words), options[0], "one tenant")
