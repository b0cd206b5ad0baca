"""What a folder and a bucket promise alike: CURRENT is overwritten by who has seen it, and other objects have one content."""

from pathlib import Path
from unittest import mock

import pytest

from hplm.errors import Broken, InvalidInput
from hplm.location import Remote, local_folder, location_of
from hplm.registry.opening import opened
from hplm.registry.pointer import Pointer, begin, is_begun
from hplm.registry.store import Absent, Away, Conflict
from testing.bucket import bucket
from tests.support.message import mentions, refusing


@pytest.fixture(params=["folder", "bucket"])
def place(request, tmp_path):
    if request.param == "folder":
        yield tmp_path / "some" / "toy"
        return
    with bucket():
        yield location_of("s3://bucket/some") / "toy"


def test_only_who_has_seen_current_overwrites_it(place):
    one, other = opened(place), opened(place)
    with pytest.raises(Absent):
        one.current()
    one.swap(b"1", None)
    with pytest.raises(Conflict):
        other.swap(b"2", None)
    content, seen = other.current()
    assert content == b"1" and one.current(seen) is None
    other.swap(b"2", seen)
    with pytest.raises(Conflict):
        one.swap(b"3", seen)
    assert one.current(seen)[0] == b"2"


def test_objects_are_put_listed_copied_and_deleted(place, tmp_path):
    store, file = opened(place), tmp_path / "values"
    file.write_bytes(b"rows")
    store.put("records/a", b"one")
    store.put("plot/bio/1-x/values", file)
    assert store.get("records/a") == b"one"
    assert [(found.name, found.size) for found in store.names("plot")] == [("plot/bio/1-x/values", 4)]
    with mock.patch("hplm.registry.bucket.BLOCK", 3), mock.patch("obstore.get", None):  # in pieces: each has its own time
        store.fetch("plot/bio/1-x/values", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"rows"
    store.delete(["plot/bio/1-x/values", "records/none"])
    assert not list(store.names("plot")) and [found.name for found in store.names("records")] == ["records/a"]
    for ask in (lambda: store.get("records/b"), lambda: store.fetch("records/b", tmp_path / "b")):
        with refusing(Absent, f"{place}/records/b"):
            ask()
    store.swap(b"1", None)  # although folders are gone


def test_a_registry_is_begun_once_and_not_where_one_is_lost(place):
    store = opened(place)
    assert begin(store, 7.0) and not begin(opened(place))
    pointer = Pointer.read(store.current()[0], store)
    assert (pointer.generation, pointer.lease_s, pointer.snapshot) == (0, 7.0, "")
    store.put("snapshots/1-x", b"{}")
    store.delete(["CURRENT"])
    with refusing(InvalidInput, place, "CURRENT", "restore"):
        begin(store)
    assert not is_begun(store, anew=True)


def test_a_bucket_that_does_not_exist_is_named():
    with bucket(), refusing(Absent, "s3://none/toy/CURRENT"):
        opened(location_of("s3://none/toy")).current()


def test_a_bucket_without_credentials_says_which_to_set(monkeypatch):
    with bucket() as server, server.stopped(), monkeypatch.context() as patch:
        store = opened(location_of("s3://bucket/toy"))
        for is_given in (True, False):
            with refusing(Away, "s3://bucket/toy/CURRENT") as refused:
                store.current()
            assert mentions(refused.value, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY") != is_given
            patch.delenv("AWS_ACCESS_KEY_ID", raising=False)


def test_places_are_folders_or_addresses(tmp_path, monkeypatch):
    assert location_of("state") / "toy" == local_folder(location_of("state/toy"))
    remote = location_of("s3://bucket/hplm/")
    assert isinstance(remote, Remote) and str(remote / "toy") == "s3://bucket/hplm/toy"
    monkeypatch.setenv("HPLM_MIRROR", str(tmp_path))
    assert local_folder(remote).parent == tmp_path and local_folder(remote) != local_folder(remote / "toy")
    assert location_of("./s3:/x") == Path("s3:/x") and location_of("s3/x") == Path("s3/x")
    for wrong in ("ftp://host/x", "memory://x", "s3://", "s3:/bucket/x", "s3//bucket/hplm", "GS:/x", "az:x"):
        with refusing(InvalidInput, wrong, "s3://bucket/folder"):
            location_of(wrong)


NONE, BELOW = (f'{{"generation": {number}, "lineage": "a"}}'.encode() for number in (1, -1))
OTHER = b'{"generation": 0, "lineage": "a", "format": 1}'


@pytest.mark.parametrize("content", [b"", b"null", b"{}", b"12\n", NONE, BELOW, OTHER])
def test_a_current_that_says_nothing_or_has_another_format_is_refused(content):
    with refusing(Broken, "here", "restore the registry", "hplm begin"):
        Pointer.read(content, "here")
