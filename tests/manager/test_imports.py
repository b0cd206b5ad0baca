"""Checkpoints that come by upload: `hplm import` reads them from a folder of their job."""

import json
import shutil
import stat
from pathlib import Path

import openai
import pytest

from manager.records import WAITING, Job
from manager.wishes import wishes_in
from tests.builder.importing.stores import make_imported_store, tuned
from tests.builder.stores import some_lines
from tests.cli.commands import run
from tests.manager.serving import fake_base, faked, managing
from tests.support.message import mentions
from tests.support.wait import eventually

LINES = "".join(json.dumps({"text": line, "label": "any"}) + "\n" for line in some_lines(120, 7)).encode()
CONFIG = ("config.json", b"{}")
NO_WISHES = {}


def brought(client, *files):
    """Uploads files of (name, content). Returns their ids."""
    return [client.files.create(file=file, purpose="user_data").id for file in files]


def created(client, ids, training_file=None, ours=NO_WISHES, **more):
    wishes = {"model": "toy", "suffix": "mine", "training_file": training_file, **more}
    return client.fine_tuning.jobs.create(**wishes, extra_body={"hplm": {"import": ids, **ours}})


def ended(client, job):
    eventually(lambda: client.fine_tuning.jobs.retrieve(job.id).status not in WAITING)
    return client.fine_tuning.jobs.retrieve(job.id)


def checkpoints(managed):
    """The folders of files that were laid out."""
    return [*managed.site.jobs._folder.glob("*/checkpoint")]


@pytest.mark.slow
def test_uploads_are_imported_to_the_bytes_of_the_command_line(tmp_path, capsys):
    store, folder = make_imported_store(tmp_path / "made"), tuned(tmp_path / "tuned")
    copy = shutil.copytree(store, tmp_path / "copy")
    with faked(), managing(tmp_path / "manager", [fake_base(store, ("root",))]) as managed:
        client = managed.client("acme")
        texts = client.files.create(file=("texts.jsonl", LINES), purpose="fine-tune").id
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "made.json"}
        ids = brought(client, *files.items())
        done = ended(client, created(client, ids, texts, {"least": 0.5}, seed=3, hyperparameters={"n_epochs": 1}))
        said = [event.message for event in client.fine_tuning.jobs.list_events(done.id)]
        assert (done.status, done.fine_tuned_model, done.hplm["import"]) == ("succeeded", "acme.mine", ids), (done, said)
        assert (done.hplm["task"], done.hplm["version"], done.training_file) == ("classify", 1, texts)
        assert any("of the answers to held-out texts are the checkpoint's" in one for one in said)
        assert checkpoints(managed) == [] and client.files.delete(ids[0]).deleted
    (tmp_path / "texts.jsonl").write_bytes(LINES)
    words = ["--from", folder, "--id", "acme.mine", "--store", copy, "--texts", tmp_path / "texts.jsonl"]
    plan = run(capsys, "import", *words, "--plan")
    fits = plan["fit"]["acme.mine"]
    assert (plan["refused"], fits["task"], fits["labels"]) == ({}, "classify", 3), "the stand-in says it otherwise"
    run(capsys, "import", *words, "--epochs", 1, "--seed", 3, "--least", 0.5)
    (mine,), (wanted,) = (list(Path(one).glob("tenants/acme.mine/1/*.safetensors")) for one in (store, copy))
    assert mine.read_bytes() == wanted.read_bytes()


