"""Jobs by the stock client of OpenAI, with commands that only seem to train."""

import json
from types import SimpleNamespace

import openai
import pytest

from builder.cli.build import BEST
from builder.training.finetuning import TrainingOptions
from manager import work
from manager.records import WAITING, Job
from tests.manager.serving import commands, fake_base, faked, managing
from tests.support.message import mentions
from tests.support.wait import eventually

DONE = ["check --id", "build tenant", "tenant publish"]


def created(client, says="text\n", model="toy", **more):
    file = client.files.create(file=("train.jsonl", says.encode()), purpose="fine-tune")
    return client.fine_tuning.jobs.create(model=model, training_file=file.id, **more)


def ended(client, job):
    eventually(lambda: client.fine_tuning.jobs.retrieve(job.id).status not in WAITING)
    return client.fine_tuning.jobs.retrieve(job.id)


def status(client, job):
    return client.fine_tuning.jobs.retrieve(job.id).status


def test_a_job_is_checked_built_and_published_and_tells_of_it(managed, base):
    client = managed.client("acme")
    wishes = {"method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": "auto"}}}}
    job = created(client, suffix="mail", seed=7, metadata={"who": "me"}, **wishes)
    assert (job.object, job.model, job.fine_tuned_model, job.organization_id) == ("fine_tuning.job", "toy", None, "acme")
    done = ended(client, job)
    assert (done.status, done.fine_tuned_model, done.error, done.seed) == ("succeeded", "acme.mail", None, 7)
    assert done.metadata == {"who": "me"} and done.method.supervised.hyperparameters.n_epochs == 2
    assert done.created_at <= done.finished_at and done.hplm["dev"] == {"metric": "accuracy", "score": 0.5, "texts": 9}
    events = [*client.fine_tuning.jobs.list_events(job.id, limit=3)]
    assert [one.created_at for one in events] == sorted((one.created_at for one in events), reverse=True)
    (exam,) = [one for one in events if one.type == "metrics"]
    assert exam.data["score"] == 0.5 and [one.message for one in events if one.level == "warn"] == ["few texts"]
    stream = client.with_options(default_headers={"accept": "text/event-stream"})
    raw = stream.get(
        f"/fine_tuning/jobs/{job.id}/events", cast_to=str, options={"headers": {"last-event-id": events[-1].id[8:]}}
    )
    seen = [json.loads(line[6:])["id"] for line in raw.splitlines() if line.startswith("data: {")]
    assert seen == [one.id for one in reversed(events[:-1])] and raw.endswith("data: [DONE]\n\n")
    (checkpoint,) = client.fine_tuning.jobs.checkpoints.list(job.id)
    assert checkpoint.fine_tuned_model_checkpoint == "acme.mail"
    assert [one.id for one in client.fine_tuning.jobs.list()] == [job.id] and commands(base, "acme.mail") == DONE
    words = [json.loads(line) for line in (base.store / "commands").read_text().splitlines()]
    (built,) = [line for line in words if line[0] == "build" and "acme.mail" in line]
    assert built[built.index("--task") :] == [
        "--task",
        "classify",
        "--epochs",
        "2",
        "--seed",
        "7",
        "--device",
        "auto",
        "--json",
    ]


def test_a_build_computes_while_nobody_else_does_and_what_is_awaited_beside_others(managed, base):
    client = managed.client("acme")
    ended(client, created(client, suffix="idle"))
    assert set((base.store / "idle").read_text().splitlines()) == {"check: False", "build: True", "tenant: False"}


def test_a_parquet_file_at_which_its_reader_aborts_is_refused_at_once(managed, base):
    client = managed.client("acme")
    file = client.files.create(file=("train.parquet", b"abort"), purpose="fine-tune")
    job = ended(client, client.fine_tuning.jobs.create(model="toy", training_file=file.id, suffix="odd"))
    assert (job.status, job.error.code, job.error.param) == ("failed", "invalid_training_file", "training_file")
    assert mentions(job.error.message, "Parquet", "damaged") and commands(base, "acme.odd") == DONE[:1]


