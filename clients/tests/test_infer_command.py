"""`hplm infer` against the running fake backbone."""

from __future__ import annotations

import argparse
import json

import pytest
from client_fakes import Forwarder, Way

from hplm.cli import infer
from hplm.errors import HplmError

pytestmark = pytest.mark.slow


def run(*arguments: str):
    parser = argparse.ArgumentParser()
    infer.register(parser.add_subparsers())
    args = parser.parse_args(["infer", *arguments])
    return args.run(args)


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("HPLM_API_KEY", raising=False)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_one_line_of_json(server, protocol, capsys):
    answer = run("a text", "--tenant", "acme", "--url", Way(protocol).url(server), "--protocol", protocol, "--json")
    row = {"label": "a text", "score": 1.0, "span": [0, 6]}
    sure = {"confidence": None, "level": None}
    assert answer == {"tenant": "acme", "label": "a text", "score": 1.0, "rows": [row], "version": "v7", **sure}
    assert json.loads(json.dumps(answer)) == answer
    assert capsys.readouterr().out == "", "the entry point prints the JSON"


def test_a_table_for_people(server, capsys):
    def lines(*arguments):
        run(*arguments, "--url", server.http_url)
        return capsys.readouterr().out.splitlines()

    *table, last = lines("two\n ~ words", "--tenant", "tagger")
    assert table == [
        "LABEL   SCORE  SPAN  TEXT",
        "TWO    1.0000   0-3  two",
        "-      0.0000   5-6  ~",
        "WORDS  0.3333  7-12  words",
    ]
    assert "tagger" in last and "v7" in last
    assert lines("a text", "--tenant", "sure")[-1].endswith(" 0.7500")
    assert lines("a text", "--tenant", "acme")[-1].endswith(" v7")
    assert lines("a text", "--tenant", "sure", "--rung", "2")[-1].endswith("level 2, confidence 0.7500")
    long = lines("x" * 100, "--tenant", "acme", "--top-k", "2")
    assert len(long) == 4 and all(line.endswith("x" * 47 + "…") for line in long[1:3])
    assert lines("one", "--pair", "two", "--tenant", "acme")[:2] == ["LABEL     SCORE  SPAN", "one|two  1.0000   0-7"]


def test_options_and_key_reach_the_server(server, monkeypatch):
    def told(*arguments):
        facts = json.loads(run("parameters", "--tenant", "acme", "--url", server.http_url, "--json", *arguments)["label"])
        return {name.lower(): value for name, value in facts["parameters"].items()}, facts["timeout"]

    headers = {"authorization": "Bearer FROM_OPTION", "hplm-tenant": "acme"}
    parameters, timeout = told("--truncate", "--top-k", "1", "--deadline-ms", "90000.5", "--key", "FROM_OPTION")
    assert parameters == {"tenant": "acme", "truncate": True, "top_k": 1} | headers
    assert 0 < timeout <= 90_000_500
    assert told("--rung", "1")[0]["hplm_rung"] == 1
    for key, sent in (("", None), ("FROM_ENVIRONMENT", "Bearer FROM_ENVIRONMENT")):
        monkeypatch.setenv("HPLM_API_KEY", key)
        assert told()[0].get("authorization") == sent


def test_tls_reaches_the_client(server, certificate):
    with Forwarder(server.http_url, certificate[1]) as door:
        for connection in (["--url", f"https://{door.url}"], ["--url", door.url, "--tls"]):
            answer = run("a text", "--tenant", "acme", "--ca-file", str(certificate[0]), "--json", *connection)
            assert answer["label"] == "a text"
            with pytest.raises(HplmError, match="--ca-file"):
                run("a text", "--tenant", "acme", *connection)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["a", "--tenant", "nobody"], "no_tenant"),
        (["a", "--tenant", "acme", "--backbone", "nope"], "nope"),
        (["a", "--tenant", "acme", "--deadline-ms", "0"], r"\b0(\.0)? ms"),
        (["a\udcff", "--tenant", "acme"], "UTF-8"),
        (["a", "--tenant", "acme", "--ca-file", "nosuch.pem"], r"nosuch\.pem"),
        (["a", "--tenant", "acme", "--url", "http://somewhere"], "'http://somewhere'"),
    ],
)
def test_errors_of_the_client_become_errors_of_the_command(server, arguments, named):
    with pytest.raises(HplmError, match=named):
        run("--url", server.http_url, *arguments)
