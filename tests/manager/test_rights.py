"""Keys and sessions open what they are for, until they end."""

import sqlite3
import time

import pytest

from hplm.errors import InvalidInput
from hplm_openai.errors import Refused
from manager.records import OPERATORS, Records
from manager.rights import LIMITS, MOST_WRONG, Rights, digest_of
from tests.support.wait import Clock


@pytest.fixture
def clock():
    return Clock(time.time())  # as `keys.expiry` reads it


@pytest.fixture
def rights(tmp_path, clock):
    return Rights(Records(tmp_path / "records.db"), tmp_path, clock)


def status(of, *given, **more):
    with pytest.raises(Refused) as refused:
        of(*given, **more)
    return refused.value.status


def test_a_key_opens_its_owner_until_it_expires_or_is_revoked(rights, clock, tmp_path):
    first, _ = rights.add_owner("acme", "me")
    secret, key = rights.add_key("acme", "ask", 2, "me")
    caller = rights.caller(secret, "1.2.3.4", "beta")  # an owner's key acts for its owner, whatever a request says
    assert (caller.owner, caller.role, caller.key) == ("acme", "ask", key.id)
    clock.seconds += 2 * 86400 + 1
    assert status(rights.caller, secret, "1.2.3.4") == 401 and rights.caller(first, "").role == "manage"
    other, key = rights.add_key("acme", "manage", 0, "me")
    rights.revoke("acme", key.id, "me")
    for wrong in (other, None, "", first + "x", digest_of(first)):
        assert status(rights.caller, wrong, "1.2.3.4") == 401
    base = sqlite3.connect(tmp_path / "records.db")
    assert first not in str([*base.iterdump()]), "a secret is stored"


def test_the_last_key_that_manages_stays_and_others_keys_are_unknown(rights):
    _, first = rights.add_owner("acme", "me")
    _, other = rights.add_owner("beta", "me")
    assert status(rights.revoke, "acme", first.id, "me") == 409
    assert status(rights.revoke, "acme", other.id, "me") == status(rights.revoke, "acme", "key-none", "me") == 404
    assert [deed.action for deed in rights._records.deeds()] == ["key add", "owner add", "key add", "owner add"]


@pytest.mark.parametrize("name", ["", "Acme", "a.b", "-a", "a" * 25, "a/b", "a\n"])
def test_names_of_owners_have_no_dot_and_no_path(rights, name):
    with pytest.raises(InvalidInput, match="1-24"):
        rights.add_owner(name, "me")


def test_an_operator_acts_for_the_owner_it_names(rights):
    rights.add_owner("acme", "me")
    secret, _ = rights.add_key(None, "operator", 0, "me")
    assert rights.caller(secret, "", "acme").acting_for() == "acme"
    assert rights.caller(secret, "").acting_for() == OPERATORS and status(rights.caller, secret, "", "none") == 404
    with pytest.raises(InvalidInput, match="'ask'"):
        rights.add_key("acme", "operator", 0, "me")


def test_many_wrong_keys_of_an_address_are_told_to_wait_and_right_ones_pass(rights, clock):
    secret, _ = rights.add_owner("acme", "me")
    wrong = [status(rights.caller, "x", "1.2.3.4") for _ in range(MOST_WRONG + 2)]
    assert wrong == [401] * MOST_WRONG + [429] * 2
    assert status(rights.caller, "x", "5.6.7.8") == 401 and rights.caller(secret, "1.2.3.4").owner == "acme"
    clock.seconds += 61
    assert status(rights.caller, "x", "1.2.3.4") == 401


def test_a_session_ends_with_its_key_and_cannot_be_made_without_the_secret(rights, tmp_path, clock):
    rights.add_owner("acme", "me")
    secret, key = rights.add_key("acme", "manage", 0, "me")
    cookie = rights.sign(caller := rights.caller(secret, ""))
    assert rights.signed(cookie) == caller and secret not in cookie
    assert Rights(rights._records, tmp_path, clock).signed(cookie) == caller, "a restart ends sessions"
    assert Rights(rights._records, tmp_path, clock).secret == rights.secret
    assert status(rights.signed, key.id) == status(rights.signed, cookie[:-1]) == 401
    for file in ("manager.key", "sessions.key"):
        assert (tmp_path / file).stat().st_mode & 0o77 == 0
    assert status(Rights(rights._records, tmp_path / "other", clock).signed, cookie) == 401
    rights.revoke("acme", key.id, "me")
    assert status(rights.signed, cookie) == 401


def test_limits_are_the_usual_ones_until_others_are_set(rights):
    rights.add_owner("acme", "me")
    assert rights.set_limits("acme", {"bytes": 5}, "me") == {**LIMITS, "bytes": 5}
    assert (rights.limit("acme", "bytes"), rights.limit("acme", "tenants")) == (5, LIMITS["tenants"])
    for wrong in ({"byte": 5}, {"bytes": -1}, {"bytes": True}, {"bytes": "5"}):
        with pytest.raises(InvalidInput, match="limit 'byte"):
            rights.set_limits("acme", wrong, "me")
