import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hplm.scheduling.cost import CostModel


def _observe(model, count, took, rng):
    for _ in range(count):
        tokens, texts, loads = int(rng.integers(20, 1280)), int(rng.integers(1, 64)), int(rng.integers(0, 8))
        model.observe(tokens, texts, loads, int(took(tokens, texts, loads)))


def _truth(tokens, texts, adapters):
    return 2e6 + 30e3 * tokens + 50e3 * texts + 400e3 * adapters


LEARNED = {  # how many batches take how many times the truth, and as what the model must know it at last
    "from noise": ([(200, lambda rng: rng.normal(1, 0.05))], 1),
    "not from the first slow ones": ([(3, lambda rng: 20), (150, lambda rng: 1)], 1),
    "not from outliers": ([(150, lambda rng: 30 if rng.random() < 0.03 else 1)], 1),
    "that the machine is slower by now": ([(200, lambda rng: 1), (400, lambda rng: 3)], 3),
}


@pytest.mark.parametrize(("phases", "slower"), LEARNED.values(), ids=LEARNED)
def test_it_learns_the_cost_of_a_batch_a_token_a_text_and_an_adapter(phases, slower):
    model, rng = CostModel(), np.random.default_rng(0)
    for count, times in phases:
        _observe(model, count, lambda *of, times=times: times(rng) * _truth(*of), rng)
    for of in ((1280, 64, 0), (128, 1, 1), (600, 5, 8)):
        assert abs(model.predict(*of) / (slower * _truth(*of)) - 1) < 0.1


BATCHES = st.tuples(st.integers(1, 2000), st.integers(1, 64), st.integers(0, 8), st.integers(1000, 10**9) | st.just(0))


@given(batches=st.lists(BATCHES, min_size=1, max_size=20))
@example(batches=[(1, 1, 4, 10_000), (1, 1, 5, 30_000)] * 60 + [(1, 1, 0, 10_000)])  # only an adapter costs anything
def test_no_term_is_ever_below_zero_and_a_batch_that_took_no_time_teaches_nothing(batches):
    model = CostModel()
    for *batch, took in batches:
        before = model.terms.copy()
        model.observe(*batch, took, stages_ns=[took // 2, took - took // 2])
        assert (model.terms >= 0).all() and np.isfinite([*model.terms, *model.shares]).all()
        assert model.predict(100, 2, 1) > 0
        assert took or (model.terms == before).all()


def test_what_a_batch_takes_in_any_case_makes_batches_no_smaller():
    """Or a machine on which every batch takes long would get many small ones, and answer less."""
    quick, slow = CostModel(), CostModel()
    for model, batch in ((quick, 1e6), (slow, 40e6)):
        for tokens in (*range(100, 1000, 7),):
            model.observe(tokens, 10, 0, int(batch + 100e3 * tokens))
    allowed = [model.tokens_within(50e6, 20.0) for model in (quick, slow)]
    assert min(allowed) > 400 and max(allowed) < 600