def test_the_same_job_again_makes_no_candidate_of_what_is_served(managed, base, monkeypatch):
    client = managed.client("acme")
    first = ended(client, created(client, "same\n", suffix="twice"))
    live = SimpleNamespace(base=base, tenant=SimpleNamespace(id="acme.twice"), stored=1, candidate_of=None)
    monkeypatch.setattr(managed.site.models, "served", lambda owner: [live])
    again = ended(client, created(client, "same\n", suffix="twice", extra_body={"hplm": {"promote": "never"}}))
    for done in (first, again):
        assert (done.error, done.fine_tuned_model, done.hplm["version"]) == (None, "acme.twice", 1)


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({}, 400, "model", ["'model'"]),
        ({"model": "toy"}, 400, "training_file", ["'training_file'"]),
        ({"model": "toy", "training_file": 5}, 400, "training_file", ["5"]),
        ({"model": "toy", "training_file": "file-none"}, 404, "id", ["'file-none'"]),
        ({"model": "gpt"}, 404, "model", ["no such model"]),
        ({"model": "toy/none"}, 404, "model", ["no such model"]),
        ({"model": "toy", "suffix": "../x"}, 400, "suffix", ["'../x'"]),
        ({"model": "toy", "suffix": "a.v2"}, 400, "suffix", ["'a.v2'"]),
        ({"model": "toy", "x": 1}, 400, "x", ["'x'"]),
        ({"model": "toy", "method": {"type": "dpo"}}, 400, "method", ["supervised"]),
        ({"model": "toy", "integrations": [{"type": "wandb"}]}, 400, "integrations", ["leave them out"]),
        ({"model": "toy", "hyperparameters": {"n_epochs": 0}}, 400, "n_epochs", ["'n_epochs'"]),
        ({"model": "toy", "hyperparameters": {"batch_size": 4}}, 400, "batch_size", ["'auto'"]),
        ({"model": "toy", "hyperparameters": {"learning_rate_multiplier": 1e9}}, 400, "learning_rate_multiplier", ["1,000"]),
        ({"model": "toy", "hplm": {"promote": "maybe"}}, 400, "promote", ["'better'", "'never'"]),
        ({"model": "toy", "hplm": {"from_version": 1}}, 400, "hplm", ["'from_version'"]),
        ({"model": "toy", "hplm": {"task": "--store"}}, 400, "task", ["classify"]),
        ({"model": "toy", "metadata": {"a": 1}}, 400, "metadata", ["texts"]),
        ({"model": "toy", "seed": -1}, 400, "seed", ["-1"]),
    ],
)
def test_a_wrong_job_is_refused_by_its_field(managed, body, status, param, words):
    said = managed.ask("POST", "/v1/fine_tuning/jobs", body)
    assert (said[0], said[1]["error"]["param"]) == (status, param) and mentions(said[1]["error"]["message"], *words)


def test_faults_of_the_data_and_refusals_of_the_builder_end_a_job_in_the_owners_words(managed, base):
    client = managed.client("acme")
    for says, code, words in (
        ("wrong\n", "invalid_training_file", ["train.jsonl:1: no label"]),
        ("refuse\n", "job_failed", ["train.jsonl cannot be learned"]),
    ):
        failed = ended(client, created(client, says, suffix="bad"))
        assert (failed.status, failed.error.code) == ("failed", code) and mentions(failed.error.message, *words)
        said = managed.ask("GET", f"/v1/fine_tuning/jobs/{failed.id}/events")[1]["data"]
        assert said[0]["level"] == "error" and str(base.store.parent) not in str(said) + failed.error.message
    assert not (base.store / "building/tenants/acme.bad").exists()


