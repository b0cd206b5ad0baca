"""What has its name in a store is complete."""

import os
from pathlib import Path

from hplm.model.windows import TRIGRAMS
from tests.builder.branches import make_store


def test_a_store_is_made_of_files_that_were_synced_before_they_got_their_names(tmp_path, monkeypatch):
    synced, named, fsync, replace = [], {}, os.fsync, os.replace

    def noted(handle):
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def moved(source, target):
        assert synced[-1] == str(source)
        named[str(Path(target).relative_to(tmp_path))] = len(named)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "replace", moved)
    store = make_store(tmp_path, TRIGRAMS)
    written = {str(path.relative_to(tmp_path)) for path in store.folder.rglob("*") if path.is_file()}
    assert written == set(named) and list(named)[-1] == "store/store.json"
