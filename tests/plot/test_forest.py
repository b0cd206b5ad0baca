"""Lookup and gathering against a plain dictionary."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.errors import Broken, InvalidInput
from hplm.model.windows import windows_of
from hplm.plot.forest import Forest, gather, place
from hplm.plot.keys import KeySpace
from hplm.plot.table import Table, TableMeta, write_table

HIDDEN = 4


def _write(folder, domain, parent, space, grams, seed):
    """A table of random values, zeros where a gram has no token; and the same as a dictionary."""
    generator = torch.Generator().manual_seed(seed)
    keys = np.unique(space.pack(np.array(sorted(grams), dtype=np.int64).reshape(-1, space.n)))
    meta = TableMeta(domain, 1, parent, 1 if parent else None, space.n, space.vocabulary, HIDDEN, "fp16", len(keys), 0)
    stored = {}

    def values_of(windows):
        values = torch.randn(len(windows), space.n, HIDDEN, generator=generator).half()
        values[torch.from_numpy(windows == 0)] = 0
        stored.update({tuple(window): value for window, value in zip(windows.tolist(), values, strict=True)})
        return values

    return write_table(folder / domain / "1", meta, keys, values_of, batch=3), stored


def _expected(tokens, dictionaries, n):
    """Slow and obvious: first hit of whole, then shortened windows, through the dictionaries in order; then the sum."""
    total = torch.zeros(len(tokens), HIDDEN)
    for middle in range(len(tokens)):
        window = [tokens[i] + 1 if 0 <= i < len(tokens) else 0 for i in range(middle - n // 2, middle + n // 2 + 1)]
        forms = [list(window)]
        for left in range(n // 2):
            for drop in (left, n - 1 - left):
                forms.append([0 if i == drop else t for i, t in enumerate(forms[-1])])
        hit = next(d[tuple(form)] for form in forms for d in dictionaries if tuple(form) in d)
        for position in range(n):
            if 0 <= middle + position - n // 2 < len(tokens):
                total[middle + position - n // 2] += hit[position].float()
    return total


@settings(deadline=None, max_examples=60)
@given(
    n=st.sampled_from([1, 3, 5]),
    vocabulary=st.sampled_from([2, 7, 255, 256]),
    seed=st.integers(0, 2**20),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
def test_lookup_and_gather_agree_with_a_dictionary(tmp_path_factory, n, vocabulary, seed, lengths):
    folder = tmp_path_factory.mktemp("forest")
    rng = np.random.default_rng(seed)
    space = KeySpace(vocabulary, n)
    texts = [rng.integers(0, vocabulary, length) for length in lengths]
    tokens = np.concatenate(texts)
    windows = windows_of(tokens, np.array(lengths), n)
    uni = {tuple(space.unpack(np.array([key]))[0]) for key in space.unigrams()}
    seen = {tuple(window) for window in windows} | {tuple(np.where(np.arange(n) == 0, 0, w)) for w in windows}
    some = [gram for gram in sorted(seen) if gram[n // 2] and rng.random() < 0.5]
    root, in_root = _write(folder, "root", None, space, uni | set(some[::2]), seed)
    leaf, in_leaf = _write(folder, "leaf", "root", space, set(some[1::3]), seed + 1)
    forest = Forest(folder, place([root, leaf]))
    hits = forest.chain("leaf", 1).lookup(windows)
    got = gather(forest, hits.addresses, np.array(lengths), torch.float32)
    expected = torch.cat([_expected(text.tolist(), [in_leaf, in_root], n) for text in texts])
    assert torch.allclose(got, expected, atol=1e-6)
    in_16_bits = gather(forest, hits.addresses, np.array(lengths), torch.bfloat16)
    assert torch.allclose(in_16_bits.float(), expected, atol=0.05, rtol=0.02)


def test_a_forged_address_at_a_boundary_does_not_reach_the_neighbour(tmp_path):
    space = KeySpace(5, 3)
    root, _ = _write(tmp_path, "root", None, space, {(1, 2, 3), (0, 1, 0)}, 0)
    forest = Forest(tmp_path, place([root]))
    addresses, lengths = np.array([0, 0, 2, 0]), np.array([2, 2])  # row 2 has values at all three positions
    assert (gather(forest, addresses, lengths, torch.float32)[:2] == 0).all()


def test_addresses_outside_the_chain_are_noticed(tmp_path):
    space = KeySpace(5, 3)
    root, _ = _write(tmp_path, "root", None, space, {(0, i, 0) for i in range(1, 6)}, 0)
    leaf, _ = _write(tmp_path, "leaf", "root", space, {(1, 2, 3)}, 1)
    forest = Forest(tmp_path, place([root, leaf]))
    assert forest.chain("leaf", 1).holds(np.array([1, 5, 6, 7]))
    assert not forest.chain("root", 1).holds(np.array([1, 7]))
    assert not forest.chain("leaf", 1).holds(np.array([8]))
    assert not forest.chain("leaf", 1).holds(np.array([-1]))


def test_a_missing_parent_is_named(tmp_path):
    space = KeySpace(5, 3)
    leaf, _ = _write(tmp_path, "leaf", "root", space, {(1, 2, 3)}, 1)
    with pytest.raises(InvalidInput, match="'leaf' version 1 needs 'root' version 1"):
        Forest(tmp_path, place([leaf]))


def test_a_truncated_table_is_refused_by_name(tmp_path):
    table, _ = _write(tmp_path, "root", None, KeySpace(5, 3), {(0, 1, 0), (1, 2, 3)}, 0)
    values = table.folder / "values"
    values.write_bytes(values.read_bytes()[:-2])
    with pytest.raises(Broken, match=r"values has .* bytes"):
        Table(table.folder)


def test_a_flipped_bit_is_found_by_verify(tmp_path):
    table, _ = _write(tmp_path, "root", None, KeySpace(5, 3), {(0, 1, 0), (1, 2, 3)}, 0)
    table.verify()
    values = table.folder / "values"
    flipped = bytearray(values.read_bytes())
    flipped[-1] ^= 1
    values.write_bytes(flipped)
    with pytest.raises(Broken, match="checksums"):
        Table(table.folder).verify()


def test_windows_that_do_not_fit_a_key_are_refused():
    assert KeySpace(250_000, 3).bits == 18
    with pytest.raises(InvalidInput, match="90 bits"):
        KeySpace(250_000, 5)
