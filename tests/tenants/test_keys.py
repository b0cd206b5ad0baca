"""Keys and the secret of a server: which are accepted, and that an unknown tenant and a wrong key look alike."""

import hashlib
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from hplm.errors import Draining, InvalidInput, NoTenant
from hplm.tenants.apply import planned, read_lines
from hplm.tenants.authorize import UNSEEN, admit, check_header, listed
from hplm.tenants.keys import allows, by_digest, digest_in, key_of, new_key, presented_key
from hplm.tenants.secret import SharedSecret
from hplm.tenants.snapshot import Snapshot
from tests.support.message import refusing

NOW = 1_000_000.0


def test_a_secret_is_long_random_recognisable_and_not_stored():
    made = [new_key() for _ in range(100)]
    assert len({secret for secret, _ in made}) == len({key.id for _, key in made}) == 100
    for secret, key in made:
        assert secret.startswith("hplm_") and len(secret) - len("hplm_") >= 128 / 6
        assert key.digest == hashlib.sha256(secret.encode()).hexdigest() and key.expires == 0
        assert secret.removeprefix("hplm_")[:8] not in repr(key)


def test_only_the_secret_as_a_bearer_opens():
    (secret, key), (other, _) = new_key(), new_key()
    for scheme in ("Bearer", "bearer", "BEARER", "  Bearer "):
        assert allows(by_digest([key]), f"{scheme} {secret}", NOW), scheme
    for header in (None, "", secret, f"Basic {secret}", f"Bearer {other}", f"Bearer {secret}x", f"Bearer {secret[:-1]}",
                   f"Bearer {secret.upper()}", "Bearer", "Bearer ", f"Bearer {key.digest}", f"Bearer {key.id}",
                   "Bearer \ud800", "Bearer é"):  # fmt: skip
        assert not allows(by_digest([key]), header, NOW), header
    given = by_digest([key_of("a secret of the operator\n")])
    assert allows(given, "Bearer a secret of the operator", NOW), "a newline at its end"


def test_each_of_several_keys_is_accepted_until_it_expires():
    made = [new_key(), new_key(expires=int(NOW)), new_key(expires=int(NOW) + 1)]
    keys = by_digest([key for _, key in made])
    assert [allows(keys, f"Bearer {secret}", NOW) for secret, _ in made] == [True, False, True]
    assert [allows(keys, f"Bearer {secret}", NOW + 1) for secret, _ in made] == [True, False, False]
    assert not allows(by_digest([made[1][1]]), None, NOW), "a tenant with only expired keys is open"
    assert allows({}, None, NOW) and allows({}, "Bearer whatever", NOW)


class OnlyLookedUp(dict[str, float]):
    def __iter__(self):
        raise AssertionError("all keys were looked at")

    keys = values = items = __iter__


def test_one_of_many_keys_is_found_by_one_look_up():
    made = [new_key() for _ in range(1000)]
    keys = OnlyLookedUp(by_digest([key for _, key in made]))
    assert allows(keys, f"Bearer {made[-1][0]}", NOW) and not allows(keys, f"Bearer {new_key()[0]}", NOW)


def test_a_secret_with_two_keys_is_valid_until_the_later_one_expires():
    secret, key = new_key(expires=int(NOW) + 1)
    for other in (0, int(NOW) + 9):
        keys = by_digest([key, replace(key, expires=other), key])
        assert allows(keys, f"Bearer {secret}", NOW + 8) and allows(keys, f"Bearer {secret}", NOW + 10) == (not other)


def test_the_header_is_found_in_any_case_and_two_different_ones_are_ignored():
    assert presented_key({"tenant": "acme", "AuthoriZation": "Bearer a"}) == "Bearer a"
    assert presented_key({"Authorization": "Bearer a", "authorization": "Bearer a"}) == "Bearer a"
    assert presented_key({"Authorization": "Bearer a", "authorization": "Bearer b"}) is None
    assert presented_key({"authorization": 7}) is None
    assert presented_key({"x-authorization": "Bearer a"}) is None