def test_limits_of_an_owner_end_a_job_or_refuse_it(managed):
    client = managed.client("limited")
    managed.site.rights.set_limits("limited", {"lines": 3, "jobs_a_day": 2, "tenants": 1}, "me")
    failed = ended(client, created(client, "a\n" * 4))
    assert failed.status == "failed" and mentions(failed.error.message, 4, 3, "training_file")
    slow = created(client, "slow\n")
    with pytest.raises(openai.RateLimitError, match="2 jobs"):
        created(client)
    managed.site.rights.set_limits("limited", {"jobs_a_day": 9}, "me")
    with pytest.raises(openai.RateLimitError, match="1 models"):
        created(client, suffix="other")
    client.fine_tuning.jobs.cancel(slow.id)
    managed.site.records.change(Job, slow.id, seconds=59.0)
    managed.site.rights.set_limits("limited", {"minutes_a_day": 1, "tenants": 9}, "me")
    failed = ended(managed.client("limited"), created(client, "compute\n", suffix="computes"))
    assert (failed.status, failed.error.code) == ("failed", "limit")
    managed.site.rights.set_limits("limited", {"minutes_a_day": 0}, "me")
    with pytest.raises(openai.RateLimitError, match="0 minutes"):
        created(client)


def test_a_cancelled_job_ends_and_leaves_nothing_and_a_file_that_a_job_needs_stays(managed, base):
    client = managed.client("acme")
    job, waits = created(client, "slow\n", suffix="one"), created(client, "slow\n", suffix="two")
    eventually(lambda: (base.store / "building/tenants/acme.one").exists())
    assert status(client, job) == "running" and status(client, waits) in WAITING[:2]
    with pytest.raises(openai.ConflictError, match="needs the file"):
        client.files.delete(job.training_file)
    assert client.fine_tuning.jobs.cancel(waits.id).status == "cancelled"
    assert client.fine_tuning.jobs.cancel(job.id).status == "cancelled"
    assert not (base.store / "building/tenants/acme.one").exists() and commands(base, "acme.two") in ([], DONE[:1])
    with pytest.raises(openai.ConflictError, match="has ended"):
        client.fine_tuning.jobs.cancel(job.id)
    assert client.files.delete(job.training_file).deleted


def test_a_step_that_dies_is_made_again_and_fails_after_three_deaths(managed, base):
    client = managed.client("acme")
    jobs = [created(client, says, suffix=suffix) for says, suffix in (("die\n", "again"), ("die always\n", "dead"))]
    assert [ended(client, job).status for job in jobs] == ["succeeded", "failed"]
    assert commands(base, "acme.again") == [*DONE[:2], *DONE[1:]]
    assert commands(base, "acme.dead") == [DONE[0], *[DONE[1]] * 3] and mentions(
        ended(client, jobs[1]).error.message, "SIGKILL", 3
    )


def test_a_job_waits_while_the_registry_is_away(managed, base):
    client = managed.client("acme")
    base.manager.registry.is_away = True
    job = created(client, "refuse\n", suffix="away")
    eventually(lambda: any("It goes on" in one.message for one in client.fine_tuning.jobs.list_events(job.id)))
    assert status(client, job) == "queued"
    base.manager.registry.is_away = False
    managed.site.records.change(Job, job.id, again=0.0)
    assert ended(client, job).status == "failed"


def test_the_next_manager_goes_on_where_the_one_before_was_stopped(tmp_path, base):
    base = fake_base(tmp_path / "store")
    with faked():
        with managing(tmp_path / "manager", [base]) as managed:
            client = managed.client()
            job = created(client, "slow\n", suffix="kept")
            eventually(lambda: (base.store / "building/tenants/acme.kept").exists())
            secret = managed.secret("acme")
        (base.store / "go").touch()
        with managing(tmp_path / "manager", [base]) as managed:
            client = managed.client(api_key=secret)
            assert ended(client, job).fine_tuned_model == "acme.kept"
    assert [path.name for path in (base.store / "tenants/acme.kept").iterdir()] == ["1"]


def test_a_multiplier_is_of_the_builders_own_rates():
    """The manager may not import them: they come with torch."""
    assert (TrainingOptions().learning_rate, BEST["learning_rate"]) == (work.USUAL_RATE, work.BEST_RATE)
