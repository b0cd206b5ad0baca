"""Forms and answers are read as they were written; no client can make a form; outputs are made from the answers to texts."""

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from hplm.errors import BY_WORD, Internal, NoTenant
from hplm.request.answers import (
    OUTPUTS,
    AnswerEnd,
    Reply,
    deserialized,
    outputs_of,
    packed,
    replies_in,
    serialized,
    size_of,
    strings,
)
from hplm.request.form import HEAD_BYTES, Form, TicketHead, check, read_head, write
from hplm.tasks.answers import LabelEach, TextAnswer, best_label_of_each
from hplm.tasks.tasks import TASKS

HEAD = TicketHead(
    "law",
    "acme-ä",
    2**63,
    3,
    9,
    2,
    priority=-1,
    arrival_ns=5,
    deadline_ns=7,
    waited_ns=2,
    top_k=4,
    dimensions=9,
    outputs=266,
    rung=1,
)
SIZES = 80  # where the head says how many tokens, texts, rows and passages there are


def columns(lengths, counts):
    tokens, rows = sum(lengths), sum(counts)
    return np.arange(tokens), np.arange(tokens, dtype=np.uint8), np.arange(3 * rows, dtype=np.int32).reshape(rows, 3)


def form_of(lengths=(2, 1), counts=(1, 3), passages=()):
    addresses, segments, spans = columns(lengths, counts)
    return write(b"secret", HEAD, lengths, counts, addresses.tobytes(), segments.tobytes(), spans.tobytes(), passages)


texts = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.text(max_size=5)), min_size=1, max_size=9)


@given(texts=texts, with_passages=st.booleans())
def test_it_is_read_as_it_was_written(texts, with_passages):
    lengths, counts, passages = zip(*texts, strict=True)
    signed = form_of(lengths, counts, passages if with_passages else ())
    assert len(signed) % len(texts) == 0
    form = Form(signed)
    assert form.head == read_head(signed) == HEAD and HEAD.received_ns == 7
    assert (form.texts, form.tokens) == (len(texts), sum(lengths))
    assert form.lengths == [*lengths] and form.counts == [*counts]
    assert form.passages == ([*passages] if with_passages else [])
    for read, written in zip((form.addresses, form.segments, form.spans), columns(lengths, counts), strict=True):
        np.testing.assert_array_equal(read, written)
        assert np.shares_memory(read, np.frombuffer(signed, np.uint8)) or not len(read)


def test_any_changed_byte_is_noticed():
    signed = bytes(form_of())
    check(signed, b"secret")
    for i in range(len(signed)):
        with pytest.raises(NoTenant):
            check(signed[:i] + bytes([signed[i] ^ 1]) + signed[i + 1 :], b"secret")


@pytest.mark.parametrize("forged", [b"", b"\1", bytes(HEAD_BYTES - 1), bytes(HEAD_BYTES), bytes(form_of()) + b"x"])
def test_what_lookup_has_not_signed_is_refused(forged):
    with pytest.raises(NoTenant):
        check(forged, b"secret")


@given(
    place=st.integers(0, 3), count=st.one_of(st.integers(0, 9), st.integers(0, 2**32 - 1)), passages=st.booleans(),
    kept=st.integers(0, 400),
)  # fmt: skip
def test_a_form_whose_sizes_are_wrong_is_refused(place, count, passages, kept):
    """Nobody can forge one. A fault of ours must not become an answer all the same."""
    form = form_of(passages=("a", "bc") if passages else ())
    right = Form(form)
    struct.pack_into("<I", form, SIZES + 4 * place, count)
    try:
        read = Form(form[:kept])
    except ValueError:
        return
    assert read.lengths == right.lengths and read.counts == right.counts and read.passages in (right.passages, [])


WHOLE = np.array([[0, 0, 9]], dtype=np.int32)


