"""Files by the stock client of OpenAI, and what is wrong with uploads."""

import os
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import openai
import pytest

from tests.manager.forms import FORM, form
from tests.manager.serving import managing
from tests.support.message import mentions
from tests.support.wait import eventually

LINE = b'{"text": "a", "label": "x"}\n'
FINE = [("purpose", None, b"fine-tune")]


@pytest.fixture(scope="module")
def managed(tmp_path_factory):
    with managing(tmp_path_factory.mktemp("manager")) as managed:
        yield managed


def on_disk(managed):
    return sorted(path for path in (managed.site.uploads._folder).rglob("*") if path.is_file())


def test_a_client_uploads_lists_reads_and_deletes_files(managed):
    client = managed.client("files")
    content = LINE * 50_000  # more than a piece
    names = ["../../etc/train.jsonl", "käse.csv", "b.jsonl"]
    made = [client.files.create(file=(name, content + name.encode()), purpose="fine-tune") for name in names]
    assert [one.filename for one in made] == names and made[0].bytes == len(content) + len(names[0])
    assert client.files.content(made[1].id).read() == content + names[1].encode()
    assert [one.id for one in client.files.list(limit=2)] == [one.id for one in reversed(made)], "pages of two"
    assert [one.id for one in client.files.list(order="asc", purpose="fine-tune")] == [one.id for one in made]
    assert client.files.list(purpose="user_data").data == []
    assert client.files.retrieve(made[0].id).status == "processed"
    assert client.files.delete(made[0].id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made[0].id)
    assert [path.name for path in on_disk(managed) if path.parent.name == "files"] == sorted(
        f"{one.id}{ending}" for one, ending in zip(made[1:], (".csv", ".jsonl"), strict=True)
    )
    expiring = client.files.create(file=LINE, purpose="fine-tune", expires_after={"anchor": "created_at", "seconds": 3600})
    assert expiring.expires_at == expiring.created_at + 3600 and expiring.filename == "upload"


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (form(("file", "a.jsonl", LINE)), 400, ["'purpose'", "fine-tune"]),
        (form(("file", "a.jsonl", LINE), ("purpose", None, b"assistants")), 400, ["'assistants'", "user_data"]),
        (form(("purpose", None, b"fine-tune")), 400, ["no file", "'file'"]),
        (form(("file", "a.jsonl", b""), ("purpose", None, b"fine-tune")), 400, ["'a.jsonl'", "empty"]),
        (form(("file", "a.zip", LINE), ("purpose", None, b"fine-tune")), 400, ["'a.zip'", ".jsonl"]),
        (form(("file", "a.jsonl", b"PK\x03\x04..."), ("purpose", None, b"fine-tune")), 400, ["compressed"]),
        (form(("file", "a.bin", LINE), ("purpose", None, b"user_data")), 400, [".safetensors"]),
        (form(("file", "a.jsonl", LINE), ("file", "b.jsonl", LINE)), 400, ["'file'", "send fewer"]),
        (form(("file", "a.jsonl", LINE), *FINE, ("more", "b.jsonl", LINE)), 400, ["'more'", "send fewer"]),
        (form(("purpose", None, b"fine-tune"), ("purpose", None, b"user_data")), 400, ["twice"]),
        (form(("file", "a.jsonl", LINE), *FINE, ("x", None, b"")), 400, ["'x'", "unknown"]),
        (form(("purpose", None, b"x" * 20_000)), 400, ["'purpose'", "10,000"]),
        (form(("file", "a.csv", LINE), *FINE, ("expires_after[seconds]", None, b"5")), 400, ["3,600"]),
        (form(("file", "a.jsonl", LINE), ("purpose", None, b"fine-tune"))[:-9], 400, ["ends before"]),
        (b"nothing of a form", 400, ["multipart/form-data"]),
        (b"", 400, ["ends before"]),
    ],
)  # fmt: skip
def test_a_wrong_upload_is_refused_by_name_and_leaves_no_file(managed, body, status, words):
    before = on_disk(managed)
    assert (said := managed.ask("POST", "/v1/files", body, **FORM))[0] == status and mentions(
        said[1]["error"]["message"], *words
    )
    assert on_disk(managed) == before


