"""The models of a repository, and folders that are none."""

import re

import pytest

from hplm.errors import HplmError
from hplm.server.repository import model_names
from tests.server.plain_models import ECHO, add_model
from tests.support.message import mentioning


def test_all_models_are_found_and_a_folder_that_is_no_repository_is_refused_with_a_way_out(tmp_path):
    for name in ("two", "one"):
        add_model(tmp_path, name, ECHO)
    (tmp_path / "README.md").write_text("not a model")
    assert model_names(tmp_path) == ["one", "two"]
    (tmp_path / "empty").mkdir()
    for name in ("absent", "README.md", "empty"):
        with pytest.raises(HplmError, match=mentioning(tmp_path / name, "hplm export")):
            model_names(tmp_path / name)
    with pytest.raises(HplmError, match=rf"{re.escape(str(tmp_path))}(?![\w/])"):  # the folder above
        model_names(tmp_path / "one")
