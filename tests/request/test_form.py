"""A form is read as it was written, no client can make one, and one whose sizes are wrong is refused."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hplm.errors import NoTenant
from hplm.request.form import HEAD_BYTES, Form, Head, check, read_head, write

HEAD = Head(2**63, 3, 9, 2, "law", "acme-ä", priority=-1, arrival_ns=5, deadline_ns=7, waited_ns=2, top_k=4, rung=1)
SIZES = 76  # where the head says how many tokens, texts, rows and passages there are


def arrays(lengths, counts):
    tokens, rows = sum(lengths), sum(counts)
    return np.arange(tokens), np.arange(tokens, dtype=np.uint8), np.arange(3 * rows, dtype=np.int32).reshape(rows, 3)


def form_of(lengths=(2, 1), counts=(1, 3), passages=()):
    addresses, segments, spans = arrays(lengths, counts)
    return write(b"secret", HEAD, lengths, counts, addresses, segments.tobytes(), spans.tobytes(), passages)


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
    for read, written in zip((form.addresses, form.segments, form.spans), arrays(lengths, counts), strict=True):
        np.testing.assert_array_equal(read, written)
        assert np.shares_memory(read, np.frombuffer(signed, np.uint8)) or not len(read)


def test_any_changed_byte_is_noticed():
    signed = bytes(form_of())
    assert check(signed, [b"other", b"secret"]) == 1
    for i in range(len(signed)):
        with pytest.raises(NoTenant):
            check(signed[:i] + bytes([signed[i] ^ 1]) + signed[i + 1 :], [b"secret"])


@pytest.mark.parametrize("forged", [b"", b"\1", bytes(HEAD_BYTES - 1), bytes(HEAD_BYTES), bytes(form_of()) + b"x"])
def test_what_lookup_has_not_signed_is_refused(forged):
    with pytest.raises(NoTenant):
        check(forged, [b"secret", b"other"])


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
