"""Without a server: a client refuses wrong settings and inputs before it sends anything, and decodes answers."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tritonclient.http

from hplm_client import AsyncHplmClient, HplmClient, InvalidInput, NoBackbone, UnexpectedAnswer, wire
from hplm_client.settings import Settings


@pytest.mark.parametrize("kind", [HplmClient, AsyncHplmClient])
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        *(({"url": url}, url.removeprefix("https://")) for url in (
            "http://127.0.0.1:8000", "127.0.0.1", "127.0.0.1:port", "127.0.0.1:8000/path", "https://door/path", "https://door:x",
            "HTTPS:door:443",
        )),
        ({"url": "https://"}, ""),
        ({"protocol": "https"}, "'https'"),
        *(({"api_key": key}, "ASCII") for key in ("two\nlines", "schlüssel", "")),
        ({"network_timeout": 0}, "network_timeout 0"),
        ({"network_timeout": float("inf")}, "network_timeout inf"),
        ({"retries": -1}, "retries -1"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused_at_once(kind, settings, named):
    with pytest.raises(InvalidInput, match=re.escape(named)) as caught:
        kind(**{"url": "127.0.0.1:8000", **settings})
    assert "schl" not in str(caught.value), "a key does not belong into a message"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_file_that_holds_no_certificate_is_refused_at_once(protocol, tmp_path):
    no_certificate = tmp_path / "key.pem"
    no_certificate.write_text("-----BEGIN PRIVATE KEY-----\n")
    for path in (tmp_path / "missing.pem", no_certificate, tmp_path):
        for kind in (HplmClient, AsyncHplmClient):
            with pytest.raises(InvalidInput, match=re.escape(str(path))):
                kind("127.0.0.1:443", protocol, ca_file=path)


def test_https_has_a_usual_port_and_a_key_is_not_shown():
    given = ("https://door.example.com", "https://door.example.com:8443", "https://[::1]", "127.0.0.1:8000")
    known = [Settings(url, api_key="s3cret") for url in given]
    assert [one.address for one in known] == ["door.example.com:443", "door.example.com:8443", "[::1]:443", "127.0.0.1:8000"]
    assert [one.context is not None for one in known] == [True, True, True, False]
    assert "s3cret" not in repr(known)


def question(texts=("a",), tenant="acme", pairs=None):
    return wire.encode(wire.Question(texts, tenant, pairs), tritonclient.http)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"texts": []}, []),
        ({"texts": "abc"}, ["str"]),
        ({"pairs": "b"}, ["str"]),
        ({"tenant": ""}, ["tenant"]),
        ({"tenant": "acme\0x"}, ["tenant", "NUL"]),
        ({"texts": ["a", "b"], "pairs": ["c"]}, ["2", "1"]),
        ({"texts": ["a", b"b"]}, ["TEXT 1", "bytes"]),
        ({"pairs": [None]}, ["TEXT_PAIR 0", "NoneType"]),
        ({"texts": ["\ud800"]}, ["TEXT 0", "UTF-8"]),
    ],
)
def test_wrong_inputs_are_refused_before_they_are_sent(given, named):
    with pytest.raises(InvalidInput) as caught:
        question(**given)
    assert all(re.search(rf"\b{thing}\b", str(caught.value)) for thing in named)


@pytest.mark.parametrize("tenant", [None, 7, "", "a b", "é", "a\r\nx: y"])
def test_a_name_that_is_no_value_of_a_header_is_not_sent_in_one(tenant):
    key = {"authorization": "Bearer K3Y"}
    assert Settings("a:1", api_key="K3Y").headers_for({"tenant": tenant} if tenant is not None else {}) == key


class Result:
    """Stands in for a result of tritonclient."""

    def __init__(self, **tensors):
        self.tensors = {name: np.asarray(values) for name, values in tensors.items()}

    def as_numpy(self, name):
        return self.tensors.get(name)


def decoded(rows, columns=2, asked=(), **changed):
    """Returns answers from `rows[text] = [(label, score, span), ...]`, padded to `columns`."""
    filled = [row + [("", 0.0, (-1, -1))] * (columns - len(row)) for row in rows]
    tensors = {
        "LABEL": np.array([[label.encode() for label, _, _ in row] for row in filled], dtype=np.object_),
        "SCORE": np.array([[score for _, score, _ in row] for row in filled], dtype=np.float32),
        "SPAN": np.array([[span for _, _, span in row] for row in filled], dtype=np.int32),
        "VERSION": np.array([[b"v1"]] * len(rows), dtype=np.object_),
    }
    question = wire.Question(["x"] * len(rows), "acme", **dict.fromkeys(asked, True))
    return wire.decode(Result(**{**tensors, **changed}), question)


def test_logits_go_to_the_rows_that_have_some():
    rows = [[("A", 0.5, (0, 1)), ("B", 0.25, (0, 1))], [("C", 0.5, (0, 1))]]
    a_row_each = np.array([[[1, 2], [3, 4]], [[5, 6], [0, 0]]], dtype=np.float32)
    first, second = decoded(rows, asked=["logits"], LOGITS=a_row_each)
    assert [row.logits for row in first.rows] == [(1, 2), (3, 4)] and [row.logits for row in second.rows] == [(5, 6)]
    first, _ = decoded(rows, asked=["logits"], LOGITS=a_row_each[:, :1])
    assert [row.logits for row in first.rows] == [(1, 2), None]
    unread = [[("", 0.0, (0, 1)), ("B", 0.5, (2, 3))]]
    (answer,) = decoded(unread, asked=["logits"], LOGITS=np.array([[[0, 0], [1, 2]]], dtype=np.float32))
    assert [row.logits for row in answer.rows] == [None, (1, 2)]


def test_confidences_and_levels_go_to_their_texts():
    rows = [[("A", 0.5, (0, 1))]] * 2
    more = {"CONFIDENCE": np.array([[0.25], [-1]], np.float32), "LEVEL": np.array([[2], [1]], np.int32)}
    answers = decoded(rows, asked=["confidence", "level"], **more)
    assert [(answer.confidence, answer.level) for answer in answers] == [(0.25, 2), (None, 1)]
    assert {(row.label, row.score, row.span) for answer in decoded(rows) for row in answer.rows} == {("A", 0.5, (0, 1))}
    for name in ("confidence", "level", "logits"):
        with pytest.raises(UnexpectedAnswer, match=name.upper()):
            decoded(rows, asked=[name])


@pytest.mark.parametrize(
    "changed",
    [
        {"LABEL": [[b"a"]]},
        {"LABEL": [b"a", b"b"]},
        {"SCORE": [[0.5], [0.5]]},
        {"SPAN": [[[0, 1, 2]] * 2] * 2},
        {"VERSION": [[b"1", b"2"]] * 2},
        {"LABEL": [[b"\xff", b"a"]] * 2},
        {"LABEL": [[1, 2]] * 2},
    ],
)
def test_an_answer_of_another_shape_is_refused(changed):
    with pytest.raises(UnexpectedAnswer):
        decoded([[("A", 0.5, (0, 1))]] * 2, **changed)


def test_backbones_are_models_with_both_halves_ready():
    def listed(*names):
        return {"model_stats": [{"name": name, "version": "1"} for name in names]}

    whole = [f"{name}{part}" for name in ("b", "a") for part in ("", "-lookup", "-upper")]
    parts = ["lone", "half", "half-lookup", "headless-lookup", "headless-upper"]
    assert wire.backbones_in(listed(*whole, *parts)) == ["a", "b"]
    group = listed(*(f"{name}{part}" for name in ("b", "a") for part in ("", "-lookup")), "a+b-upper", "lone")
    assert wire.backbones_in(group) == ["a", "b"] and wire.others_in(group) == ["lone"]
    assert wire.backbones_in({}) == [], "gRPC leaves an empty list out"
    with pytest.raises(UnexpectedAnswer):
        wire.backbones_in(["something else"])
    assert wire.only_backbone(["a"]) == "a"
    for found, named in ((["a", "b"], "a, b"), ([], r"(?=.*-lookup\b)(?=.*-upper\b)")):
        with pytest.raises(NoBackbone, match=named):
            wire.only_backbone(found)