@pytest.mark.parametrize(
    ("files", "more", "words"),
    [
        ([CONFIG, ("../model.safetensors", b"x")], {}, ["'../model.safetensors'", "config.json", "in no folder"]),
        ([CONFIG, ("1_Pooling/config.json", b"{}")], {}, ["'1_Pooling/config.json'"]),
        ([CONFIG, ("model.safetensors.index.json", b"{}")], {}, ["'model.safetensors.index.json'"]),
        ([CONFIG, CONFIG], {}, ["two files 'config.json'", "leave one out"]),
        ([("model.safetensors", b"x")], {}, ["no config.json", "adapter_config.json"]),
        ([CONFIG], {"hplm": {"least": 2}}, ["'least'", "0 to 1"]),
        ([CONFIG], {"hplm": {"best": True}}, ["'best'", "leave it out"]),
        ([CONFIG], {"hyperparameters": {"learning_rate_multiplier": 2}}, ["'learning_rate_multiplier'"]),
    ],
)
def test_what_is_no_checkpoint_is_refused_by_its_name(managed, files, more, words):
    ids = brought(managed.client(), *files)
    body = {"model": "toy", **more, "hplm": {"import": ids, **more.get("hplm", {})}}
    status, said = managed.ask("POST", "/v1/fine_tuning/jobs", body)
    assert status == 400 and mentions(said["error"]["message"], *words)
    assert managed.client().fine_tuning.jobs.list().data == []


@pytest.mark.parametrize("given", ["file-1", [], [5], ["file-1"] * 33])
def test_other_than_a_list_of_ids_is_refused(managed, given):
    status, said = managed.ask("POST", "/v1/fine_tuning/jobs", {"model": "toy", "hplm": {"import": given}})
    assert status == 400 and mentions(said["error"]["message"], "'import'", "list of ids")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "modeling_own.py", "model.pkl", "model.safetensors.gz"])
def test_pickles_code_and_packed_files_cannot_be_uploaded(managed, name):
    with pytest.raises(openai.BadRequestError, match="safetensors") as caught:
        brought(managed.client(), (name, b"content"))
    assert mentions(str(caught.value), name, "leave out the rest")


def test_a_checkpoint_that_does_not_fit_fails_its_job_in_the_builder_s_words(managed):
    client = managed.client("misfit")
    failed = ended(client, created(client, brought(client, CONFIG)))
    assert (failed.status, failed.error.code) == ("failed", "invalid_checkpoint")
    assert failed.error.message == "the checkpoint has no weights" and checkpoints(managed) == []


def test_files_of_another_owner_or_purpose_are_no_part_of_a_checkpoint(managed):
    client, other = managed.client("acme"), managed.client("other")
    (own,) = brought(client, CONFIG)
    said = []
    for id in (own, "file-000"):
        with pytest.raises(openai.NotFoundError) as caught:
            created(other, [id])
        said.append(str(caught.value).replace(id, "ID"))
    assert said[0] == said[1]
    data = client.files.create(file=("a.jsonl", b"{}"), purpose="fine-tune").id
    with pytest.raises(openai.BadRequestError, match="user_data"):
        created(client, [own, data])
    with pytest.raises(openai.BadRequestError, match="fine-tune"):
        client.fine_tuning.jobs.create(model="toy", training_file=own)
    with pytest.raises(openai.BadRequestError, match="validation_file"):
        created(client, [own], validation_file=data)
    (adapter,) = brought(client, ("adapter_config.json", b"{}"))
    with pytest.raises(openai.BadRequestError, match="leave out 'training_file'"):
        created(client, [adapter], training_file=data)


def test_a_file_stays_while_an_import_needs_it_and_a_cancelled_one_leaves_no_folder(managed):
    client, site = managed.client("kept"), managed.site
    (id,) = brought(client, CONFIG)
    wishes = wishes_in({"hplm": {"import": [id]}}) | {"model": "toy", "goes_on": False, "who": "me"}
    job = Job("ftjob-1", "kept", 1, "kept.mine", "toy", None, "", None, wishes, status="queued", again=1e12)
    site.records.add(job)
    for _ in range(2):  # a kill leaves one
        site.jobs.work(job).begin()
    (folder,) = checkpoints(managed)
    assert [path.name for path in folder.iterdir()] == ["config.json"] and stat.filemode(folder.stat().st_mode) == "drwx------"
    said = site.jobs.work(job).readable(f"{folder} is a whole checkpoint: give --texts FILE, or a lower --least")
    assert said.startswith("the checkpoint is") and "'training_file'" in said and "'least'" in said and "--" not in said
    with pytest.raises(openai.ConflictError, match="needs the file"):
        client.files.delete(id)
    assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled" and checkpoints(managed) == []
    assert site.records.last_needed(id) and client.files.delete(id).deleted
