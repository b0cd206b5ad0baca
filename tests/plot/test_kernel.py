"""The compiled kernel against numpy and torch. test_forest.py compares both with plain dictionaries."""

import logging
import shutil
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.model.windows import Window
from hplm.plot import gathering, summing
from hplm.plot import kernel as kernels
from hplm.plot.forest import Forest, assign_addresses
from hplm.plot.gathering import Gatherer
from hplm.plot.keys import KeySpace
from tests.plot.tables import make_table
from tests.support.message import mentioning

CPU = torch.device("cpu")
VOCABULARY = 5
needs_kernel = pytest.mark.skipif(kernels.kernel() is None, reason="hplm was installed without a C compiler")


def _forest(folder, window, dtype, domains=1):
    """Returns tables of all single tokens and some windows."""
    space = KeySpace(VOCABULARY, window)
    generator = np.random.default_rng(0)
    unigrams = [tuple(gram) for gram in space.unpack(space.unigrams()).tolist()]
    whole = {tuple(gram) for gram in generator.integers(1, VOCABULARY + 1, (60, window.n)).tolist()}
    tables = [make_table(folder, f"d{i}", None, space, sorted({*unigrams, *whole}), dtype, i) for i in range(domains)]
    return Forest([folder], assign_addresses(tables))


@pytest.fixture(scope="module")
def forests(tmp_path_factory):
    made = {}

    def forest(*given):
        if given not in made:
            made[given] = _forest(tmp_path_factory.mktemp("tables"), *given)
        return made[given]

    return forest


texts = st.lists(st.integers(1, 9), min_size=1, max_size=8)
windows = st.sampled_from([Window(1), Window(3), Window(3, True), Window(5), Window(4)])


@needs_kernel
@settings(deadline=None, max_examples=60)
@given(window=windows, dtype=st.sampled_from(["fp16", "bf16", "int8"]), lengths=texts, seed=st.integers(0, 99))
def test_the_kernel_gathers_the_same_bits_as_torch(forests, window, dtype, lengths, seed):
    forest = forests(window, dtype)
    tokens, lengths = np.random.default_rng(seed).integers(0, VOCABULARY, sum(lengths)), np.array(lengths)
    chain = forest.chain("d0", 1)
    hits, by_arrays = chain.lookup(tokens, lengths), chain.lookup_by_arrays(tokens, lengths)
    assert (hits.addresses == by_arrays.addresses).all() and (hits.tries == by_arrays.tries).all()
    expected = Gatherer(CPU, torch.float32, compiled=False).sums(forest, hits.addresses, lengths)
    for instructions in range(1, kernels.kernel().instructions + 1):
        with patch.object(kernels.kernel(), "instructions", instructions):
            assert torch.equal(Gatherer(CPU, torch.float32).sums(forest, hits.addresses, lengths), expected)
            # torch rounds a 16-bit sum twice: first to the stored type.
            assert torch.equal(Gatherer(CPU, torch.bfloat16).sums(forest, hits.addresses, lengths), expected.bfloat16())


@needs_kernel
@settings(deadline=None, max_examples=30)
@given(lengths=texts, more=texts, seed=st.integers(0, 99), threads=st.integers(1, 5))
def test_a_sum_does_not_depend_on_its_neighbours_or_on_threads(forests, lengths, more, seed, threads):
    forest, generator = forests(Window(3), "fp16", 3), np.random.default_rng(seed)
    both = np.array(lengths + more)
    domains = generator.integers(0, 3, len(both))
    asked = [(forest.chain(f"d{d}", 1), generator.integers(0, VOCABULARY, n)) for d, n in zip(domains, both, strict=True)]
    addresses = [chain.lookup(tokens, np.array([len(tokens)])).addresses for chain, tokens in asked]
    alone = [Gatherer(CPU, torch.bfloat16).sums(forest, mine, np.array([len(mine)])) for mine in addresses]
    with patch.object(summing, "PIECE", 2), patch.object(torch, "get_num_threads", lambda: threads):
        together = Gatherer(CPU, torch.bfloat16).sums(forest, np.concatenate(addresses), both)
    assert torch.equal(together, torch.cat(alone))


@needs_kernel
def test_rows_count_as_cold_when_the_kernel_had_to_wait_for_the_disk(forests, monkeypatch):
    forest, addresses, lengths = forests(Window(3), "fp16"), np.array([1, 2, 3]), np.array([3])
    rows, gatherer = forest.chain("d0", 1).links[0][0].rows, Gatherer(CPU, torch.float32)
    advised = []
    monkeypatch.setattr(rows, "_read_ahead", lambda cold: advised.append(cold.tolist()))
    gatherer.broken(forest, addresses)
    advised.clear()
    gatherer.sums(forest, addresses, lengths)
    gatherer.broken(forest, addresses)
    assert not advised
    usage = iter([0, 1])  # the second call reports a page fault that had to wait for the disk
    monkeypatch.setattr(gathering, "disk_faults", lambda: next(usage))
    gatherer.sums(forest, addresses, lengths)
    gatherer.broken(forest, addresses)
    assert advised == [[1, 2, 3]]


@needs_kernel
def test_texts_that_do_not_match_their_lengths_are_refused(forests):
    chain = forests(Window(3), "fp16").chain("d0", 1)
    with pytest.raises(ValueError, match=mentioning(3, 4)):
        chain.lookup(np.zeros(3, np.int64), np.array([4]))
    with pytest.raises(ValueError, match=mentioning(3, 4)):
        Gatherer(CPU, torch.float32).sums(forests(Window(3), "fp16"), np.ones(3, np.int64), np.array([4]))


@pytest.fixture
def another_library(tmp_path, monkeypatch):
    """Lets the kernel be loaded again, from a path."""
    kernels.kernel.cache_clear()
    monkeypatch.setattr(kernels, "LIBRARY", tmp_path / "_kernel.so")
    yield tmp_path / "_kernel.so"
    kernels.kernel.cache_clear()


def test_without_the_kernel_numpy_and_torch_answer_and_the_log_says_so(forests, another_library, caplog):
    tokens, lengths = np.array([0, 1, 2, 3, 4]), np.array([2, 3])
    forest = _forest(another_library.parent, Window(3), "fp16")
    hits = forest.chain("d0", 1).lookup(tokens, lengths)
    sums = Gatherer(CPU, torch.float32).sums(forest, hits.addresses, lengths)
    assert kernels.kernel() is None
    assert (hits.addresses == forest.chain("d0", 1).lookup_by_arrays(tokens, lengths).addresses).all()
    assert torch.equal(sums, Gatherer(CPU, torch.float32, compiled=False).sums(forest, hits.addresses, lengths))
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(another_library) in caplog.text


@needs_kernel
def test_a_kernel_of_another_version_is_not_used(another_library, monkeypatch, caplog):
    shutil.copy(next(Path(kernels.__file__).parent.glob("_kernel*.so")), another_library)
    monkeypatch.setattr(kernels, "VERSION", kernels.VERSION + 1)
    assert kernels.kernel() is None and str(another_library) in caplog.text
