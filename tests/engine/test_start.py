"""Live state of an engine: what changes while it starts, and a server that may not write to it."""

import socket
from contextlib import ExitStack, closing

import pytest

from hplm.engine import served
from hplm.engine.backbone import Backbone
from hplm.engine.served import open_engine
from hplm.engine.service import EncoderService
from hplm.engine.settings import EncoderSettings
from hplm.errors import NoTenant
from hplm.location import location_of
from hplm.lookup.views import RegistryWatcher
from hplm.tenants.manager import Manager
from testing.bucket import bucket
from tests.engine.asker import PARAMETERS
from tests.support.wait import eventually

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("is_far", [False, True])
def test_the_first_answers_are_of_what_changed_while_the_engine_opened(toy, tmp_path, monkeypatch, is_far):
    """Also where the registry is a bucket, whose copy the engine's process makes."""
    with ExitStack() as stack:
        monkeypatch.setenv("HPLM_MIRROR", str(tmp_path / "copy"))
        stack.enter_context(bucket())
        place = location_of("s3://bucket/start") if is_far else tmp_path / "registry"
        live = Manager.open(toy.repository, place)
        live.registry.begin()

        def open_late(backbone, settings):
            live.delete("acme")
            return open_engine(backbone, settings)

        monkeypatch.setattr(served, "open_engine", open_late)
        service = EncoderService(toy.folder, EncoderSettings.read(PARAMETERS), place)
        stack.callback(service.close)
        with pytest.raises(NoTenant):
            service.served.backbone.view.snapshot.find("acme")


def test_a_server_with_a_read_only_volume_takes_each_change_and_no_manager_waits_for_it(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "/sys/server")  # its file would be where nobody may make one
    live = Manager.open(toy.repository, tmp_path)
    live.registry.begin()
    backbone = Backbone(toy.folder, tmp_path)
    with closing(RegistryWatcher(backbone)):
        live.delete("acme")
        assert live.settle() == []
        eventually(lambda: backbone.view.snapshot.generation == live.state.current())
    with pytest.raises(NoTenant):
        backbone.view.snapshot.find("acme")
