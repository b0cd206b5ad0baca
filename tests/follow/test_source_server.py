"""The files and the methods that nginx lets followers use, and those that it refuses."""

import http.client
import os
import re
import shutil
from pathlib import Path

import pytest

from hplm.errors import InvalidInput
from hplm.follow.source_server import TEMPLATE, source_config
from tests.follow.nginx import TOKEN, nginx
from tests.support.message import mentioning


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "state" / "toy"
    for name in ("snapshots/3", "adapters/head-16.g1.bank", "plot/law/2/meta.json", "plot/law/2/values", "readers/here-1-a"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("0123456789")
    for name in ("CURRENT", "registry.sqlite", "registry.sqlite-journal", "FOLLOWED", "CURRENT.writing"):
        (folder / name).write_text("3\n")
    (folder / "inbox").mkdir()
    (folder / "inbox" / "secret").write_text("3\n")
    return folder.parent


@pytest.fixture(scope="module")
def ask(state):
    with nginx(state, state.parent / "nginx") as url:

        def ask(method, path, body=None, token=TOKEN, **headers):
            connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
            connection.request(method, path, body, {"Authorization": f"Bearer {token}", **headers})
            answer = connection.getresponse()
            read = answer.read()
            connection.close()
            return answer.status, read

        yield ask


def test_followers_read_what_they_need(ask):
    assert ask("GET", "/toy/CURRENT") == (200, b"3\n")
    for path in ("snapshots/3", "adapters/head-16.g1.bank", "plot/law/2/meta.json", "plot/law/2/values"):
        assert ask("GET", f"/toy/{path}") == (200, b"0123456789")
        assert ask("GET", f"/toy/{path}", Range="bytes=2-4") == (206, b"234")


def test_metrics_need_no_token_and_nothing_else_comes_with_them(ask):
    status, read = ask("GET", "/metrics", token="wrong")
    assert status == 200 and b"\nnginx_connections_active 1\n" in read
    for path in ("/metrics/", "/metrics/../toy/CURRENT", "/toy/CURRENT?/metrics", "/toy/CURRENT#/metrics"):
        assert ask("GET", path, token="wrong")[0] in (400, 401)


def test_current_is_sent_whatever_the_condition(ask, state):
    """Its ETag would be the same for two generations of one second."""
    os.utime(state / "toy/CURRENT", (0, 0))
    assert ask("GET", "/toy/CURRENT", **{"If-Modified-Since": "Thu, 01 Jan 1970 00:00:00 GMT"})[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        *("registry.sqlite", "registry.sqlite-journal", "FOLLOWED", "CURRENT.writing", "inbox/secret", "", "snapshots/"),
        *(
            "readers/",
            "snapshots/../registry.sqlite",
            "snapshots/%2e%2e/registry.sqlite",
            "plot/law/2/../../../registry.sqlite",
        ),
        *("adapters/..%2fregistry.sqlite", "snapshots/3%00", "plot/law/2/"),
    ],
)
def test_all_else_is_hidden(ask, path):
    assert ask("GET", f"/toy/{path}")[0] in (400, 404)


def test_only_reports_are_written(ask, state):
    shutil.rmtree(state / "toy/readers")  # the first report makes the folder
    assert ask("PUT", "/toy/readers/one", "5 7\n")[0] == 201
    assert (state / "toy/readers/one").read_text() == "5 7\n"
    assert ask("PUT", "/toy/readers/one", "6 7\n")[0] == 204
    assert (state / "toy/readers/one").read_text() == "6 7\n"
    for path in ("CURRENT", "snapshots/4", "registry.sqlite", "plot/law/2/values", "readers/../CURRENT", "readers/.one", "new"):
        assert ask("PUT", f"/toy/{path}", "9\n")[0] in (403, 404, 405)
    for method in ("DELETE", "MKCOL", "MOVE", "COPY", "POST"):
        assert ask(method, "/toy/readers/one", "9\n" if method == "POST" else None)[0] in (403, 405)
    assert ask("PUT", "/toy/readers/one", "9" * 5000)[0] == 413
    assert ask("GET", "/toy/readers/one")[0] == 403
    assert (state / "toy/CURRENT").read_text() == "3\n"


@pytest.mark.parametrize("token", ["", "wrong", TOKEN.upper(), TOKEN[:-1], f"{TOKEN}x", TOKEN.replace(".", "x")])
def test_without_the_token_nothing_is_answered(ask, state, token):
    assert ask("GET", "/toy/CURRENT", token=token)[0] == 401
    assert ask("PUT", "/toy/readers/new", "5 7\n", token=token)[0] == 401
    assert not (state / "toy/readers/new").exists()


@pytest.mark.parametrize(
    "changed, named",
    [
        ({"token": ""}, "token"),
        ({"token": 'a"; return 200; #'}, "token"),
        ({"address": "10.0.0.1; user root"}, "10.0.0.1; user root"),
        ({"state": Path("a$b")}, "a$b"),
    ],
)
def test_values_that_would_change_the_configuration_are_refused(tmp_path, changed, named):
    values = {"state": tmp_path, "address": "127.0.0.1", "port": 1, "token": TOKEN, "folder": tmp_path, **changed}
    with pytest.raises(InvalidInput, match=mentioning(named)):
        source_config(**values)


def test_every_value_of_the_template_is_named_in_its_head():
    head, _, rest = TEMPLATE.read_text().partition("\n\n")
    assert set(re.findall(r"\$\{(HPLM_[A-Z]+)\}", rest)) == set(re.findall(r"HPLM_[A-Z]+(?==)", head))