def test_texts_of_one_request_may_have_any_number_of_labels():
    logits = np.array([[1.0, 1.0], [-1.0, 2.0], [-1.0, -2.0]], dtype=np.float32)
    outputs = outputs_of([TASKS["multilabel"].answer(row[None], WHOLE, ["a", "b"]) for row in logits], OUTPUTS, [1] * 3)
    assert outputs["LABEL"].tolist() == [[b"a", b"b"], [b"b", b""], [b"", b""]]
    assert outputs["LOGITS"].tolist() == logits[:, None].tolist()
    assert outputs["SPAN"][:, :, 0].tolist() == [[0, 0], [0, -1], [-1, -1]]
    empty = outputs_of([TASKS["multilabel"].answer(logits[2:], WHOLE, ["a", "b"])], {"LABEL"}, [1])
    assert empty["LABEL"].tolist() == [[b""]]


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=4))
def test_ranges_of_columns_give_the_outputs_of_their_texts(ranges):
    """Neighbours of one batch are not put together, others are."""
    logits = np.random.default_rng(1).normal(size=(7, 3)).astype(np.float32)
    columns = best_label_of_each(logits, np.repeat(WHOLE, 7, axis=0), [["a", "b", "c"]] * 7, [None] * 7)
    columns.confidences, columns.levels = [number / 8 for number in range(7)], [*range(7)]
    parts = [columns.part(start, start + count) for start, count in ranges]
    texts = [text for part in parts for text in part]
    assert [text.level for text in texts] == [level for start, count in ranges for level in range(start, start + count)]
    versions = [*range(len(texts))]
    found, expected = outputs_of(LabelEach.together(parts), OUTPUTS, versions), outputs_of(texts, OUTPUTS, versions)
    assert [*found] == [*expected]
    for name, values in found.items():
        assert values.dtype == expected[name].dtype
        np.testing.assert_array_equal(values, expected[name])


def test_one_long_string_does_not_pad_the_others():
    long = "水" * 100_000
    labels = [["x"] * 4 for _ in range(64)]
    labels[3][2] = long
    scores, logits, spans = np.zeros(4, np.float32), np.zeros((4, 2), np.float32), np.zeros((4, 2), np.int32)
    texts = [TextAnswer(own, scores, logits, spans) for own in labels]
    tracemalloc.start()
    outputs = outputs_of(texts, {"LABEL", "VERSION"}, [7] * 64)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000
    assert set(outputs) == {"LABEL", "VERSION"} and outputs["LABEL"][3, 2] == long.encode() and outputs["VERSION"][0, 0] == b"7"
    assert size_of(outputs) == 300_000 + 255 + 4 * 256 + 64 * 5
    assert size_of(outputs_of(texts, {"SCORE", "SPAN"}, [7] * 64)) == 4 * 64 * 4 * (1 + 2)


shapes = arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)
numbers = st.sampled_from([np.float32, np.int32, np.int64]).flatmap(lambda dtype: arrays.arrays(dtype, shapes))
words = shapes.flatmap(
    lambda shape: st.lists(st.binary(max_size=9), min_size=(size := int(np.prod(shape))), max_size=size).map(
        lambda values: strings(values).reshape(shape)
    )
)
replies = st.builds(
    Reply,
    st.lists(st.tuples(st.integers(0, 2**63), st.integers(1, 9))),
    st.dictionaries(st.sampled_from(OUTPUTS), numbers | words),
    st.none() | st.builds(lambda kind, said: kind(said), st.sampled_from([*BY_WORD.values()]), st.text()),
    st.none() | st.builds(AnswerEnd, st.text(), *[st.integers(0, 2**63)] * 3),
)


def test_an_error_of_another_package_does_not_end_the_engine():
    class Odd(NoTenant):
        word = "odd"

    (read,) = replies_in(bytearray(packed([Reply([(1, 1)], {}, Odd("why"), None)])))
    assert (type(read.failure), str(read.failure)) == (Internal, "why")


@settings(max_examples=30)
@given(st.lists(replies, max_size=4))
def test_replies_are_read_as_they_were_written(written):
    read = replies_in(bytearray(packed(written)))
    for own, expected in zip(read, written, strict=True):
        assert (own.requests, own.end) == (expected.requests, expected.end)
        assert (type(own.failure), str(own.failure)) == (type(expected.failure), str(expected.failure))
        assert [*own.outputs] == [*expected.outputs]
        for name, values in own.outputs.items():
            assert values.dtype == expected.outputs[name].dtype
            np.testing.assert_array_equal(values, expected.outputs[name])


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=20), st.integers(1, 9))
def test_strings_travel_as_tritons_client_writes_and_reads_them(sent, missing):
    found = serialized(strings(sent).reshape(-1, 1))
    assert found == serialize_byte_tensor(strings(sent)).item()
    assert deserialized(np.frombuffer(found, np.uint8)).tolist() == deserialize_bytes_tensor(found).tolist() == sent
    if missing <= len(sent[-1]):
        with pytest.raises(ValueError, match="cut off"):
            deserialized(np.frombuffer(found[:-missing], np.uint8))


def test_no_string_travels_as_nothing():
    assert serialized(strings([])) == () and deserialized(np.zeros(0, np.uint8)).tolist() == []
