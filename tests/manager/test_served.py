"""From an empty manager to an answered text, with the stock client of OpenAI and a real Triton."""

import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import openai
import pytest

from hplm.cli.main import main
from manager.app import ENDPOINTS
from manager.models import Base
from manager.owners import OTHERS
from manager.records import WAITING
from manager.rights import COMMAND_LINE, OPERATOR
from testing.toy import WORDS
from tests.cli.commands import refused, run
from tests.manager.serving import managing
from tests.support.message import mentions
from tests.support.wait import PATIENCE, eventually

pytestmark = [pytest.mark.slow, pytest.mark.server("toy")]

LABELS = {"fruit": WORDS[:20], "metal": WORDS[20:40]}


def lines(seed, count=48):
    rng = random.Random(seed)
    made = [(" ".join(rng.choices(LABELS[label], k=4)), label) for label in list(LABELS) * (count // 2)]
    return "".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in made).encode()


def records_of(store, tenant):
    """Returns the content of a tenant's record files, by version."""
    return {path.parent.name: path.read_bytes() for path in store.glob(f"tenants/{tenant}/*/*.safetensors")}


@pytest.fixture
def managed(server, tmp_path):
    """A manager of a copy of the server's store, whose tenants go in the end."""
    store = shutil.copytree(server.built.stores["toy"].folder, tmp_path / "store")
    base = Base.open(store, server.repository, server.state)
    with managing(tmp_path / "manager", [base], server.grpc_url) as managed:
        yield managed
        for owner in ("acme-inc", "beta-inc"):
            managed.site.models._remove(base, [one.tenant.id for one in managed.site.models.served(owner)])


def ended(client, **wishes):
    return finished(client, client.fine_tuning.jobs.create(**wishes).id)


def finished(client, id):
    eventually(lambda: client.fine_tuning.jobs.retrieve(id).status not in WAITING)
    job = client.fine_tuning.jobs.retrieve(id)
    assert job.status == "succeeded", job.error
    return job


def classified(client, model, text):
    answer = client.post("/classifications", body={"model": model, "input": [text]}, cast_to=object)
    return answer["results"][0][model]["scores"]


def test_an_owner_uploads_trains_asks_goes_on_rolls_back_and_deletes(managed, server, tmp_path, capsys):
    store, copy = tmp_path / "store", shutil.copytree(tmp_path / "store", tmp_path / "copy")
    client, other = managed.client("acme-inc"), managed.client("beta-inc")
    (tmp_path / "train.jsonl").write_bytes(lines(1))
    with (tmp_path / "train.jsonl").open("rb") as opened:
        file = client.files.create(file=opened, purpose="fine-tune")
    epochs = {"hyperparameters": {"n_epochs": 1}}
    job = ended(client, model="toy", training_file=file.id, suffix="goods", **epochs)
    name = job.fine_tuned_model
    assert name == "acme-inc.goods" and job.hplm["task"] == "classify" and job.hplm["version"] == 1
    text = " ".join(LABELS["fruit"][:4])
    assert set(classified(client, name, text)) == {"fruit", "metal"}
    with pytest.raises(openai.NotFoundError):
        classified(other, name, text)

    command = f"build tenant --id {name} --store {copy} --train {tmp_path}/train.jsonl --task classify --epochs 1"
    assert main(command.split()) == 0
    assert records_of(store, name) == records_of(copy, name) != {}, "an upload and the command line make other bytes"

    more = client.files.create(file=("more.jsonl", lines(2)), purpose="fine-tune")
    again = ended(client, model=name, training_file=more.id, extra_body={"hplm": {"promote": "never"}}, **epochs)
    assert again.fine_tuned_model == f"{name}.v2" and set(classified(client, f"{name}.v2", text)) == {"fruit", "metal"}
    listed = client.models.list().data
    assert all(model.created > 0 for model in listed), "when it was made"
    ids = [model.id for model in listed]
    assert ids == ["toy", "toy/bio", "toy/law", name, f"{name}.v2"]
    assert [model.id for model in other.models.list()] == ids[:3]
    assert client.models.retrieve(f"{name}.v2").hplm["candidate_of"] == name

    key = client.post("/keys", body={"role": "ask", "days": 1}, cast_to=object)
    asking = managed.client(api_key=key["secret"])
    assert classified(asking, name, text), "a new key opens the tenants that there are"
    with pytest.raises(openai.PermissionDeniedError):
        asking.files.list()
    client.delete(f"/keys/{key['id']}", cast_to=object)
    with pytest.raises((openai.NotFoundError, openai.AuthenticationError)):
        classified(asking, name, text)

    promoted = client.post(f"/models/{name}/promote", body={"version": 2}, cast_to=object)
    assert [(one["version"], one["live"], one["waits_as"]) for one in promoted["hplm"]["versions"]] == [
        (1, False, None), (2, True, None),
    ]  # fmt: skip
    assert client.post(f"/models/{name}/rollback", cast_to=object)["hplm"]["version"] == 1
    assert client.models.delete(name).deleted and not (store / "tenants" / name).exists()
    assert [model.id for model in client.models.list()] == ids[:3]
    with pytest.raises(openai.NotFoundError):
        classified(client, name, text)


def test_an_operator_builds_a_domain_of_a_corpus_updates_and_deletes_it(managed, tmp_path):
    """An owner's model learns on the domain while it is there."""
    owner, secret = managed.client("acme-inc"), managed.site.rights.add_key(None, OPERATOR, 0, COMMAND_LINE)[0]
    client = managed.client(api_key=secret)

    def built(seed, **more):
        rng = random.Random(seed)
        text = "".join(" ".join(rng.choices(WORDS, k=12)) + "\n" for _ in range(50)).encode()
        corpus = client.files.create(file=("corpus.txt", text), purpose="user_data").id
        made = client.post("/domains", body={"id": "toy/shop", "corpus": corpus, "minutes": 0, **more}, cast_to=object)
        return finished(client, made["id"])

    assert built(1, min_tokens=10).fine_tuned_model == "toy/shop"
    (version,) = client.get("/domains/toy/shop", cast_to=object)["versions"]
    assert (version["version"], version["parent"], version["served"], version["tenants"]) == (1, "root", True, 0)
    file = owner.files.create(file=("a.jsonl", lines(1)), purpose="fine-tune").id
    job = ended(owner, model="toy/shop", training_file=file, suffix="shop", hyperparameters={"n_epochs": 1})
    text = " ".join(LABELS["fruit"][:4])
    assert set(classified(owner, job.fine_tuned_model, text)) == {"fruit", "metal"}
    assert built(2).hplm["version"] == 2
    versions = client.get("/domains/toy/shop", cast_to=object)["versions"]
    assert [(one["version"], one["served"], one["tenants"]) for one in versions] == [(1, True, 1), (2, True, 0)]
    for wrong in (
        lambda: client.delete("/domains/toy/shop", cast_to=object),
        lambda: client.post("/domains/toy/shop/rollback", cast_to=object),
    ):
        with pytest.raises(openai.BadRequestError, match="shop"):
            wrong()
    owner.models.delete(job.fine_tuned_model)
    assert client.delete("/domains/toy/shop", cast_to=object)["deleted"]
    assert "toy/shop" not in [one["id"] for one in client.get("/domains", cast_to=object)["data"]]
    assert not (tmp_path / "store/plot/shop").exists() and "toy/shop" not in [one.id for one in owner.models.list()]


def test_an_operator_serves_a_record_file_as_a_model_of_an_owner(managed, server, tmp_path):
    secret, _ = managed.site.rights.add_key(None, OPERATOR, 0, COMMAND_LINE)
    client, owner = managed.client(api_key=secret), managed.client("acme-inc")
    (path,) = (server.built.stores["toy"].folder / "tenants/echo/1").glob("*.safetensors")
    content = path.read_bytes()

    def asked(content, name="record.safetensors", **more):
        file = client.files.create(file=(name, content), purpose="user_data").id
        return client.post("/records", body={"id": "acme-inc.brought", "model": "toy", "file": file, **more}, cast_to=object)

    assert asked(content)["owned_by"] == "acme-inc" and asked(content)["hplm"]["version"] == 1
    ours, stored = (
        one.forward("a", name) for one, name in ((server.reference(), "acme-inc.brought"), (server.reference(), "echo"))
    )
    assert np.allclose(ours, stored) and set(classified(owner, "acme-inc.brought", "a")) == {"no", "yes"}
    with pytest.raises(openai.NotFoundError):
        classified(managed.client("beta-inc"), "acme-inc.brought", "a")
    with pytest.raises(openai.BadRequestError, match=r"own\.safetensors is no record"):
        asked(content[:-8], "own.safetensors")
    with pytest.raises(openai.BadRequestError, match=r"ends in \.safetensors"):
        asked(b"{}", "record.json")
    assert owner.models.delete("acme-inc.brought").deleted


def test_the_command_runs_beside_a_server_without_torch_in_little_memory(server, tmp_path, capsys):
    """The owner is added while it runs."""
    store, folder = server.built.stores["toy"].folder, ["--folder", str(tmp_path / "manager")]
    places = ["--store", store, "--repository", server.repository, "--state", server.state, "--url", server.grpc_url]
    command = [sys.executable, "-m", "hplm.cli.main", "manager", *folder, *map(str, places), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = re.search(r"http://\S+/v1", process.stdout.readline())[0]
            secret = run(capsys, "manager", "owner", "add", "acme-inc", *folder)["secret"]
            with openai.OpenAI(base_url=url, api_key=secret, timeout=PATIENCE) as client:
                assert [model.id for model in client.models.list()] == ["toy", "toy/bio", "toy/law"]
            assert mentions(refused(capsys, "manager", *folder, *places, "--port", 0), "another manager", tmp_path)
            proc = Path(f"/proc/{process.pid}")
            assert "torch" not in (proc / "maps").read_text()
            assert int(re.search(r"VmHWM:\s+(\d+) kB", (proc / "status").read_text())[1]) < 100_000
        finally:
            process.terminate()
    assert mentions(refused(capsys, "manager", *folder, "--store", tmp_path, *places[2:]), tmp_path, "not a store")


def test_another_owner_s_ids_are_as_unknown_ones_at_every_endpoint(managed):
    """The owner beta-inc asks for one thing of acme-inc of each kind."""
    client = managed.client("acme-inc")
    file = client.files.create(file=("a.jsonl", lines(1)), purpose="fine-tune")
    job = ended(client, model="toy", training_file=file.id, suffix="mine", hyperparameters={"n_epochs": 1})
    key = client.post("/keys", body={}, cast_to=object)
    ours = {"file": file.id, "job": job.id, "model": job.fine_tuned_model, "key": key["id"]}
    unknown = {"file": "file-000", "job": "ftjob-000", "model": "beta-inc.none", "key": "key-000"}
    bodies = {"promote": {"version": 1}, "rollback": {}, "cancel": {}, "limits": {"rate": 1}}
    asked = 0
    for method, path, *_ in (*ENDPOINTS, *OTHERS):
        if "{" not in path or path.startswith(("/v1/owners", "/v1/domains")):  # those are for operators alone
            continue
        kind = {"files": "file", "fine_tuning": "job", "models": "model", "keys": "key"}[path.split("/")[2]]
        shape = path.replace("{id:path}", "{id}")
        answers = [
            managed.ask(method, shape.format(id=ids[kind]), bodies.get(path.rpartition("/")[2]), "beta-inc")
            for ids in (ours, unknown)
        ]
        (status, found), (same, other) = answers
        expected = 403 if path.endswith("limits") else 404
        assert status == same == expected, (method, path, answers)
        assert json.dumps(found).replace(ours[kind], unknown[kind]) == json.dumps(other), path
        asked += 1
    assert asked >= 13
    for field, value in (("training_file", ours["file"]), ("model", ours["model"])):
        body = {"model": "toy", "training_file": "file-000", field: value}
        assert managed.ask("POST", "/v1/fine_tuning/jobs", body, "beta-inc")[0] == 404
    assert managed.ask("GET", f"/v1/files?after={ours['file']}", owner="beta-inc")[0] == 404
    assert client.files.retrieve(file.id).id == file.id and client.models.retrieve(ours["model"]).id == ours["model"]
