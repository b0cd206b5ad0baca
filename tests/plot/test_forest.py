"""Lookup and gathering against plain dictionaries, with the compiled kernel and without; chains and addresses."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm import compiled as kernels
from hplm.errors import Broken, InvalidInput
from hplm.model.windows import Window
from hplm.plot.forest import Forest, Tally, assign_addresses, count_levels, ends
from hplm.plot.gathering import PIECE, Gatherer
from hplm.plot.keys import KeySpace
from hplm.plot.rows import StoredRows
from testing.reference import Dictionaries, windows_of
from tests.plot.tables import make_table
from tests.support.device import DEVICE
from tests.support.message import mentioning
from tests.support.needed import needs_kernel

SPACE = KeySpace(5, Window(3))
BY_TORCH = partial(patch, "hplm.plot.gathering.can_sum", return_value=False)  # not by the kernel
UNIGRAMS = [(0, i, 0) for i in range(1, 6)]


@settings(max_examples=40)
@given(
    window=st.builds(Window, st.integers(1, 5), st.booleans()),
    vocabulary=st.sampled_from([2, 7, 255, 256, 250_000]),
    dtype=st.sampled_from(["fp16", "bf16", "int8"]),
    resident=st.sampled_from([0, 1, 4, 1000]),
    seed=st.integers(0, 2**20),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
def test_lookup_and_gathering_equal_dictionaries(tmp_path_factory, window, vocabulary, dtype, resident, seed, lengths):
    folder = tmp_path_factory.mktemp("forest")
    rng = np.random.default_rng(seed)
    space = KeySpace(vocabulary, window)
    texts = [rng.integers(0, vocabulary, length) for length in lengths]
    tokens, lengths = np.concatenate(texts), np.array(lengths)
    whole = windows_of(window, texts)
    uni = {tuple(gram) for gram in (whole * window.levels()[-1]).tolist()}
    seen = {tuple(gram) for keep in window.levels() for gram in (whole * keep).tolist()}
    some = [gram for gram in sorted(seen) if rng.random() < 0.5]
    root = make_table(folder, "root", None, space, sorted(uni | set(some[::3])), dtype, seed)
    stem = make_table(folder, "stem", "root", space, some[1::3], dtype, seed + 1)
    leaf = make_table(folder, "leaf", "stem", space, some[2::3], dtype, seed + 2)
    forest = Forest([folder], assign_addresses([leaf, root, stem]))
    chain = forest.chain("leaf", 1)
    hits = chain.lookup(tokens, lengths)
    reference, tables = Dictionaries(window), (leaf, stem, root)
    places = [reference.find(gram, tables)[:2] for gram in whole.tolist()]
    assert list(zip(hits.levels, hits.tries % 3, strict=True)) == places
    expected = torch.cat([reference.sums(text.tolist(), tables) for text in texts])
    assert np.array_equal(chain.find_by_arrays(tokens, lengths), (hits.addresses, hits.tries))
    for compiled, (numbers, close) in product(
        (True, False), ((torch.float32, {"atol": 1e-5}), (torch.bfloat16, {"atol": 0.05, "rtol": 0.02}))
    ):
        gatherer = Gatherer(DEVICE, numbers, resident)
        assert not len(gatherer.broken(forest, hits.addresses))
        with nullcontext() if compiled else BY_TORCH():
            got = gatherer.sums(forest, hits.addresses, lengths)
        assert got.dtype == numbers and torch.allclose(got.float().cpu(), expected, **close)
    of_root = forest.chain("root", 1).lookup(tokens, lengths).addresses  # of one table: kernel and torch add in one order
    with BY_TORCH():
        plain = Gatherer(DEVICE, torch.float32).sums(forest, of_root, lengths)
    for instructions in range(1, kernels.kernel().instructions + 1 if kernels.kernel() else 1):
        with patch.object(kernels.kernel(), "instructions", instructions):
            assert torch.equal(Gatherer(DEVICE, torch.float32).sums(forest, of_root, lengths), plain)
            # torch rounds a 16-bit sum twice: first to the stored type.
            assert torch.equal(Gatherer(DEVICE, torch.bfloat16).sums(forest, of_root, lengths), plain.bfloat16())


def test_a_forged_address_at_a_boundary_does_not_reach_the_neighbour(tmp_path):
    root = make_table(tmp_path, "root", None, SPACE, [(1, 2, 3), *UNIGRAMS])
    forest = Forest([tmp_path], assign_addresses([root]))
    addresses, lengths = np.array([0, 0, 1, 0]), np.array([2, 2])  # row 1 has values at all three positions
    sums = Gatherer(DEVICE, torch.float32).sums(forest, addresses, lengths)
    assert (sums[:2] == 0).all() and (sums[2:] != 0).any()


def test_hot_rows_that_do_not_fit_on_the_device_are_read_from_the_host(tmp_path, monkeypatch, caplog):
    root = make_table(tmp_path, "root", None, SPACE, [(1, 2, 3), *UNIGRAMS])
    forest, copy = Forest([tmp_path], assign_addresses([root])), StoredRows.copy
    found = forest.chain("root", 1).lookup(np.array([0, 1, 2]), np.array([3]))
    expected = Gatherer(DEVICE, torch.float32, 4).sums(forest, found.addresses, np.array([3]))

    def full(self, rows, device):
        if rows:
            raise torch.OutOfMemoryError("the device is full")
        return copy(self, rows, device)

    monkeypatch.setattr(StoredRows, "copy", full)
    gatherer = Gatherer(DEVICE, torch.float32, 4)
    for _ in range(2):
        assert torch.equal(gatherer.sums(forest, found.addresses, np.array([3])), expected)
    assert caplog.text.count(str(root.folder)) == 1


def test_a_missing_parent_and_a_token_in_no_table_are_named(tmp_path):
    leaf = make_table(tmp_path, "leaf", "root", SPACE, [(1, 2, 3)])
    with pytest.raises(InvalidInput, match=mentioning("'leaf'", "'root'", 1)):
        Forest([tmp_path], assign_addresses([leaf])).chain("leaf", 1)
    root = make_table(tmp_path, "root", None, SPACE, UNIGRAMS[:2])
    with pytest.raises(InvalidInput, match=mentioning(3)):
        Forest([tmp_path], assign_addresses([root])).chain("root", 1).lookup(np.array([0, 3]), np.array([2]))


def test_a_domain_with_a_broken_parent_has_no_answers_and_the_parent_is_named(tmp_path):
    leaf, root = (make_table(tmp_path, *names, SPACE, UNIGRAMS) for names in (("leaf", "root"), ("root", None)))
    branches = assign_addresses([leaf, root])
    (tmp_path / "root/1/meta.json").write_text("{")
    with pytest.raises(Broken, match=mentioning("root/1")):
        Forest([tmp_path], branches).chain("leaf", 1)


def test_where_lookups_end_is_counted_by_name(tmp_path):
    root = make_table(tmp_path, "root", None, SPACE, [*UNIGRAMS, (0, 1, 2), (3, 4, 5)])
    stem = make_table(tmp_path, "stem", "root", SPACE, [(2, 3, 4)])
    leaf = make_table(tmp_path, "leaf", "stem", SPACE, [(1, 2, 3), (0, 4, 5)])
    chain = Forest([tmp_path], assign_addresses([root, stem, leaf])).chain("leaf", 1)
    hits = chain.lookup(np.arange(5), np.array([5]))  # 012 123 234 345 450; the last one is 50 at the end of its text
    wanted = {"domain": 1, "parent": 1, "root": 2, "2-gram": 1, "1-gram": 0}
    assert dict(count_levels(chain, ends(chain, hits))) == wanted
    tally = Tally()
    tally.add("leaf", chain, hits)
    tally.add("leaf", chain, hits)
    assert tally.take() == {("leaf", name): 2 * count for name, count in wanted.items()}
    assert not tally.take()


def test_of_two_tables_with_one_name_the_first_is_used(tmp_path):
    """The other one was deleted, but a request in flight still needs its addresses."""
    root = make_table(tmp_path, "root", None, SPACE, UNIGRAMS)
    (branch,) = assign_addresses([root])
    forest = Forest([tmp_path], [branch, replace(branch, base=1000)])
    assert forest.chain("root", 1).links[0][1] == 0
    assert [base for _, base in forest.tables_of(np.array([1, 1001]))] == [0, 1000]


@pytest.fixture(scope="module")
def domains(tmp_path_factory):
    """Three tables of all single tokens and some windows."""
    folder, generator = tmp_path_factory.mktemp("tables"), np.random.default_rng(0)
    whole = {tuple(gram) for gram in generator.integers(1, 6, (60, 3)).tolist()}
    tables = [make_table(folder, f"d{i}", None, SPACE, sorted({*UNIGRAMS, *whole}), seed=i) for i in range(3)]
    return Forest([folder], assign_addresses(tables))


@needs_kernel()
@settings(max_examples=30)
@given(lengths=st.lists(st.integers(1, 3 * PIECE), min_size=1, max_size=6), seed=st.integers(0, 99), threads=st.integers(1, 5))
def test_a_sum_does_not_depend_on_its_neighbours_or_on_threads(domains, lengths, seed, threads):
    generator = np.random.default_rng(seed)
    asked = [(domains.chain(f"d{generator.integers(3)}", 1), generator.integers(0, 5, length)) for length in lengths]
    addresses = [chain.lookup(tokens, np.array([len(tokens)])).addresses for chain, tokens in asked]
    alone = [Gatherer(DEVICE, torch.bfloat16).sums(domains, mine, np.array([len(mine)])) for mine in addresses]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = Gatherer(DEVICE, torch.bfloat16).sums(domains, np.concatenate(addresses), np.array(lengths))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, torch.cat(alone))
