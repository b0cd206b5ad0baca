"""Encoding and decoding, without a server."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from hypothesis import given
from hypothesis import strategies as some
from tritonclient.utils import deserialize_bytes_tensor

from hplm_client import InvalidInput, NoBackbone, Row, UnexpectedAnswer, wire


class Result:
    """Stands in for a result of tritonclient."""

    def __init__(self, **tensors):
        self.tensors = {name: np.asarray(values) for name, values in tensors.items()}

    def as_numpy(self, name):
        return self.tensors.get(name)


def answered(rows, columns=2, **changed):
    """Returns a result made from `rows[text] = [(label, score, span), ...]`, padded to `columns`."""
    filled = [row + [("", 0.0, (-1, -1))] * (columns - len(row)) for row in rows]
    tensors = {
        "LABEL": np.array([[label.encode() for label, _, _ in row] for row in filled], dtype=np.object_),
        "SCORE": np.array([[score for _, score, _ in row] for row in filled], dtype=np.float32),
        "SPAN": np.array([[span for _, _, span in row] for row in filled], dtype=np.int32),
        "VERSION": np.array([[b"v1"]] * len(rows), dtype=np.object_),
    }
    return Result(**{**tensors, **changed})


@given(some.lists(some.text(alphabet=some.characters(codec="utf-8")), min_size=1, max_size=5))
def test_texts_are_sent_unchanged(texts):
    for library in (tritonclient.http, tritonclient.grpc):
        inputs = wire.encode(wire.Question(texts, "acme"), library)["inputs"]
        assert [tensor.name() for tensor in inputs] == ["TEXT"]
        assert list(inputs[0].shape()) == [len(texts), 1] and inputs[0].datatype() == "BYTES"
    body, json_bytes = tritonclient.http.InferenceServerClient.generate_request_body([tensor_of(texts)])
    assert [text.decode() for text in deserialize_bytes_tensor(body[json_bytes:])] == texts


def tensor_of(texts):
    return wire.encode(wire.Question(texts, "acme"), tritonclient.http)["inputs"][0]


def test_only_given_options_are_sent():
    plain = wire.encode(wire.Question(["a"], "acme"), tritonclient.http)
    assert plain["parameters"] == {"tenant": "acme"}
    assert [output.name() for output in plain["outputs"]] == ["LABEL", "SCORE", "SPAN", "VERSION"]
    full = wire.Question(
        ["a"], "acme", ["b"], top_k=3, truncate=True, priority=0, logits=True, confidence=True, rung=2, level=True
    )
    encoded = wire.encode(full, tritonclient.http)
    assert encoded["parameters"] == {"tenant": "acme", "truncate": True, "top_k": 3, "hplm_priority": 0, "hplm_rung": 2}
    assert [output.name() for output in encoded["outputs"]] == [*wire.OUTPUTS, "LOGITS", "CONFIDENCE", "LEVEL"]
    assert [tensor.name() for tensor in encoded["inputs"]] == ["TEXT", "TEXT_PAIR"]


@pytest.mark.parametrize(
    ("question", "named"),
    [
        (lambda: wire.Question([], "acme"), []),
        (lambda: wire.Question("abc", "acme"), ["str"]),
        (lambda: wire.Question(["a"], "acme", "b"), ["str"]),
        (lambda: wire.Question(["a"], ""), ["tenant"]),
        (lambda: wire.Question(["a"], "acme\0x"), ["tenant", "NUL"]),
        (lambda: wire.Question(["a", "b"], "acme", ["c"]), ["2", "1"]),
        (lambda: wire.encode(wire.Question(["a", b"b"], "acme"), tritonclient.http), ["TEXT 1", "bytes"]),
        (lambda: wire.encode(wire.Question(["a"], "acme", [None]), tritonclient.http), ["TEXT_PAIR 0", "NoneType"]),
        (lambda: wire.encode(wire.Question(["\ud800"], "acme"), tritonclient.http), ["TEXT 0", "UTF-8"]),
    ],
)
def test_wrong_inputs_are_refused_before_they_are_sent(question, named):
    with pytest.raises(InvalidInput) as caught:
        question()
    for thing in named:
        assert re.search(rf"\b{thing}\b", str(caught.value))


def test_padding_is_dropped_and_words_without_a_label_are_kept():
    rows = [[("A", 0.5, (0, 1))], [("", 0.0, (0, 2)), ("B", 0.25, (3, 4))], []]
    first, second, third = wire.decode(answered(rows), wire.Question(["x"] * 3, "acme"))
    assert first.rows == (Row("A", 0.5, (0, 1)),)
    assert second.rows == (Row("", 0.0, (0, 2)), Row("B", 0.25, (3, 4)))
    assert third.rows == () and third.label is None and third.score is None and third.labels == ()
    assert {answer.version for answer in (first, second, third)} == {"v1"}


def test_logits_go_to_the_rows_that_have_some():
    rows = [[("A", 0.5, (0, 1)), ("B", 0.25, (0, 1))], [("C", 0.5, (0, 1))]]
    question = wire.Question(["x", "y"], "acme", logits=True)
    a_row_each = np.array([[[1, 2], [3, 4]], [[5, 6], [0, 0]]], dtype=np.float32)
    first, second = wire.decode(answered(rows, LOGITS=a_row_each), question)
    assert [row.logits for row in first.rows] == [(1, 2), (3, 4)] and [row.logits for row in second.rows] == [(5, 6)]
    first, _ = wire.decode(answered(rows, LOGITS=a_row_each[:, :1]), question)
    assert [row.logits for row in first.rows] == [(1, 2), None]
    unread = [[("", 0.0, (0, 1)), ("B", 0.5, (2, 3))]]
    of_the_second = np.array([[[0, 0], [1, 2]]], dtype=np.float32)
    (answer,) = wire.decode(answered(unread, LOGITS=of_the_second), wire.Question(["x"], "acme", logits=True))
    assert [row.logits for row in answer.rows] == [None, (1, 2)]


def test_a_confidence_of_minus_one_is_none():
    rows = [[("A", 0.5, (0, 1))]] * 2
    question = wire.Question(["x", "y"], "acme", confidence=True)
    answers = wire.decode(answered(rows, CONFIDENCE=np.array([[0.25], [-1]], dtype=np.float32)), question)
    assert [answer.confidence for answer in answers] == [0.25, None]
    (alone,) = wire.decode(answered(rows[:1]), wire.Question(["x"], "acme"))
    assert alone.confidence is None
    with pytest.raises(UnexpectedAnswer, match="CONFIDENCE"):
        wire.decode(answered(rows), question)


def test_levels_go_to_their_texts():
    rows = [[("A", 0.5, (0, 1))]] * 2
    question = wire.Question(["x", "y"], "acme", level=True)
    answers = wire.decode(answered(rows, LEVEL=np.array([[2], [1]], dtype=np.int32)), question)
    assert [answer.level for answer in answers] == [2, 1]
    (alone,) = wire.decode(answered(rows[:1]), wire.Question(["x"], "acme"))
    assert alone.level is None
    with pytest.raises(UnexpectedAnswer, match="LEVEL"):
        wire.decode(answered(rows), question)


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
    rows = [[("A", 0.5, (0, 1))]] * 2
    with pytest.raises(UnexpectedAnswer):
        wire.decode(answered(rows, **changed), wire.Question(["x", "y"], "acme"))


def test_a_missing_output_is_named():
    with pytest.raises(UnexpectedAnswer, match="LOGITS"):
        wire.decode(answered([[("A", 0.5, (0, 1))]]), wire.Question(["x"], "acme", logits=True))


def test_backbones_are_models_with_both_halves_ready():
    names = [f"{name}{part}" for name in ("b", "a") for part in ("", "-lookup", "-upper")]
    names += ["lone", "half", "half-lookup", "headless-lookup", "headless-upper"]
    assert wire.backbones_in({"model_stats": [{"name": name, "version": "1"} for name in names]}) == ["a", "b"]
    group = [*(f"{name}{part}" for name in ("b", "a") for part in ("", "-lookup")), "a+b-upper", "lone"]
    statistics = {"model_stats": [{"name": name, "version": "1"} for name in group]}
    assert wire.backbones_in(statistics) == ["a", "b"] and wire.others_in(statistics) == ["lone"]
    assert wire.backbones_in({}) == [], "gRPC leaves an empty list out"
    with pytest.raises(UnexpectedAnswer):
        wire.backbones_in(["something else"])
    assert wire.only_backbone(["a"]) == "a"
    with pytest.raises(NoBackbone, match="a, b"):
        wire.only_backbone(["a", "b"])
    with pytest.raises(NoBackbone, match=r"(?=.*-lookup\b)(?=.*-upper\b)"):
        wire.only_backbone([])
