"""A server that may not write to its state, as one with a read-only volume."""

import errno
import os
from contextlib import closing

import pytest

from hplm.engine.backbone import Backbone
from hplm.engine.views import Watch
from hplm.errors import NoTenant
from hplm.tenants.manager import Manager
from hplm.tenants.state import Reader
from tests.support.wait import eventually


def test_it_takes_each_change_and_no_manager_waits_for_it(toy, tmp_path, monkeypatch):
    def refused(reader, generation):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Reader, "say", refused)
    live = Manager.open(toy.repository, tmp_path)
    live.registry.begin()
    backbone = Backbone(toy.folder, tmp_path)
    with closing(Watch(backbone)):
        live.delete("acme")
        assert live.settle_now() == []
        eventually(lambda: backbone.view.snapshot.generation == live.state.current())
    with pytest.raises(NoTenant):
        backbone.view.snapshot.find("acme")
