"""Calibrations of the store: published, rolled back and saved with their tenants, and checked."""

from dataclasses import replace

import pytest

from builder.publish.live import add_tenant, update_tenant
from hplm.errors import InvalidInput
from hplm.levels.calibration import DIRICHLET, Calibration
from hplm.tenants.backup import back_up, restore
from hplm.tenants.manager import Manager
from tests.cli.commands import refused, run
from tests.places import calibrate, knowledge
from tests.support.message import mentioning, mentions

WARM, HOT = Calibration(temperature=1.5), Calibration(temperature=3.0)
PAIR = Calibration(DIRICHLET, weights=((1.0, 0.0), (0.0, 1.0)), bias=(0.0, 0.0))  # for two labels


def test_the_same_version_with_another_calibration_is_published_again_and_rolled_back(place, tmp_path):
    store, *places = place
    live = Manager.open(*places)
    calibrate(store, "new-a", WARM)
    first = add_tenant(live, store, "new-a")
    calibrate(store, "new-a", HOT)
    second = update_tenant(live, store, "new-a")
    assert second.after > first.after and live.current().find("new-a").calibration == HOT
    back_up(live, tmp_path / "backup")
    restored = Manager.open(places[0], tmp_path / "restored")
    restore(tmp_path / "backup", restored.registry)
    assert restored.current().find("new-a").calibration == HOT
    live.roll_back("new-a")
    assert live.current().find("new-a").calibration == WARM


def test_one_that_does_not_fit_or_cannot_be_read_is_named(place, capsys):
    store, *places = place
    with pytest.raises(InvalidInput, match=mentioning("'tenant-1'", 3)):  # it has three labels
        Manager.open(*places).update("tenant-1", replace(knowledge(store, "tenant-1"), calibration=PAIR))
    calibrate(store, "tenant-1", WARM)
    run(capsys, "verify", "--store", store.folder)
    calibrate(store, "tenant-1", PAIR)
    assert mentions(refused(capsys, "verify", "--store", store.folder), "tenant-1/1", 3)
