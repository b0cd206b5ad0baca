"""Damaged tables and records fail only the tenants, or only the texts, that need what is damaged."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from hplm.engine import views
from hplm.engine.backbone import Backbone
from hplm.engine.views import LONGEST_PAUSE
from hplm.errors import Broken
from hplm.plot.table import Table
from hplm.tenants.state import SECONDS_BETWEEN_LOOKS
from testing.random_store import SPECIAL
from testing.toy import WORDS, Toy
from tests.engine.asker import Asker
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow


def test_a_flipped_bit_of_a_table_fails_only_texts_that_read_its_row(toy, tmp_path, reference):
    folder = _copy(toy, tmp_path)
    table = Table(folder / "plot/bio/1")
    windows = table.space.unpack(table.index.by_row())
    row = int(np.flatnonzero((windows > len(SPECIAL)).all(1))[0])  # three words
    words = " ".join(WORDS[token - 1 - len(SPECIAL)] for token in windows[row])
    values = folder / "plot/bio/1/values"
    content = np.fromfile(values, dtype=np.uint8)
    content[(row + 1) * table.meta.row_bytes + 5] ^= 1
    values.unlink()  # exported files are hard links to the store's
    content.tofile(values)
    asker = Asker(folder)
    failed = asker.wait(asker.ask("acme", [words]))
    assert isinstance(failed, Broken)
    assert mentions(failed, "'acme'", row + 1, "bio/1")
    for tenant in ("beta", "city"):
        (served,) = asker.wait(asker.ask(tenant, [words]))
        np.testing.assert_allclose(served.logits, reference.forward(words, tenant), atol=1e-3)
    mixed = [asker.ask(tenant, [words]) for tenant in ("city", "acme", "beta", "acme", "city")]
    assert [isinstance(asker.wait(number), Broken) for number in mixed] == [False, True, False, True, False]
    asker.close()


def test_a_truncated_table_fails_only_its_own_tenants(toy, tmp_path, reference):
    folder = _copy(toy, tmp_path)
    values = folder / "plot/bio/1/values"
    shorter = values.read_bytes()[:-2]
    values.unlink()
    values.write_bytes(shorter)
    asker = Asker(folder)
    with pytest.raises(Broken, match=mentioning("bio/1/values", len(shorter))):
        asker.ask("acme", [WORDS[0]])
    (served,) = asker.wait(asker.ask("beta", [WORDS[0]]))
    np.testing.assert_allclose(served.logits, reference.forward(WORDS[0], "beta"), atol=1e-3)
    asker.close()


def test_a_broken_table_is_tried_again_after_pauses_that_grow(toy, tmp_path, monkeypatch):
    """Each try reads its index, and holds up what else the process does."""
    folder = _copy(toy, tmp_path)
    values = folder / "plot/bio/1/values"
    whole = values.read_bytes()
    values.unlink()
    values.write_bytes(whole[:-2])
    clock, tries, forest = SimpleNamespace(now=100.0), [], views.Forest
    monkeypatch.setattr(views, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(views, "Forest", lambda *args: tries.append(clock.now) or forest(*args))

    def look(times):
        tries.clear()
        for _ in range(times):
            clock.now += SECONDS_BETWEEN_LOOKS
            backbone.refresh()
        return len(tries)

    backbone = Backbone(folder)
    assert 5 < look(500) < 20 and len(backbone.view.forest.failures()) == 1
    pauses = np.diff(tries)
    assert pauses[0] < 1 and (np.diff(pauses) > -SECONDS_BETWEEN_LOOKS).all() and pauses[-1] < LONGEST_PAUSE + 1
    values.write_bytes(whole)
    assert look(int(LONGEST_PAUSE / SECONDS_BETWEEN_LOOKS) + 1) == 1 and not backbone.view.forest.failures()
    assert look(100) == 0


def _copy(toy: Toy, tmp_path):
    return shutil.copytree(toy.folder, tmp_path / "1")


@pytest.mark.parametrize("damage", ["gone", "a folder", "cut off", "another byte"])
def test_a_broken_record_fails_only_its_tenant(toy, tmp_path, reference, damage):
    folder = _copy(toy, tmp_path)
    record = Backbone(folder).view.snapshot.find("acme").adapter
    file = folder / Backbone.RECORDS / record.file
    data = bytearray(file.read_bytes())
    file.unlink()
    if damage == "a folder":
        file.mkdir()
    elif damage != "gone":
        data[record.offset + 200] ^= 1
        file.write_bytes(data[: record.offset + 200] if damage == "cut off" else data)
    asker = Asker(folder)
    numbers = [(tenant, asker.ask(tenant, [WORDS[7]])) for tenant in ("acme", "city", "acme", "dune", "beta")]
    for tenant, number in numbers:
        answer = asker.wait(number)
        if tenant == "acme":
            assert isinstance(answer, Broken) and mentions(answer, "'acme'", file.name)
        else:
            np.testing.assert_allclose(answer[0].logits, reference.forward(WORDS[7], tenant), atol=1e-3)
    asker.close()
