"""`hplm export --dtype auto` measures whether 8 bits are worth it, and records why."""

import re

import pytest

from builder.publish import precision
from builder.publish.model_configs import ServingOptions
from builder.publish.precision import EightBits, measure_eight_bits
from hplm.cli.main import main
from hplm.engine.settings import Settings
from hplm.errors import InvalidInput
from research.schemes.export import export_scheme
from tests.support.message import mentioning, mentions


@pytest.mark.parametrize(
    "speed, change, auto", [(1.5, 0.05, "int8"), (1.05, 0.05, "auto"), (0.5, 0.0, "auto"), (1.5, 0.2, "auto")]
)
def test_auto_is_int8_only_if_that_is_faster_and_close(speed, change, auto):
    assert EightBits("fp32", speed, change).auto == auto


def test_a_measurement_compares_with_what_auto_takes_otherwise(toy):
    measured = measure_eight_bits(toy.store, threads=1)
    assert measured.other in ("fp32", "bf16")
    assert measured.speed > 0
    assert 0 < measured.change < 0.02


def test_a_store_without_tenants_is_measured_on_its_root(toy, monkeypatch):
    monkeypatch.setattr(toy.store, "tenants", list)
    assert 0 < measure_eight_bits(toy.store, threads=1).change < 0.02


@pytest.mark.parametrize("measured", [EightBits("fp32", 1.75, 0.043), EightBits("fp32", 0.75, 0.043)], ids=["fast", "slow"])
def test_an_export_records_and_prints_the_measurement(toy, tmp_path, capsys, monkeypatch, measured):
    monkeypatch.setattr(precision, "measure_eight_bits", lambda store, threads: measured)
    assert main(["export", "--store", str(toy.store.folder), "--repository", str(tmp_path), "--device", "cpu"]) == 0
    config = (tmp_path / "toy-upper/config.pbtxt").read_text()
    parameters = dict(re.findall(r'key: "(\w+)"\s+value \{ string_value: "(.*?)" \}', config))
    is_fast = measured.speed > 1
    assert (Settings.read(parameters).precision.name == "int8") == is_fast
    for said in (config, capsys.readouterr().out):
        assert mentions(said, "int8", f"{measured.speed:.2f}", "4.3%")


def test_a_chosen_precision_is_not_measured(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(precision, "measure_eight_bits", lambda store, threads: pytest.fail("measured"))
    assert main(["export", "--store", str(toy.store.folder), "--repository", str(tmp_path), "--dtype", "int8"]) == 0


def test_whole_models_are_not_computed_in_eight_bits(toy, tmp_path):
    with pytest.raises(InvalidInput, match=mentioning("'dedicated_inprocess'", "int8")):
        export_scheme(toy.store, tmp_path, ServingOptions(dtype="int8"), "dedicated_inprocess")
