"""Tables are written, and go on after an interruption, to the same bytes; damaged ones are refused."""

import resource
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hplm.disk import NoSpace
from hplm.errors import Broken, InvalidInput
from hplm.model.windows import Window
from hplm.plot.keys import KeySpace
from hplm.plot.rows import CODINGS, LEAST_COSINE, closeness
from hplm.plot.table import Table
from hplm.plot.writing import write_table
from tests.plot.tables import HIDDEN, make_table, spec_of, values_by
from tests.support.killed import content
from tests.support.message import mentioning

pytestmark = pytest.mark.slow

SPACE = KeySpace(300, Window(3))
KEYS = SPACE.unigrams()


def write(folder: Path, most: int = 300) -> list[int]:
    """Returns how many values each batch computed. It is cut before it computes more than `most`."""
    values, computed = values_by(1, SPACE.window), []

    def values_of(windows):
        computed.append(len(windows))
        if sum(computed) > most:
            raise InterruptedError
        return values(windows)

    write_table(folder / "d" / "1", spec_of("d", None, SPACE), KEYS, values_of, batch=32)
    return computed


def test_after_a_cut_it_ends_with_the_same_bytes_and_finished_values_are_computed_again_only_if_damaged(tmp_path):
    write(tmp_path / "whole")
    for damaged, expected in ((None, 300 - 4 * 32), (70, 300 - 2 * 32)):
        folder = tmp_path / str(damaged)
        with pytest.raises(InterruptedError):
            write(folder, most=6 * 32)
        work = folder / "d/1.writing"
        with open(work / "values", "r+b") as values:
            values.truncate((1 + 4 * 32 + 5) * 3 * HIDDEN * 2)
            if damaged is not None:
                values.seek((1 + damaged) * 3 * HIDDEN * 2)
                values.write(b"\xff")
        assert sum(write(folder)) == expected
        assert content(folder) == content(tmp_path / "whole")


def test_a_full_disk_keeps_finished_values_and_says_how_much_is_needed(tmp_path):
    old = make_table(tmp_path, "old", None, SPACE, [(0, i, 0) for i in range(1, 5)])
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))  # files cannot grow, as on a full disk
    try:
        with pytest.raises(NoSpace, match=mentioning(tmp_path / "d/1.writing")):
            write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    Table(old.folder).verify()
    assert not (tmp_path / "d/1").exists()
    write(tmp_path)
    write(tmp_path / "whole")
    assert content(tmp_path / "d") == content(tmp_path / "whole/d")


def test_verify_names_a_row_with_a_flipped_bit(table):
    values = table.folder / "values"
    content = bytearray(values.read_bytes())
    content[7 * table.meta.row_bytes + 3] ^= 1
    values.write_bytes(content)
    with pytest.raises(Broken, match=mentioning(7, values)):
        Table(table.folder).verify()


def test_known_rows_are_copied_byte_for_byte(tmp_path):
    for dtype in ("fp16", "int8"):
        known = make_table(tmp_path / dtype, "d", None, SPACE, [(0, i, 0) for i in range(1, 100, 2)], dtype, seed=1)
        computed = []

        def values_of(windows, computed=computed):
            computed.extend(windows[:, 1].tolist())
            return torch.ones(len(windows), 3, HIDDEN)

        spec = spec_of("d", None, SPACE, dtype, version=2)
        table = write_table(tmp_path / dtype / "d/2", spec, KEYS, values_of, batch=32, known=known)
        old, copied = (one.rows.raw(one.index.find(SPACE.pack(np.array([[0, 51, 0]])))) for one in (known, table))
        assert (old == copied).all()
        assert sorted(computed) == [i for i in range(1, 301) if i >= 100 or i % 2 == 0]
        table.verify()


def outliers(windows):
    vectors = torch.randn(3, 4096, generator=torch.Generator().manual_seed(0))
    vectors[:, 0], vectors[:, 1] = 2000, -2000  # two numbers take the whole range
    return vectors.expand(len(windows), -1, -1)


def with_a(number):
    def values_of(windows):
        values = torch.ones(len(windows), 3, HIDDEN)
        values[-1, 1, 2] = number
        return values

    return values_of


@pytest.mark.parametrize(
    "dtype, hidden, values, named",
    [
        ("int8", 4096, outliers, ["int8", "--dtype", "fp16", "bf16"]),
        ("fp16", HIDDEN, with_a(float("nan")), ["fp16", "nan"]),
        ("fp16", HIDDEN, with_a(1e6), ["fp16", "nan"]),  # more than fp16 holds
    ],
)
def test_vectors_that_the_type_cannot_hold_are_refused(tmp_path, dtype, hidden, values, named):
    spec = replace(spec_of("d", None, SPACE, dtype), hidden=hidden)
    with pytest.raises(InvalidInput, match=mentioning("'d'", *named)):
        write_table(tmp_path / "d/1", spec, KEYS, values)


GRAMS = [(0, i, 0) for i in range(1, 51)]


@pytest.fixture
def table(tmp_path):
    return make_table(tmp_path, "root", None, KeySpace(50, Window(3)), GRAMS)


def test_a_file_with_a_flipped_bit_or_without_its_end_is_refused_by_name(table):
    for name in ("values", "checksums", "keys", "rows", "starts"):
        path = table.folder / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-2])
        with pytest.raises(Broken, match=mentioning(path, len(whole) - 2, len(whole))):
            Table(table.folder)
        if name in ("keys", "rows", "starts"):
            path.write_bytes(whole[:9] + bytes([whole[9] ^ 4]) + whole[10:])
            with pytest.raises(Broken, match=mentioning(path)):
                _ = Table(table.folder).index
        path.write_bytes(whole)


@pytest.mark.parametrize("name", CODINGS)
def test_stored_values_are_close_to_computed_ones(name):
    vectors = torch.randn(200, 3, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 200)[:, None, None]
    vectors[5, 1] = 0
    spec = replace(spec_of("d", None, SPACE, name), hidden=64)
    kind = CODINGS[name]
    typed = kind.typed(kind.encode(vectors))
    assert typed.shape[0] == 600 and kind.encode(vectors).shape[1] == spec.vector_bytes
    decoded = kind.decode(typed).view_as(vectors)
    assert closeness(vectors, decoded) >= LEAST_COSINE
    assert (decoded[5, 1] == 0).all()