@pytest.fixture
def snapshot(toy):
    return Snapshot.load(toy.folder / "tenants.json")


def _with(snapshot, tenant_id, **changes):
    tenants = [replace(t, **changes) if t.id == tenant_id else t for t in snapshot.tenants]
    return Snapshot(snapshot.generation, snapshot.branches, tenants, snapshot.export)


@pytest.mark.parametrize("parameters", [
    {"tenant": "beta"}, {"hplm-tenant": "beta"}, {"Hplm-Tenant": "beta", "hplm-tenant": "beta"},
    {"tenant": "beta", "HPLM-TENANT": "beta"},
])  # fmt: skip
def test_a_parameter_or_a_header_names_the_tenant_or_both_do(snapshot, parameters):
    assert admit(snapshot, parameters, NOW).id == "beta"


@pytest.mark.parametrize("parameters", [
    {"tenant": "beta", "hplm-tenant": "acme"}, {"tenant": "beta", "hplm-tenant": "beta", "HPLM-TENANT": "acme"},
    {"tenant": "nobody", "hplm-tenant": ""}, {"hplm-tenant": "beta", "Hplm-Tenant": "acme"},
])  # fmt: skip
def test_names_that_differ_are_refused(snapshot, parameters):
    with refusing(InvalidInput, "hplm-tenant"):
        admit(snapshot, parameters, NOW)


def test_a_key_that_has_expired_is_none_of_those_that_a_file_asks_for(snapshot, tmp_path):
    file, keys = tmp_path / "tenants.jsonl", (new_key(1)[1], new_key(2**40)[1])
    file.write_text('{"id": "acme", "keys": 2}')
    served = {tenant.id: tenant for tenant in _with(snapshot, "acme", keys=keys).tenants}
    (step,) = planned(served, read_lines(file), {})
    assert step.new_keys == 1


def test_a_parameter_of_the_headers_name_must_agree_with_it():
    check_header('{"hplm-tenant": "beta", "tenant": "hplm-tenant", "hplm-tenant": "beta"}')
    with refusing(InvalidInput, "hplm-tenant"):
        check_header('{"hplm-tenant": "-", "top_k": NaN, "hplm-tenant": "beta"}')


def test_a_tenant_that_the_router_has_not_seen_is_refused(snapshot):
    _, key = new_key()
    snapshot = _with(snapshot, "acme", keys=(key,))
    with refusing(InvalidInput, "hplm-tenant"):
        admit(snapshot, {"tenant": "beta", "hplm-tenant": UNSEEN}, NOW)
    for name in ({}, {"tenant": "nobody"}, {"tenant": "acme"}):  # nobody learns that acme exists
        with pytest.raises(NoTenant):
            admit(snapshot, {**name, "hplm-tenant": UNSEEN}, NOW)


def test_an_unknown_tenant_and_a_wrong_key_get_the_same_refusal(snapshot):
    secret, key = new_key()
    snapshot = _with(snapshot, "acme", keys=(key,))
    assert admit(snapshot, {"tenant": "acme", "authorization": f"Bearer {secret}"}, NOW).id == "acme"
    assert admit(snapshot, {"tenant": "beta"}, NOW).id == "beta"
    said, compared = set(), []
    for parameters in ({}, {"tenant": "nobody"}, {"tenant": "acme"}, {"tenant": "BETA"},
                       {"tenant": "acme", "authorization": "Bearer wrong"},
                       {"tenant": "nobody", "authorization": f"Bearer {secret}"}):  # fmt: skip
        with pytest.raises(NoTenant) as caught, mock.patch("hplm.tenants.keys.digest_in", wraps=digest_in) as digest:
            admit(snapshot, parameters, NOW)
        said.add(caught.value.wire())
        compared.append(digest.call_count)
    assert len(said) == 1 and said.pop().startswith("[no_tenant]")
    assert compared == [1] * 6, "an unknown tenant costs the same check as a wrong key"
    for wrong in (7, True, 1.5):
        with refusing(InvalidInput, "tenant", wrong):
            admit(snapshot, {"tenant": wrong, "authorization": f"Bearer {secret}"}, NOW)


