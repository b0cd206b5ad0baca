"""The compiled kernel against numpy."""

import logging

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hplm.scheduling import kernel as kernels
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import CostModel
from hplm.scheduling.kernel import Rules
from hplm.scheduling.timely import Timely
from hplm.scheduling.waiting import Capacity
from hplm.simulate.arrivals import SimulatedText

needs_kernel = pytest.mark.skipif(kernels.kernel() is None, reason="hplm was installed without a C compiler")


def _texts(seed, count, kinds, longest):
    generator = np.random.default_rng(seed)
    tokens, deadline = generator.integers(1, longest + 1, count), generator.integers(0, 900, count)
    deadline[generator.random(count) < 0.2] = 0
    slot_key, tenant = generator.integers(0, kinds, (2, count))
    numbers = zip(tokens.tolist(), deadline.tolist(), slot_key.tolist(), tenant.tolist(), strict=True)
    return [
        SimulatedText(tokens=tokens, arrival_ns=i, deadline_ns=deadline, priority=0, slot_key=slot_key, tenant=tenant, number=i)
        for i, (tokens, deadline, slot_key, tenant) in enumerate(numbers)
    ]


capacities = st.builds(Capacity, st.integers(1, 400), st.integers(1, 60), st.integers(1, 12))
choosers = st.builds(
    Timely, st.integers(1, 12), st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.sampled_from([0.5, 1, 2.0, 3.7]), st.just(0.01)
)


@needs_kernel
@settings(deadline=None, max_examples=300)
@given(
    seed=st.integers(0, 999),
    count=st.integers(1, 300),
    kinds=st.sampled_from([1, 2, 5, 40]),
    longest=st.sampled_from([1, 30, 300, 90_000]),
    capacity=capacities,
    chooser=choosers,
    batch_ns=st.sampled_from([7.0, 50.0, 333.3]),
    reserved=st.integers(0, 100),
)
@example(0, 3000, 3000, 30, Capacity(400, 60, 12), Timely(), 50.0, 4)  # more texts and tenants than there was room for
def test_the_kernel_chooses_the_same_texts_as_numpy(seed, count, kinds, longest, capacity, chooser, batch_ns, reserved):
    columns = Columns(_texts(seed, count, kinds, longest))
    rules = Rules(100, batch_ns, chooser.limits(capacity), chooser.late, reserved)
    by_kernel, by_arrays = chooser.by_kernel(columns, capacity, rules), chooser.by_arrays(columns, capacity, rules)
    assert by_kernel is not None
    assert by_kernel[0].tolist() == by_arrays[0].tolist()
    assert by_kernel[1] == by_arrays[1]


def test_without_the_kernel_numpy_chooses_and_the_log_says_so(tmp_path, monkeypatch, caplog):
    kernels.kernel.cache_clear()
    monkeypatch.setattr(kernels, "LIBRARY", tmp_path / "_kernel.so")
    try:
        columns = Columns(_texts(0, 50, 3, 20))
        chosen = Timely().select(columns, 100, Capacity(100, 10, 3), CostModel())
        assert 0 < len(columns.remove(chosen)) <= 10
    finally:
        kernels.kernel.cache_clear()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(tmp_path) in caplog.text
