"""What an operator may choose is checked by name."""

import pytest

from hplm.engine.settings import Settings
from hplm.errors import InvalidInput
from tests.engine.asker import PARAMETERS


@pytest.mark.parametrize(
    "name, value",
    [
        ("device", "tpu9"), ("dtype", "fp8"), ("slots", "1"), ("batch_tokens", "many"), ("queue_mb", "0"),
        ("commit_ms", "soon"), ("commit_ms", "-1"), ("commit_ms", "nan"), ("overlap", "none"), ("admission", "perhaps"),
    ],
)  # fmt: skip
def test_a_parameter_that_makes_no_sense_is_refused_by_name(name, value):
    with pytest.raises(InvalidInput, match=f"{name}.*'{value}'"):
        Settings.read({**PARAMETERS, name: value})


def test_a_repository_without_a_parameter_is_to_be_exported_again():
    with pytest.raises(InvalidInput, match=r"'packing' is missing in .*: export the repository again"):
        Settings.read({name: value for name, value in PARAMETERS.items() if name != "packing"})