def test_a_key_lists_its_tenants_and_those_without_keys(snapshot):
    (secret, key), (other, another) = new_key(), new_key(expires=int(NOW))
    first, second, third, *rest = sorted(tenant.id for tenant in snapshot.tenants)
    for id, keys in ((first, (key,)), (second, (another, key)), (third, (another,))):
        snapshot = _with(snapshot, id, keys=keys)

    def names(header, now=NOW, **more):
        found = json.loads(listed(snapshot, {"Authorization": header, **more}, now))
        assert all(one.keys() == {"tenant", "task"} and one["task"] == snapshot.find(one["tenant"]).task for one in found)
        return [one["tenant"] for one in found]

    for header, opens in (
        (None, []), (f"Bearer {secret}", [first, second]), (f"Bearer {other}", []), (f"Basic {secret}", []), (secret, []),
    ):  # fmt: skip
        assert names(header) == [*rest, *opens]
    assert names(f"Bearer {other}", NOW - 1) == [*rest, second, third]
    assert names(None, **{"hplm-tenant": UNSEEN}) == rest
    with pytest.raises(Draining):
        listed(snapshot, {"authorization": f"Bearer {secret}"}, NOW, is_stale=True)
    assert json.loads(listed(snapshot, {}, NOW, is_stale=True))
    for id in rest:
        snapshot = _with(snapshot, id, keys=(another,))
    assert names(None) == []


def test_a_named_tenant_is_listed_alone_with_its_labels_if_the_key_opens_it(snapshot):
    secret, key = new_key()
    snapshot = _with(snapshot, "acme", keys=(key,))
    for id, header in (("acme", f"Bearer {secret}"), ("beta", "")):
        tenant = snapshot.find(id)
        found = json.loads(listed(snapshot, {"tenant": id, "authorization": header}, NOW))
        assert found == [{"tenant": id, "task": tenant.task, "labels": list(tenant.labels)}] and tenant.labels
    for id in ("acme", "nobody"):
        with pytest.raises(NoTenant):
            listed(snapshot, {"hplm-tenant": id}, NOW)


def test_models_of_one_server_share_a_secret_that_other_users_cannot_read(tmp_path):
    first = SharedSecret("toy", os.getpid(), tmp_path)
    assert SharedSecret("toy", os.getpid(), tmp_path).value == first.value
    assert len(first.value) == 32 and first.path.stat().st_mode & 0o777 == 0o600
    assert SharedSecret("other", os.getpid(), tmp_path).value != first.value
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(f".{os.getpid()}")] == []


def test_secrets_of_ended_servers_are_removed_but_not_those_of_other_process_namespaces(tmp_path):
    """The name of a secret has the number of its namespace."""
    with subprocess.Popen(["sleep", "60"]) as process:
        ended, other = (SharedSecret(model, process.pid, tmp_path).path for model in ("toy", "other"))
        process.kill()
    theirs = other.rename(other.with_name(other.name.replace(str(os.stat("/proc/self/ns/pid").st_ino), "1")))
    assert ended.exists()
    mine = SharedSecret("toy", os.getpid(), tmp_path).path
    assert not ended.exists() and theirs.exists() and mine.exists()


def test_a_secret_file_that_others_may_read_is_refused(tmp_path):
    genuine = SharedSecret("toy", os.getpid(), tmp_path)
    Path(genuine.path).chmod(0o644)
    with refusing(PermissionError, genuine.path):
        SharedSecret("toy", os.getpid(), tmp_path)