def test_other_bodies_are_refused(managed):
    assert managed.ask("POST", "/v1/files", {"purpose": "fine-tune"})[0] == 415
    assert managed.ask("POST", "/v1/files", form(), **FORM, content_encoding="gzip")[0] == 415
    assert managed.ask("PUT", "/v1/files", b"")[0] == 405
    for query in ("limit=0", "limit=x", "order=up", "x=1"):
        status, said = managed.ask("GET", f"/v1/files?{query}")
        assert status == 400 and f"'{query.partition('=')[0]}'" in said["error"]["message"]
    assert managed.ask("GET", "/v1/files?after=file-none")[0] == 404


def test_a_file_beyond_the_limit_is_refused_at_once_and_while_it_comes(managed):
    managed.secret("small")
    managed.site.rights.set_limits("small", {"file_bytes": 1000, "bytes": 1500}, "me")
    body = form(("purpose", None, b"fine-tune"), ("file", "a.jsonl", LINE * 40))
    before = on_disk(managed)
    assert managed.ask("POST", "/v1/files", body, "small", **FORM)[0] == 413
    assert managed.ask("POST", "/v1/files", b"x" * 100_000, "small", **FORM)[0] == 413
    assert on_disk(managed) == before
    weights = managed.ask(
        "POST", "/v1/files", form(("purpose", None, b"user_data"), ("file", "model.safetensors", b"x" * 1200)), "small", **FORM
    )
    assert weights[0] == 200, "a checkpoint's file may be larger than one of data"
    assert managed.ask("DELETE", f"/v1/files/{weights[1]['id']}", None, "small")[0] == 200
    for status in (200, 413):  # of the second one fewer bytes are left than it has
        assert (
            managed.ask(
                "POST", "/v1/files", form(("purpose", None, b"fine-tune"), ("file", "a.csv", b"x" * 900)), "small", **FORM
            )[0]
            == status
        )


def unnamed():
    """The open files of this process that have no name: those of forms that come."""
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed meanwhile
            found.append(os.readlink(path))
    return [one for one in found if one.startswith(tempfile.gettempdir()) and one.endswith("(deleted)")]


def test_what_was_sent_by_a_client_that_has_gone_is_removed(managed):
    before, secret = (on_disk(managed), unnamed()), managed.secret("acme")
    head = f"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {secret}\r\ncontent-type: {FORM['content_type']}\r\n"
    body = form(("file", "a.jsonl", LINE * 80_000))
    with socket.create_connection(managed.url.split(":")) as connection:
        connection.sendall(head.encode() + b"content-length: 3000000\r\n\r\n" + body[:-500])
        eventually(lambda: len(unnamed()) > len(before[1]))
    eventually(lambda: (on_disk(managed), unnamed()) == before)


def test_files_without_a_row_go_at_the_start_and_others_at_their_end(managed):
    site, client = managed.site, managed.client("swept")
    kept, gone = (client.files.create(file=("a.jsonl", LINE), purpose="fine-tune") for _ in range(2))
    folder = site.uploads._folder / "swept"
    (folder / "file-unknown.jsonl").write_text("copied, without a row")
    site.records._do("UPDATE files SET expires = 5 WHERE id = ?", gone.id)
    site.uploads.remove_unknown()
    site.uploads.sweep()
    assert [path.name for path in folder.iterdir()] == [f"{kept.id}.jsonl"]
    assert managed.ask("GET", f"/v1/files/{gone.id}", owner="swept")[0] == 404


def test_keys_are_needed_and_the_manager_s_process_has_no_torch(managed):
    for path in ("/v1/files", "/v1/files/x", "/v1/models", "/v1/fine_tuning/jobs", "/v1/keys"):
        status, said = managed.ask("GET", path, owner=None)
        assert status == 401 and said["error"]["code"] == "invalid_api_key", path
    secret, _ = managed.site.rights.add_key("acme", "ask", 0, "me")
    assert managed.ask("GET", "/v1/files", authorization=f"Bearer {secret}")[0] == 403
    assert managed.ask("GET", "/v1/models", authorization=f"Bearer {secret}")[0] == 200
    code = "import sys, manager.app, manager.cli; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
