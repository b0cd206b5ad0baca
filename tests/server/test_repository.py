import re

import pytest

from hplm.errors import HplmError
from hplm.server.repository import model_names
from tests.server.plain_models import ECHO, add_model
from tests.support.message import mentioning


def test_all_models_of_a_repository_are_found(tmp_path):
    add_model(tmp_path, "two", ECHO)
    add_model(tmp_path, "one", ECHO)
    (tmp_path / "README.md").write_text("not a model")
    assert model_names(tmp_path) == ["one", "two"]


def test_a_folder_that_is_not_a_repository_is_refused_with_a_way_out(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name in ("absent", "file", "empty"):
        with pytest.raises(HplmError, match=mentioning(tmp_path / name, "hplm export")):
            model_names(tmp_path / name)


def test_the_error_for_the_folder_of_one_model_names_the_folder_above(tmp_path):
    add_model(tmp_path, "one", ECHO)
    with pytest.raises(HplmError, match=rf"{re.escape(str(tmp_path))}(?![\w/])"):
        model_names(tmp_path / "one")
