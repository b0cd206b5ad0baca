"""Writing tables: continued after an interruption to the same bytes, a full disk, and rows of an older version."""

import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hplm.errors import InvalidInput
from hplm.model.windows import Window
from hplm.plot.keys import KeySpace
from hplm.plot.room import NoSpace
from hplm.plot.table import Table
from hplm.plot.writing import write_table
from tests.plot.tables import HIDDEN, make_table, spec_of, values_by
from tests.support.message import mentioning

pytestmark = pytest.mark.slow

SPACE = KeySpace(300, Window(3))
KEYS = SPACE.unigrams()

# Kills itself in the middle of the given call, without any clean-up.
KILLED = """
import os, signal, sys
from pathlib import Path
import hplm.plot.writing as writing
from tests.plot.test_writing import write
module, name, call = sys.argv[2].split(":")
place = getattr(writing, module) if module else writing
real, calls = getattr(place, name), 0
def dying(*a, **k):
    global calls
    calls += 1
    if calls == int(call):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*a, **k)
setattr(place, name, dying)
write(Path(sys.argv[1]), resume=True)
"""


def write(folder: Path, resume: bool, computed=None, **more) -> Table:
    values = values_by(1, SPACE.window)

    def values_of(windows):
        if computed is not None:
            computed.append(len(windows))
        return values(windows)

    return write_table(folder / "d" / "1", spec_of("d", None, SPACE), KEYS, values_of, batch=32, resume=resume, **more)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "where", [":Encoder:1", "_Drafts:append:1", "_Drafts:_add:8", "_Drafts:_add:21", ":write_index:1", ":_sync:1", ":_sync:6"]
)
def test_after_a_kill_anywhere_it_ends_with_the_same_bytes(tmp_path, where):
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "cut"), where], timeout=120, cwd=Path(__file__).parents[2]
    )
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "cut/d/1").exists()
    write(tmp_path / "cut", resume=True)
    write(tmp_path / "whole", resume=False)
    assert content(tmp_path / "cut/d/1") == content(tmp_path / "whole/d/1")
    assert set(content(tmp_path / "cut/d/1")) == {"meta.json", *Table(tmp_path / "cut/d/1").meta.sizes()}
    assert not list(tmp_path.glob("cut/d/*.writing"))


def test_finished_values_are_computed_again_only_if_they_are_damaged(tmp_path, monkeypatch):
    for damaged, expected in ((None, 300 - 4 * 32), (70, 300 - 2 * 32)):
        folder = tmp_path / str(damaged)
        with monkeypatch.context() as patch:
            patch.setattr("hplm.plot.writing.write_index", _no_power)
            with pytest.raises(InterruptedError):
                write(folder, resume=True)
        work = folder / "d/1.writing"
        with open(work / "values", "r+b") as values:
            values.truncate((1 + 4 * 32 + 5) * 3 * HIDDEN * 2)
            if damaged is not None:
                values.seek((1 + damaged) * 3 * HIDDEN * 2)
                values.write(b"\xff")
        computed = []
        write(folder, resume=True, computed=computed)
        assert sum(computed) == expected


def _no_power(*_):
    raise InterruptedError


def test_a_full_disk_keeps_finished_values_and_says_how_much_is_needed(tmp_path):
    old = make_table(tmp_path, "old", None, SPACE, [(0, i, 0) for i in range(1, 5)])
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))  # files cannot grow, as on a full disk
    try:
        with pytest.raises(NoSpace, match=mentioning(tmp_path / "d/1.writing")):
            write(tmp_path, resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    Table(old.folder).verify()
    assert not (tmp_path / "d/1").exists()
    write(tmp_path, resume=True)
    write(tmp_path / "whole", resume=False)
    assert content(tmp_path / "d/1") == content(tmp_path / "whole/d/1")


def test_known_rows_are_copied_byte_for_byte(tmp_path):
    for dtype in ("fp16", "int8"):
        known = make_table(tmp_path / dtype, "d", None, SPACE, [(0, i, 0) for i in range(1, 100, 2)], dtype, seed=1)
        computed = []

        def values_of(windows, computed=computed):
            computed.extend(windows[:, 1].tolist())
            return torch.ones(len(windows), 3, HIDDEN)

        spec = spec_of("d", None, SPACE, dtype, version=2)
        table = write_table(tmp_path / dtype / "d/2", spec, KEYS, values_of, batch=32, known=known)
        old = table.find(SPACE.pack(np.array([[0, 51, 0]])))
        assert (table.rows.raw(old) == known.rows.raw(known.find(SPACE.pack(np.array([[0, 51, 0]]))))).all()
        assert sorted(computed) == [i for i in range(1, 301) if i >= 100 or i % 2 == 0]
        table.verify()


def test_vectors_that_int8_cannot_represent_are_refused(tmp_path):
    spec = replace(spec_of("d", None, SPACE, "int8"), hidden=4096)
    vectors = torch.randn(3, 4096, generator=torch.Generator().manual_seed(0))
    vectors[:, 0], vectors[:, 1] = 2000, -2000  # two numbers take the whole range
    with pytest.raises(InvalidInput, match=mentioning("int8", "'d'", "--dtype", "fp16", "bf16")):
        write_table(tmp_path / "d/1", spec, KEYS, lambda windows: vectors.expand(len(windows), -1, -1))


@pytest.mark.parametrize("number", [float("nan"), 1e6])  # the second is more than fp16 holds
def test_nan_and_numbers_too_large_are_refused(tmp_path, number):
    def values_of(windows):
        values = torch.ones(len(windows), 3, HIDDEN)
        values[-1, 1, 2] = number
        return values

    with pytest.raises(InvalidInput, match=mentioning("fp16", "'d'", "nan")):
        write_table(tmp_path / "d/1", spec_of("d", None, SPACE), KEYS, values_of)


def test_int8_reports_how_close_stored_values_are(tmp_path):
    table = make_table(tmp_path, "d", None, SPACE, [(0, i, 0) for i in range(1, 301)], "int8")
    assert 0.999 <= table.meta.least_cosine < 1
