"""`hplm infer` against the running fake backbone."""

from __future__ import annotations

import argparse
import builtins
import json

import pytest
from tls_stand_ins import TlsForwarder, certificate_and_pair

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
    url = server.http_url if protocol == "http" else server.grpc_url
    answer = run("a text", "--tenant", "acme", "--url", url, "--protocol", protocol, "--json")
    row = {"label": "a text", "score": 1.0, "span": [0, 6]}
    sure = {"confidence": None, "level": None}
    assert answer == {"tenant": "acme", "label": "a text", "score": 1.0, "rows": [row], "version": "v7", **sure}
    assert json.loads(json.dumps(answer)) == answer
    assert capsys.readouterr().out == "", "the entry point prints the JSON"


def test_a_table_for_people(server, capsys):
    run("two\n ~ words", "--tenant", "tagger", "--url", server.http_url)
    *table, last = capsys.readouterr().out.splitlines()
    assert table == [
        "LABEL   SCORE  SPAN  TEXT",
        "TWO    1.0000   0-3  two",
        "-      0.0000   5-6  ~",
        "WORDS  0.3333  7-12  words",
    ]
    assert "tagger" in last and "v7" in last


def test_the_confidence_of_a_calibrated_tenant_is_shown(server, capsys):
    assert run("a text", "--tenant", "sure", "--url", server.http_url)["confidence"] == 0.75
    assert capsys.readouterr().out.splitlines()[-1].endswith(" 0.7500")
    assert run("a text", "--tenant", "acme", "--url", server.http_url)["confidence"] is None
    assert capsys.readouterr().out.splitlines()[-1].endswith(" v7")


def test_the_level_of_a_fixed_rung_is_shown(server, capsys):
    for options, level in ((["--rung", "2"], 2), (["--level"], 1)):
        assert run("a text", "--tenant", "sure", "--url", server.http_url, *options)["level"] == level
        assert capsys.readouterr().out.splitlines()[-1] == f"tenant sure, version v7, level {level}, confidence 0.7500"


def test_long_texts_are_cut_in_the_table_and_pairs_left_out(server, capsys):
    run("x" * 100, "--tenant", "acme", "--url", server.http_url, "--top-k", "2")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all(line.endswith("x" * 47 + "…") for line in lines[1:3])
    run("one", "--pair", "two", "--tenant", "acme", "--url", server.http_url)
    assert capsys.readouterr().out.splitlines()[:2] == ["LABEL     SCORE  SPAN", "one|two  1.0000   0-7"]


def test_options_and_key_reach_the_server(server, monkeypatch):
    def told(*arguments):
        facts = json.loads(run("parameters", "--tenant", "acme", "--url", server.http_url, "--json", *arguments)["label"])
        return {name.lower(): value for name, value in facts["parameters"].items()}, facts["timeout"]

    headers = {"authorization": "Bearer FROM_OPTION", "hplm-tenant": "acme"}
    parameters, timeout = told("--truncate", "--top-k", "1", "--deadline-ms", "90000.5", "--key", "FROM_OPTION")
    assert parameters == {"tenant": "acme", "truncate": True, "top_k": 1} | headers
    assert 0 < timeout <= 90_000_500
    assert told("--rung", "1")[0]["hplm_rung"] == 1
    monkeypatch.setenv("HPLM_API_KEY", "")
    assert "authorization" not in told()[0]
    monkeypatch.setenv("HPLM_API_KEY", "FROM_ENVIRONMENT")
    assert told()[0]["authorization"] == "Bearer FROM_ENVIRONMENT"


def test_tls_reaches_the_client(server, tmp_path):
    certificate, pair = certificate_and_pair(tmp_path)
    with TlsForwarder(pair, server.http_url) as door:
        for connection in (["--url", f"https://{door.url}"], ["--url", door.url, "--tls"]):
            answer = run("a text", "--tenant", "acme", "--ca-file", str(certificate), "--json", *connection)
            assert answer["label"] == "a text"
            with pytest.raises(HplmError, match="--ca-file"):
                run("a text", "--tenant", "acme", *connection)
        with pytest.raises(HplmError, match=r"nosuch\.pem"):
            run("a text", "--tenant", "acme", "--ca-file", "nosuch.pem", "--url", door.url)
    assert door.connections == 2


def test_errors_of_the_client_become_errors_of_the_command(server):
    for arguments, named in (
        (["a", "--tenant", "nobody"], "no_tenant"),
        (["a", "--tenant", "acme", "--backbone", "nope"], "nope"),
        (["a", "--tenant", "acme", "--deadline-ms", "0"], r"\b0(\.0)? ms"),
        (["a\udcff", "--tenant", "acme"], "UTF-8"),
    ):
        with pytest.raises(HplmError, match=named):
            run(*arguments, "--url", server.http_url)
    with pytest.raises(HplmError, match="'http://somewhere'"):
        run("a", "--tenant", "acme", "--url", "http://somewhere")


def test_a_missing_client_is_named_with_the_way_out(monkeypatch):
    real_import = builtins.__import__

    def without_client(name, *rest, **more):
        if name == "hplm_client":
            raise ModuleNotFoundError("No module named 'hplm_client'", name="hplm_client")
        return real_import(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_client)
    with pytest.raises(HplmError, match="pip install -e clients"):
        run("a", "--tenant", "acme")
