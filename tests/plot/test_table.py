"""The description of a table is checked when it is read."""

import json

import pytest

from hplm.errors import Broken
from hplm.model.windows import Window
from hplm.plot.keys import KeySpace
from hplm.plot.table import Table
from tests.plot.tables import make_table
from tests.support.message import mentioning


@pytest.mark.parametrize("vocabulary", [None, 0, "many", 2**70])
def test_a_vocabulary_that_no_key_can_hold_is_refused(tmp_path, vocabulary):
    folder = make_table(tmp_path, "root", None, KeySpace(40, Window(3)), [(1, 2, 3)]).folder
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"vocabulary": vocabulary}))
    with pytest.raises(Broken, match=mentioning(folder / "meta.json")):
        Table(folder)
