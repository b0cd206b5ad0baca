"""Large batches on a CPU: each thread computes some of the texts, and none waits for another before its end."""

import random
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hplm.engine.engine import Engine, computed
from hplm.engine.laid import StagingSettings
from hplm.engine.packing import UNEVEN, WORTH, divided, end_to_end
from hplm.engine.results import read_answers
from hplm.engine.staging import EncoderStager
from testing.toy import random_text
from tests.engine.asker import texts_of

CPU = torch.device("cpu")
TENANTS = "acme", "city", "beta"


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 4)), min_size=1, max_size=80), st.integers(1, 6))
def test_each_thread_has_about_as_many_tokens_or_one_tensor_has_all(texts, threads):
    lengths, owners = (np.array(one) for one in zip(*texts, strict=True))
    whole = end_to_end(lengths, owners)
    parts = divided(whole, threads)
    share = whole.rows / threads
    assert np.concatenate([part.texts for part in parts]).tolist() == whole.texts.tolist()
    assert all((part.lengths == lengths[part.texts]).all() for part in parts)
    if len(parts) > 1:
        assert len(parts) == threads and share >= WORTH and max(part.rows for part in parts) <= UNEVEN * share
    elif threads > 1 and share >= WORTH:
        assert max(lengths) > (UNEVEN - 1) * share  # a long text leaves no even parts


@pytest.fixture
def staged(reference):
    """Returns an engine with so many threads, and a batch for it. Its texts pass all layers, or `depth`."""

    def make(threads, depth=0, dtype=torch.float32):
        rng, backbone = random.Random(1), reference.backbone
        texts = [text for tenant in TENANTS for text in texts_of(backbone, tenant, [random_text(rng, 11) for _ in range(60)])]
        for text in texts:
            text.depth = depth
        engine = Engine(backbone.upper(), CPU, dtype, threads=threads)
        stager = EncoderStager(backbone, StagingSettings(8, CPU, dtype, few_sizes=engine.takes_few_sizes, threads=threads))
        batch = stager.stage(texts, lambda text, error: pytest.fail(str(error)))
        assert len(batch.sheets) == threads
        return engine, batch

    return make


@pytest.mark.parametrize(
    ("threads", "dtype", "error"), [(2, torch.float32, 1e-5), (3, torch.float32, 1e-5), (2, torch.bfloat16, 0.02)]
)
def test_answers_are_those_of_one_thread(staged, threads, dtype, error):
    engine, batch = staged(threads, dtype=dtype)
    for text, found, expected in zip(batch.texts, computed(engine, batch), computed(*staged(1, dtype=dtype)), strict=True):
        labels = len(text.request.tenant.labels)  # behind them is room for larger heads of the sheet
        np.testing.assert_allclose(found[:, :labels], expected[:, :labels], rtol=10 * error, atol=error)


def test_a_request_is_answered_from_sheets_with_heads_of_different_sizes(staged):
    engine, batch = staged(2)
    logits = computed(engine, batch)
    wider = [np.pad(one, ((0, 0), (0, 48 * (number % 2)))) for number, one in enumerate(logits)]
    with torch.inference_mode():
        read = [[(len(texts), found) for texts, found in read_answers(batch.texts, own)] for own in (logits, wider)]
    for (texts, one), (others, other) in zip(*read, strict=True):
        assert texts == others and [answer.labels for answer in one] == [answer.labels for answer in other]


@pytest.fixture
def halves(staged, request):
    """Returns an engine, a batch in two halves, and what lets the first one begin. The parameter: `depth`."""
    engine, batch = staged(2, request.param)
    (attend,), begins = batch.sheets[0].laid.attend, threading.Event()

    def attend_later(*given):
        assert begins.wait(60)
        return attend(*given)

    batch.sheets[0].laid.attend = [attend_later]
    return engine, batch, begins


@pytest.mark.parametrize("halves", [0], indirect=True)
def test_an_error_comes_when_no_thread_computes_any_more(halves):
    """Staging takes the batch's memory then."""
    engine, batch, begins = halves

    def fail(*given):
        begins.set()
        raise ZeroDivisionError

    batch.sheets[1].laid.attend = [fail]
    with pytest.raises(ZeroDivisionError):
        computed(engine, batch)
    assert batch.sheets[0].hidden is not None  # behind its last layer


@pytest.mark.parametrize("halves", [1], indirect=True)
def test_whoever_gives_up_gets_on_when_no_thread_computes_any_more(halves):
    engine, batch, begins = halves
    later, sooner = batch.sheets
    passing, leaving = engine.run(batch), sooner.indexes
    with torch.inference_mode():
        assert next(passing).indexes == leaving
    begins.set()
    passing.close()
    assert later.hidden is not None


@pytest.mark.parametrize("halves", [0], indirect=True)
def test_the_next_batch_begins_while_a_half_of_the_one_before_it_computes(halves, staged):
    engine, batch, begins = halves
    _, following = staged(2)
    engine.start(batch)
    engine.start(following)  # returns when a thread has begun it
    assert batch.sheets[0].hidden is None  # it is still held up
    begins.set()
    for one in (batch, following):
        for found, expected in zip(computed(engine, one), computed(*staged(1)), strict=True):
            np.testing.assert_allclose(found[:, : expected.shape[1]], expected[:, : found.shape[1]], rtol=1e-4, atol=1e-5)
        assert one.under_way is not None and one.under_way.took_ns > 0


@pytest.mark.parametrize("halves", [0], indirect=True)
def test_a_batch_that_is_not_divided_waits_for_those_before_it(halves, staged):
    engine, batch, begins = halves
    _, alone = staged(1)
    engine.start(batch)
    threading.Timer(0.2, begins.set).start()
    engine.start(alone)
    assert alone.under_way is None and all(sheet.hidden is not None for sheet in batch.sheets)
