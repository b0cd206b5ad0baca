"""Encoding and decoding, without a server."""

from __future__ import annotations

import numpy as np
import pytest

from hplm_client import NoBackbone, UnexpectedAnswer, wire


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
