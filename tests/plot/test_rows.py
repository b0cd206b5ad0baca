"""Stored rows are checked when first read, read ahead, locked and preloaded; and how much precision they lose."""

import numpy as np
import pytest
import torch

from hplm.errors import Broken, InvalidInput
from hplm.model.windows import Window
from hplm.plot import rows as rows_module
from hplm.plot.keys import KeySpace
from hplm.plot.table import Table
from hplm.plot.values import CODINGS, LEAST_COSINE, closeness, coding
from hplm.plot.widths import vector_bytes
from tests.plot.tables import make_table
from tests.support.message import mentioning

SPACE = KeySpace(50, Window(3))
GRAMS = [(0, i, 0) for i in range(1, 51)]


@pytest.fixture
def table(tmp_path):
    return make_table(tmp_path, "root", None, SPACE, GRAMS)


def _flip(table, row):
    values = table.folder / "values"
    content = bytearray(values.read_bytes())
    content[row * table.meta.row_bytes + 3] ^= 1
    values.write_bytes(content)
    return Table(table.folder)


def test_a_truncated_file_is_refused_by_name(table):
    for name in ("values", "checksums", "keys", "rows", "starts"):
        whole = (table.folder / name).read_bytes()
        (table.folder / name).write_bytes(whole[:-2])
        with pytest.raises(Broken, match=mentioning(table.folder / name, len(whole) - 2, len(whole))):
            Table(table.folder)
        (table.folder / name).write_bytes(whole)


def test_a_flipped_bit_is_detected_when_its_row_is_first_read(table):
    table.verify()
    broken = _flip(table, 7)
    assert not len(broken.rows.touch(np.array([1, 6, 8, 8, 50, 0])))
    for _ in range(2):
        assert broken.rows.touch(np.array([1, 7, 8])).tolist() == [7]


def test_a_flipped_bit_is_found_by_verify(table):
    with pytest.raises(Broken, match=mentioning(7, table.folder / "values")):
        _flip(table, 7).verify()


def test_rows_are_read_ahead_once_and_again_after_memory_was_short(table, monkeypatch):
    advised = []
    real = rows_module.os.posix_fadvise
    monkeypatch.setattr(rows_module.os, "posix_fadvise", lambda *a: (advised.append(a[1]), real(*a)))
    stride = table.meta.row_bytes
    table.rows.touch(np.array([3, 5, 3]))
    table.rows.touch(np.array([5, 9]))
    assert advised == [3 * stride, 5 * stride, 9 * stride]
    index = torch.tensor([[9, 15, 27]])
    table.rows.bags(index, torch.float32)
    table.rows.touch(np.array([3, 5, 9]))
    assert len(advised) == 3
    usage = iter([0, 1])  # the second call reports a page fault that had to wait for the disk
    monkeypatch.setattr(rows_module, "disk_faults", lambda: next(usage))
    table.rows.bags(index, torch.float32)
    table.rows.touch(np.array([3, 9]))
    assert advised[3:] == [3 * stride, 9 * stride]


def test_the_error_of_locking_too_much_says_how_much_is_needed(table, monkeypatch):
    table.rows.lock(10)  # some kilobytes: every machine allows it
    monkeypatch.setattr(rows_module, "_libc", type("Libc", (), {"mlock": staticmethod(lambda *_: -1)}))
    with pytest.raises(InvalidInput, match=mentioning(51, "ulimit -l")):
        table.rows.lock(1_000_000)


def test_preloading_reads_every_row_and_changes_none(table, monkeypatch):
    read, pread = [], rows_module.os.pread
    monkeypatch.setattr(rows_module.os, "pread", lambda file, size, at: read.append(size) or pread(file, size, at))
    table.rows.preload(10)
    table.rows.preload()
    assert read == [10 * table.meta.row_bytes, table.meta.sizes()["values"]]
    fresh = Table(table.folder)
    assert torch.equal(table.rows.vectors(4), fresh.rows.vectors(4))


@pytest.mark.parametrize("name", CODINGS)
def test_stored_values_are_close_to_computed_ones(name):
    vectors = torch.randn(200, 3, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 200)[:, None, None]
    vectors[5, 1] = 0
    kind = coding(name)
    typed = kind.typed(kind.encode(vectors))
    assert typed.shape[0] == 600 and kind.encode(vectors).shape[1] == vector_bytes(name, 64)
    decoded = kind.decode(typed).view_as(vectors)
    assert closeness(vectors, decoded) >= LEAST_COSINE
    assert (decoded[5, 1] == 0).all()


def test_int8_loses_small_values_beside_an_outlier():
    vectors = torch.ones(1, 1, 64) * 0.1
    vectors[0, 0, ::2] = -0.1
    vectors[0, 0, 0] = 0.9
    assert closeness(vectors, coding("int8").decode(coding("int8").encode(vectors)).view_as(vectors)) > LEAST_COSINE
    vectors[0, 0, 0] = 100
    kept = coding("int8").decode(coding("int8").encode(vectors)).view_as(vectors)
    assert closeness(vectors[..., 1:], kept[..., 1:]) < LEAST_COSINE  # without the outlier, which would hide the loss


def test_an_unknown_dtype_is_refused():
    with pytest.raises(InvalidInput, match=mentioning("'fp8'", "fp16", "bf16", "int8")):
        coding("fp8")
