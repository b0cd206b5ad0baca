"""The outputs of a request are made from the answers to its texts."""

import tracemalloc

import numpy as np

from hplm.engine.answer import Filled, fill, size_of
from hplm.tasks import TASKS

WHOLE = np.array([[0, 0, 9]], dtype=np.int32)


def test_texts_of_one_request_may_have_any_number_of_labels():
    logits = np.array([[1.0, 1.0], [-1.0, 2.0], [-1.0, -2.0]], dtype=np.float32)
    filled = fill([TASKS["multilabel"].answer(row[None], WHOLE, ["a", "b"]) for row in logits])
    assert filled.labels.tolist() == [["a", "b"], ["b", ""], ["", ""]]
    assert filled.logits.tolist() == logits[:, None].tolist()
    assert filled.spans[:, :, 0].tolist() == [[0, 0], [0, -1], [-1, -1]]
    assert fill([TASKS["multilabel"].answer(logits[2:], WHOLE, ["a", "b"])]).labels.shape == (1, 1)


def test_one_long_string_does_not_pad_the_others():
    """One long label beside a thousand short ones."""
    long = "水" * 100_000
    labels = np.full((64, 4), "x", dtype=object)
    labels[3, 2] = long
    filled = Filled(labels, *(np.zeros((64, 4, width), dtype=np.float32) for width in (1, 2, 2)))
    tracemalloc.start()
    outputs = filled.outputs({"LABEL", "VERSION"}, [7] * 64)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000
    assert set(outputs) == {"LABEL", "VERSION"} and outputs["LABEL"][3, 2] == long.encode() and outputs["VERSION"][0, 0] == b"7"
    assert size_of(outputs) == 300_000 + 255 + 4 * 256 + 64 * 5
    assert size_of(filled.outputs({"SCORE", "SPAN"}, [7] * 64)) == 4 * 64 * 4 * (1 + 2)
