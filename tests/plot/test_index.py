"""The index against a dictionary, and damage in its files."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.errors import Broken
from hplm.plot.index import Index, write_index
from tests.support.message import mentioning


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(0, 300),
    words=st.integers(1, 2),
    spread=st.sampled_from([400, 2**20, 2**63]),
    part=st.sampled_from([7, 1 << 22]),
    seed=st.integers(0, 2**20),
)
def test_every_key_is_found_and_nothing_else(tmp_path_factory, count, words, spread, part, seed):
    folder = tmp_path_factory.mktemp("index")
    rng = np.random.default_rng(seed)
    drawn = np.unique(rng.integers(1, spread, (2 * count, words), dtype=np.uint64), axis=0)
    rng.shuffle(drawn)
    keys, others = drawn[:count], drawn[count:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hplm.plot.index.PART", part)
        patch.setattr("hplm.plot.index.CHUNK", 5)
        index = Index(folder, write_index(folder, keys))
    assert index.find(keys).tolist() == list(range(1, len(keys) + 1))
    assert not index.find(others).any()
    both = np.concatenate([others, keys])
    assert np.count_nonzero(index.find(both)) == len(keys)
    assert (index.by_row() == keys).all()


def test_writing_in_parts_gives_the_same_files(tmp_path, monkeypatch):
    keys = np.random.default_rng(0).integers(1, 2**60, (1000, 1), dtype=np.uint64)
    metas = []
    for name, part in (("whole", 1 << 22), ("parts", 64)):
        (tmp_path / name).mkdir()
        monkeypatch.setattr("hplm.plot.index.PART", part)
        metas.append(write_index(tmp_path / name, keys))
    assert metas[0] == metas[1]


@pytest.mark.parametrize("name", ["starts", "keys", "rows"])
def test_a_flipped_bit_is_detected_when_the_index_is_opened(tmp_path, name):
    keys = np.arange(1, 50, dtype=np.uint64)[:, None]
    meta = write_index(tmp_path, keys)
    content = bytearray((tmp_path / name).read_bytes())
    content[9] ^= 4
    (tmp_path / name).write_bytes(content)
    with pytest.raises(Broken, match=mentioning(tmp_path / name)):
        Index(tmp_path, meta)


@pytest.mark.parametrize("words", [1, 2])
def test_a_search_takes_no_more_memory_in_a_larger_index(tmp_path, words):
    peaks = {}
    for count in (1000, 100_000):
        keys = np.random.default_rng(0).permutation(np.arange(1, count * words + 1, dtype=np.uint64)).reshape(count, words)
        (tmp_path / str(count)).mkdir()
        index = Index(tmp_path / str(count), write_index(tmp_path / str(count), keys))
        asked = keys[:10]
        tracemalloc.start()
        assert index.find(asked).tolist() == list(range(1, 11))
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[100_000] < 2 * peaks[1000]  # the fullest bucket of the larger one has a few keys more
