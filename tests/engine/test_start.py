"""The engine starts while its registry changes."""

import pytest

from hplm.engine import served
from hplm.engine.served import open_engine
from hplm.engine.service import Service
from hplm.engine.settings import Settings
from hplm.tenants.manager import Manager
from tests.engine.asker import PARAMETERS
from tests.support.wait import eventually

pytestmark = pytest.mark.slow


def test_a_change_is_taken_while_the_engine_opens(toy, tmp_path, monkeypatch):
    live = Manager.open(toy.repository, tmp_path)
    live.registry.begin()

    def open_late(backbone, settings):
        live.delete("acme")
        eventually(lambda: backbone.view.snapshot.generation == live.state.current())
        return open_engine(backbone, settings)

    monkeypatch.setattr(served, "open_engine", open_late)
    service = Service([(toy.folder, Settings.read(PARAMETERS))], tmp_path)
    service.close()
