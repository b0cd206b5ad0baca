"""Operators build domains of corpora by jobs, with commands that only seem to build."""

import json

import pytest

from manager.records import OPERATORS, WAITING
from manager.rights import COMMAND_LINE, OPERATOR
from tests.manager.serving import fake_base, faked, managing
from tests.support.message import mentions
from tests.support.wait import eventually


@pytest.fixture(scope="module")
def operator(managed):
    secret, _ = managed.site.rights.add_key(None, OPERATOR, 0, COMMAND_LINE)

    def ask(method, path, body=None, **headers):
        return managed.ask(method, path, body, None, authorization=f"Bearer {secret}", **headers)

    ask.client = managed.client(api_key=secret)
    return ask


def uploaded(operator, says, name="corpus.txt"):
    return operator.client.files.create(file=(name, says.encode()), purpose="user_data").id


def created(operator, says="text\n", id="toy/new", **more):
    status, job = operator("POST", "/v1/domains", {"id": id, "corpus": uploaded(operator, says), **more})
    assert status == 200, job
    return job["id"]


def ended(operator, job):
    jobs = operator.client.fine_tuning.jobs
    eventually(lambda: jobs.retrieve(job).status not in WAITING)
    return jobs.retrieve(job), [event.message for event in jobs.list_events(job)]


def commands(base, domain):
    lines = map(json.loads, (base.store / "commands").read_text().splitlines())
    return [words for words in lines if domain in words]


def test_a_corpus_makes_a_domain_and_another_one_its_next_version(operator, base):
    wishes = {"parent": "law", "minutes": 0.5, "min_tokens": 3, "seed": 7, "metadata": {"for": "us"}}
    done, said = ended(operator, job := created(operator, **wishes))
    assert (done.status, done.error, done.fine_tuned_model, done.organization_id) == ("succeeded", None, "toy/new", OPERATORS)
    assert (done.hplm["kind"], done.hplm["domain"], done.hplm["tenant"], done.hplm["version"]) == ("domain", "new", None, 1)
    assert done.model == "toy/new" and done.metadata == {"for": "us"} and "train models on toy/new" in said[0]
    assert any(mentions(one, "9 n-grams") for one in said) and any(mentions(one, "1 tenants") for one in said)
    built, published = commands(base, "new")
    corpus = built.index("--corpus")
    assert built[:2] == ["build", "domain"] and built[corpus + 2 : -3] == [
        *("--parent", "law", "--minutes", "0.5", "--min-tokens", "3", "--seed", "7"),
    ]  # fmt: skip
    assert published[:2] == ["domain", "add"] and "--state" in published
    done, _ = ended(operator, created(operator, "more text\n"))
    assert done.hplm["version"] == 2 and commands(base, "new")[2][:2] == ["domain", "update"]
    assert (
        operator.client.fine_tuning.jobs.list().data[-1].id == job
        and operator("GET", f"/v1/fine_tuning/jobs/{job}/checkpoints")[1]["data"] == []
    )


def test_a_domain_that_cannot_be_built_is_told_by_the_names_of_the_fields(operator, base):
    failed, _ = ended(operator, created(operator, "refuse\n", "toy/bad"))
    assert failed.status == "failed" and mentions(failed.error.message, "corpus.txt cannot be learned")
    assert not (base.store / "building/bad-1").exists()


def test_a_step_that_dies_goes_on_and_a_cancelled_domain_leaves_nothing(operator, base):
    done, _ = ended(operator, created(operator, "die\n", "toy/again"))
    assert done.status == "succeeded" and [words[0] for words in commands(base, "again")] == ["build", "build", "domain"]
    job = created(operator, "slow\n", "toy/slow")
    eventually(lambda: (base.store / "building/slow-1").exists())
    assert operator.client.fine_tuning.jobs.cancel(job).status == "cancelled" and not (base.store / "building/slow-1").exists()


def test_the_next_manager_goes_on_with_a_domain_and_serves_it_once(tmp_path):
    base = fake_base(tmp_path / "store", ("root",))
    with faked():
        with managing(tmp_path / "manager", [base]) as managed:
            secret, _ = managed.site.rights.add_key(None, OPERATOR, 0, COMMAND_LINE)
            client = managed.client(api_key=secret)
            corpus = client.files.create(file=("corpus.txt", b"slow\n"), purpose="user_data").id
            job = client.post("/domains", body={"id": "toy/new", "corpus": corpus}, cast_to=object)["id"]
            eventually(lambda: (base.store / "building/new-1").exists())
        (base.store / "go").touch()
        with managing(tmp_path / "manager", [base]) as managed:
            client = managed.client(api_key=secret)
            eventually(lambda: client.fine_tuning.jobs.retrieve(job).status == "succeeded")
            job = managed.site.jobs.found(OPERATORS, job)
            base.manager.current().branches.append(type("Branch", (), {"id": ("new", 1), "domain": "new"}))
            assert managed.site.jobs.work(job).publishing(1, "toy/new") == [], "it would be refused the second time"
    assert [path.name for path in (base.store / "plot/new").iterdir()] == ["1"]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "id"),
        ({"id": 5}, 400, "id"),
        ({"id": "other/new"}, 400, "id"),
        ({"id": "toy/../x"}, 400, "id"),
        ({"id": "toy/new"}, 400, "corpus"),
        ({"id": "toy/new", "corpus": "file-none"}, 404, "id"),
        ({"id": "toy/new", "corpus": ["file-1"]}, 400, "corpus"),
        ({"id": "toy/new", "minutes": -1}, 400, "minutes"),
        ({"id": "toy/new", "minutes": "5"}, 400, "minutes"),
        ({"id": "toy/new", "steps": 1.5}, 400, "steps"),
        ({"id": "toy/new", "keep": 2}, 400, "keep"),
        ({"id": "toy/new", "parent": "--store"}, 400, "parent"),
        ({"id": "toy/new", "learn": "by heart"}, 400, "learn"),
        ({"id": "toy/law", "parent": "root"}, 400, "parent"),
        ({"id": "toy/new", "x": 1}, 400, "x"),
        ({"id": "toy/new", "metadata": 5}, 400, "metadata"),
    ],
)
def test_a_wrong_domain_is_refused_by_its_field(operator, body, status, param):
    said = operator("POST", "/v1/domains", body)
    assert (said[0], said[1]["error"]["param"]) == (status, param)


def test_a_file_that_is_no_text_is_no_corpus(operator):
    said = operator("POST", "/v1/domains", {"id": "toy/new", "corpus": uploaded(operator, "{}", "config.json")})
    assert said[0] == 400 and mentions(said[1]["error"]["message"], "'corpus'", ".txt")


def test_only_operators_have_domains_and_none_is_found_by_another_name(managed, operator):
    for method, path in (("GET", ""), ("POST", ""), ("GET", "/toy/law"), ("POST", "/toy/law/rollback"), ("DELETE", "/toy/law")):
        assert managed.ask(method, f"/v1/domains{path}", {} if method == "POST" else None)[0] == 403
        if path:
            assert operator(method, f"/v1/domains{path.replace('law', 'none')}", {} if method == "POST" else None)[0] == 404
    job = created(operator, id="toy/own")
    assert managed.ask("GET", f"/v1/fine_tuning/jobs/{job}")[0] == 404
    assert operator("POST", "/v1/owners", {"name": OPERATORS})[0] == 400, "their name can be taken"
    (law,) = [one for one in operator("GET", "/v1/domains")[1]["data"] if one["id"] == "toy/law"]
    assert [(one["version"], one["served"], one["ngrams"]) for one in law["versions"]] == [(1, True, 8)]
