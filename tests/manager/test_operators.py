"""Operators add owners, limit them, act for them, and read who did what."""

import pytest

from manager.rights import COMMAND_LINE, OPERATOR
from tests.manager.serving import managing


@pytest.fixture(scope="module")
def managed(tmp_path_factory):
    with managing(tmp_path_factory.mktemp("manager")) as managed:
        yield managed


@pytest.fixture(scope="module")
def operator(managed):
    secret, _ = managed.site.rights.add_key(None, OPERATOR, 0, COMMAND_LINE)

    def ask(method, path, body=None, **headers):
        return managed.ask(method, path, body, None, authorization=f"Bearer {secret}", **headers)

    return ask


def test_an_operator_adds_owners_limits_them_and_acts_for_them(managed, operator):
    status, owner = operator("POST", "/v1/owners", {"name": "delta"})
    assert status == 200 and owner["id"] == "delta" and owner["key"]["role"] == "manage"
    own = {"authorization": f"Bearer {owner['key']['secret']}"}
    assert managed.ask("GET", "/v1/files", owner=None, **own) == operator("GET", "/v1/files", openai_organization="delta")
    status, owner = operator("POST", "/v1/owners/delta", {"limits": {"jobs_a_day": 9}})
    assert (status, owner["limits"]["jobs_a_day"], owner["used"]["bytes"]) == (200, 9, 0)
    assert [one["id"] for one in operator("GET", "/v1/owners")[1]["data"]] == ["delta", "operators"]
    said = operator("GET", "/v1/log?limit=2")[1]
    assert [one["action"] for one in said["data"]] == ["owner limits", "key add"] and said["has_more"]
    (last,) = operator("GET", f"/v1/log?after={said['last_id']}")[1]["data"][:1]
    assert last["action"] == "owner add"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/owners", {"name": "a.b"}, 400),
        ("POST", "/v1/owners", {}, 400),
        ("POST", "/v1/owners", {"name": "x", "y": 1}, 400),
        ("POST", "/v1/owners/none", {"limits": {"bytes": 1}}, 404),
        ("POST", "/v1/owners/none", {"limits": 5}, 400),
        ("GET", "/v1/log?limit=x", None, 400),
        ("POST", "/v1/records", {"id": "none.x", "model": "toy", "file": "file-1"}, 400),
        ("POST", "/v1/records", {"id": "acme.a.v2", "model": "toy", "file": "file-1"}, 400),
        ("POST", "/v1/records", {"id": "acme.x", "model": ["toy"], "file": "file-1"}, 400),
        ("POST", "/v1/records", {"id": "acme.x", "model": "none", "file": "file-1"}, 400),
    ],
)
def test_wrong_requests_of_operators_are_refused_and_owners_may_send_none(managed, operator, method, path, body, status):
    assert operator(method, path, body)[0] == status
    assert managed.ask(method, path, body)[0] == 403
