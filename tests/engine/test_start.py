"""The engine starts while its registry changes."""

from contextlib import ExitStack

import pytest

from hplm.engine import served
from hplm.engine.served import open_engine
from hplm.engine.service import Service
from hplm.engine.settings import Settings
from hplm.errors import NoTenant
from hplm.registry.store import place_of
from hplm.tenants.manager import Manager
from testing.bucket import bucket
from tests.engine.asker import PARAMETERS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("is_far", [False, True])
def test_the_first_answers_are_of_what_changed_while_the_engine_opened(toy, tmp_path, monkeypatch, is_far):
    """Also where the registry is a bucket, whose copy the engine's process makes."""
    with ExitStack() as stack:
        monkeypatch.setenv("HPLM_MIRROR", str(tmp_path / "copy"))
        stack.enter_context(bucket())
        place = place_of("s3://bucket/start") if is_far else tmp_path / "registry"
        live = Manager.open(toy.repository, place)
        live.registry.begin()

        def open_late(backbone, settings):
            live.delete("acme")
            return open_engine(backbone, settings)

        monkeypatch.setattr(served, "open_engine", open_late)
        service = Service([(toy.folder, Settings.read(PARAMETERS))], place)
        stack.callback(service.close)
        with pytest.raises(NoTenant):
            service.served[0].backbone.view.snapshot.find("acme")
