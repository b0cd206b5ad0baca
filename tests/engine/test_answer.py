"""What clients are told, from logits made by hand."""

import tracemalloc

import numpy as np
import pytest

from hplm.engine.answer import LONGEST_ANSWER, Filled, answer, best_span, fill, size_of

WHOLE = np.array([[0, 0, 9]], dtype=np.int32)


def test_multilabel_names_what_holds_the_most_probable_first():
    rows = answer("multilabel", np.array([[0.0, -0.1, 3.0]], dtype=np.float32), WHOLE, ["a", "b", "c"])
    assert rows.labels == ["c", "a"]  # one half is enough
    assert rows.scores == pytest.approx([1 / (1 + np.exp(-3)), 0.5])
    assert rows.logits.shape == (1, 3) and rows.spans.tolist() == [[0, 9], [0, 9]]


def test_multilabel_far_from_zero_does_not_overflow():
    with np.errstate(over="raise"):
        rows = answer("multilabel", np.array([[-300.0, 300.0]], dtype=np.float32), WHOLE, ["a", "b"])
    assert rows.labels == ["b"] and rows.scores.tolist() == [1.0]


def test_regress_puts_the_value_into_the_logits_and_spells_it_out():
    rows = answer("regress", np.array([[2.5]], dtype=np.float32), WHOLE, ["value"])
    assert rows.labels == ["2.5"] and rows.logits.tolist() == [[2.5]] and rows.scores.tolist() == [0.0]


def test_span_cuts_the_likeliest_answer_out_of_the_passage():
    logits = np.array([[0, 9], [6, 0], [0, 0], [0, 4]], dtype=np.float32)  # the best end lies before the best start
    spans = np.array([[4, 0, 2], [5, 3, 6], [6, 7, 9], [7, 9, 13]], dtype=np.int32)
    rows = answer("span", logits, spans, ["start", "end"], passage="ab cde fghijk")
    assert rows.labels == ["cde fghijk"] and rows.spans.tolist() == [[3, 13]]
    assert rows.logits.tolist() == [[6, 4]] and 0 < rows.scores[0] < 1


def test_the_best_span_is_that_of_all_pairs():
    rng = np.random.default_rng(0)
    for tokens in (1, 2, 7, 80):
        logits = rng.normal(size=(tokens, 2)).astype(np.float32)
        pairs = [(i, j) for i in range(tokens) for j in range(i, min(i + LONGEST_ANSWER, tokens))]
        assert best_span(logits) == max(pairs, key=lambda ends: logits[ends[0], 0] + logits[ends[1], 1])


def test_texts_of_one_request_may_have_any_number_of_labels():
    logits = np.array([[1.0, 1.0], [-1.0, 2.0], [-1.0, -2.0]], dtype=np.float32)
    filled = fill([answer("multilabel", row[None], WHOLE, ["a", "b"]) for row in logits])
    assert filled.labels.tolist() == [["a", "b"], ["b", ""], ["", ""]]
    assert filled.logits.tolist() == logits[:, None].tolist()
    assert filled.spans[:, :, 0].tolist() == [[0, 0], [0, -1], [-1, -1]]
    assert fill([answer("multilabel", logits[2:], WHOLE, ["a", "b"])]).labels.shape == (1, 1)


def test_strings_are_each_as_long_as_they_are():
    """One long label beside a thousand short ones."""
    long = "水" * 100_000
    labels = np.full((64, 4), "x", dtype=object)
    labels[3, 2] = long
    filled = Filled(labels, *(np.zeros((64, 4, width), dtype=np.float32) for width in (1, 2, 2)))
    tracemalloc.start()
    outputs = filled.outputs({"LABEL", "VERSION"}, 7)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000
    assert set(outputs) == {"LABEL", "VERSION"} and outputs["LABEL"][3, 2] == long.encode() and outputs["VERSION"][0, 0] == b"7"
    assert size_of(outputs) == 300_000 + 255 + 4 * 256 + 64 * 5
    assert size_of(filled.outputs({"SCORE", "SPAN"}, 7)) == 4 * 64 * 4 * (1 + 2)
