"""Damaged tables and records fail only the tenants, or only the texts, that need what is damaged."""

import shutil

import numpy as np
import pytest

from hplm.engine.backbone import Backbone
from hplm.errors import Broken
from hplm.plot.table import Table
from hplm.registry.follower import LONGEST_PAUSE
from hplm.tenants.state_folder import SECONDS_BETWEEN_LOOKS
from testing.random_store import SPECIAL
from testing.toy import WORDS
from tests.engine.asker import Asker
from tests.support.message import mentions
from tests.support.wait import Clock

pytestmark = pytest.mark.slow


def harm(file, how, at):
    """Harms a file of an export, of which the store may have hard links."""
    data = bytearray(file.read_bytes())
    file.unlink()
    if how == "a folder":
        file.mkdir()
    elif how != "gone":
        data[at] ^= 1
        file.write_bytes(data[:at] if how == "cut off" else data)


RECORDS = {  # of which tenant, and which one
    "adapter": ("acme", lambda tenant: tenant.adapter),
    "exits": ("flux", lambda tenant: tenant.exits.record),
    "student": ("iris", lambda tenant: tenant.students.members[-1].adapter),
}
HARMS = [("adapter", how) for how in ("gone", "a folder", "cut off", "another byte")]
HARMS += [(part, "another byte") for part in ("exits", "student", "table")]


@pytest.mark.parametrize("part, how", [*HARMS, ("table", "cut off")])
def test_only_the_tenants_and_texts_that_need_what_is_broken_fail(toy, tmp_path, reference, part, how):
    """A broken table is found when it is opened or a row of it is read, a broken record when it is brought."""
    folder, words = shutil.copytree(toy.folder, tmp_path / "1"), WORDS[7]
    table = Table(folder / "plot/bio/1")
    if part != "table":
        fails, record_of = RECORDS[part]
        record = record_of(Backbone(folder).view.snapshot.find(fails))
        file, at = folder / Backbone.RECORDS / record.file, record.offset + 7
        named = [f"'{fails}'", file.name]
    else:
        fails, windows = "acme", table.space.unpack(table.index.by_row())
        row = int(np.flatnonzero((windows > len(SPECIAL)).all(1))[0])  # three words
        words = " ".join(WORDS[token - 1 - len(SPECIAL)] for token in windows[row])
        file, at = folder / "plot/bio/1/values", (row + 1) * table.meta.row_bytes + 5
        named = ["bio/1", row + 1] if how == "another byte" else ["bio/1/values", at]
    harm(file, how, at)
    asker = Asker(folder)

    def ask(tenant):
        try:
            return asker.ask(tenant, [words])
        except Broken as error:
            return error

    for tenant, asked in [(tenant, ask(tenant)) for tenant in ("acme", "city", "flux", "iris", "dune", "beta", "acme")]:
        answer = asker.wait(asked) if isinstance(asked, int) else asked
        if tenant == fails or (tenant == "dune" and part == "table"):  # it has acme's domain
            assert isinstance(answer, Broken) and mentions(answer, *named)
        else:
            np.testing.assert_allclose(answer[0].logits, reference.forward(words, tenant), atol=1e-3)
    asker.close()


def test_a_broken_table_is_tried_again_after_pauses_that_grow(toy, tmp_path):
    """Each try reads its index, and holds up what else the process does."""
    folder = shutil.copytree(toy.folder, tmp_path / "1")
    values = folder / "plot/bio/1/values"
    whole = values.read_bytes()
    values.unlink()
    values.write_bytes(whole[:-2])
    clock = Clock(100.0)
    backbone = Backbone(folder, clock=clock)

    def tries(looks):
        """Returns when it was tried again, which gives a new view."""
        found = []
        for _ in range(looks):
            before = backbone.view
            clock.sleep(SECONDS_BETWEEN_LOOKS)
            backbone.refresh()
            found += [clock.seconds] * (backbone.view is not before)
        return found

    pauses = np.diff(tries(500))
    assert 4 < len(pauses) < 19 and len(backbone.view.forest.failures()) == 1
    assert pauses[0] < 1 and (np.diff(pauses) > -SECONDS_BETWEEN_LOOKS).all() and pauses[-1] < LONGEST_PAUSE + 1
    values.write_bytes(whole)
    assert len(tries(int(LONGEST_PAUSE / SECONDS_BETWEEN_LOOKS) + 1)) == 1 and not backbone.view.forest.failures()
    assert not tries(100)
