"""`hplm infer` against a fake Triton."""

from __future__ import annotations

import pytest
from client_fakes import Way, forwarding
from triton_fakes import Refusal, tensors

from hplm.cli.main import parsed
from hplm.errors import HplmError


def run(*arguments: str):
    command, given = parsed(["infer", *arguments])
    return command(*given.args, **given.kwargs)


@pytest.fixture
def told(fake, capsys, monkeypatch):
    """A function that runs the command, and returns its lines and the headers and parameters that have arrived."""
    monkeypatch.delenv("HPLM_API_KEY", raising=False)

    def told(*arguments):
        run(*arguments, "--url", fake.http_url, "--tenant", "acme")
        return capsys.readouterr().out.splitlines(), {**fake.requests[-1].headers, **fake.requests[-1].parameters}

    return told


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_fields_of_the_json(fake, protocol):
    answer = run("a text", "--tenant", "acme", "--url", Way(protocol).url(fake), "--protocol", protocol)
    row = {"label": "a text", "score": 1.0, "span": [0, 6]}
    sure = {"confidence": None, "level": None}
    assert answer == {"tenant": "acme", "label": "a text", "score": 1.0, "rows": [row], "version": "v7", **sure}


def test_a_table_for_people(fake, told):
    rows = [[("TWO", 1.0, (0, 3)), ("", 0.0, (5, 6)), ("WORDS", 1 / 3, (7, 12))]]
    fake.answer = lambda _: tensors(rows, CONFIDENCE=[[0.75]], LEVEL=[[2]])
    *table, last = told("two\n ~ words")[0]
    assert table == [
        "LABEL   SCORE  SPAN  TEXT",
        "TWO    1.0000   0-3  two",
        "-      0.0000   5-6  ~",
        "WORDS  0.3333  7-12  words",
    ]
    assert last == "tenant acme, version v7, confidence 0.7500"
    assert told("two\n ~ words", "--rung", "2")[0][-1].endswith("level 2, confidence 0.7500")
    fake.answer = lambda _: tensors([[("A", 0.5, (0, 100))]], CONFIDENCE=[[-1]])
    long, last = told("x" * 100)[0][1:]
    assert long.endswith("x" * 47 + "…") and last.endswith(" v7")
    assert told("x" * 100, "--pair", "two")[0][:2] == ["LABEL   SCORE   SPAN", "A      0.5000  0-100"]


def test_options_and_key_reach_the_server(told, monkeypatch):
    sent = told("a", "--truncate", "--top-k", "1", "--rung", "1", "--deadline-ms", "90000.5", "--key", "FROM_OPTION")[1]
    expected = {"tenant": "acme", "truncate": True, "top_k": 1, "hplm_rung": 1, "authorization": "Bearer FROM_OPTION"}
    assert sent.items() >= {**expected, "hplm-tenant": "acme"}.items() and 0 < sent["timeout"] <= 90_000_500
    for key, header in (("", None), ("FROM_ENVIRONMENT", "Bearer FROM_ENVIRONMENT")):
        monkeypatch.setenv("HPLM_API_KEY", key)
        assert told("a")[1].get("authorization") == header


def test_tls_reaches_the_client(fake, certificate):
    with forwarding(fake.http_url, certificate[1]) as door:
        for connection in (["--url", f"https://{door.url}"], ["--url", door.url, "--tls"]):
            assert run("a", "--tenant", "acme", "--ca-file", str(certificate[0]), *connection)["label"] == "a"
            with pytest.raises(HplmError, match="--ca-file"):
                run("a", "--tenant", "acme", *connection)


def test_errors_of_the_client_become_errors_of_the_command(fake):
    fake.script = [Refusal("[no_tenant] no such tenant", 404)]
    for more, named in (([], "no_tenant"), (["--backbone", "nope"], "nope"), (["--ca-file", "nosuch.pem"], r"nosuch\.pem")):
        with pytest.raises(HplmError, match=named):
            run("a", "--tenant", "acme", "--url", fake.http_url, *more)
