"""The console's pages and forms, as a browser without JavaScript sends them. `test_console_browser.py` has a real one."""

import hashlib
import json
import re
import socket
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode

import pytest

import manager
from hplm.server import ports
from hplm.tenants.snapshot import QUOTAS
from hplm_openai import __main__ as gateway
from manager.pages import SESSION
from manager.records import WAITING, Job
from manager.rendering import ROOT
from tests.manager.browsing import Browser, said
from tests.support.message import mentions
from tests.support.wait import eventually

DIGESTS = {  # of the released files, as their authors publish them in the packages htmx.org 2.0.11 and @picocss/pico 2.1.1
    "htmx.min.js": "d6fdc75f204e6bdefa99b69bf1e6d4ac69b8a364f77929f45c13476b4000f717",
    "pico.min.css": "fbc9a63fc9fc9f72d12fd7fc9806e11fa9f77ae4f9cad146b27003a1119ba3db",
}
SCRIPT = "<script>alert(1)</script>"


@pytest.fixture
def browser(managed):
    browser = Browser(managed)
    yield browser
    browser.client.close()


@pytest.fixture
def served(managed, base, monkeypatch):
    """Serves a model `acme.seen` whose texts and labels have tags of HTML, and its versions 1 and 2; 2 waits."""
    managed.secret("acme")

    def tenant(name, stored):
        quotas = dict.fromkeys((*QUOTAS, "deadline_us"), 0)
        keys = managed.site.models._wanted("acme")
        return SimpleNamespace(
            id=name,
            keys=keys,
            stored=stored,
            version=1,
            domain="root",
            domain_version=1,
            branch_id=("root", 1),
            task="classify",
            labels=(SCRIPT, "b"),
            **quotas,
        )

    monkeypatch.setattr(base.manager, "current", lambda: SimpleNamespace(
        branches=[SimpleNamespace(id=("root", 1))], tenants=(tenant("acme.seen", 1), tenant("acme.seen.v2", 2))
    ))  # fmt: skip
    for version, score in ((1, 0.75), (2, 0.5)):
        (folder := base.store / "tenants/acme.seen" / str(version)).mkdir(parents=True, exist_ok=True)
        counts = {"label": SCRIPT, "wanted": 4, "answered": 3, "right": 3, "f1": 0.857}
        report = {
            "dev": {"metric": "accuracy", "accuracy": score}, "by_label": [counts],
            "confusion": {SCRIPT: {SCRIPT: 3, "b": version}},
            "mistakes": [{"text": f"{SCRIPT} of {version}", "right": SCRIPT, "answered": "b"}],
        }  # fmt: skip
        (folder / "report.json").write_text(json.dumps(report))


def test_a_key_signs_in_once_for_twelve_hours_and_the_api_takes_no_cookie(managed, browser):
    assert browser.get().status_code == 401 and 'name="key"' in browser.get().text
    secret = managed.secret("acme")
    answer = browser.client.post(
        f"{ROOT}/sign-in", data={"key": f" {secret}\n"}, headers={"origin": browser.at}, follow_redirects=False
    )
    assert (answer.status_code, answer.headers["location"]) == (303, ROOT)
    name, *attributes = answer.headers["set-cookie"].split("; ")
    assert name.startswith(f"{SESSION}=") and secret not in name
    assert {one.lower() for one in attributes} == {"httponly", "max-age=43200", f"path={ROOT}", "samesite=strict"}
    page = browser.get()
    assert page.status_code == 200 and "acme" in said(page) and page.headers["cache-control"] == "no-store"
    policy = page.headers["content-security-policy"]
    assert "script-src 'self';" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    cookie = {"cookie": name}
    assert managed.ask("GET", "/v1/models", owner=None, **cookie)[0] == 401
    assert browser.get(headers={"cookie": name[:-2] + "xx"}).status_code == 401
    assert browser.post(f"{ROOT}/sign-out").status_code == 401


def test_the_cookie_is_secure_behind_a_proxy_with_tls(managed, browser):
    answer = browser.client.post(
        f"{ROOT}/sign-in", data={"key": managed.secret("acme")}, follow_redirects=False,
        headers={"origin": "https://models.example", "host": "models.example"},
    )  # fmt: skip
    assert "; Secure" in answer.headers["set-cookie"]


@pytest.mark.parametrize("secret", ["", "hplm_wrong"])
def test_a_wrong_key_does_not_sign_in(managed, browser, secret):
    answer = browser.post(f"{ROOT}/sign-in", key=secret)
    assert answer.status_code == 401 and "set-cookie" not in answer.headers and 'role="alert"' in answer.text


def test_a_session_ends_with_its_key(managed, browser):
    secret, key = managed.site.rights.add_key(managed.secret("brief") and "brief", "manage", 0, "me")
    browser.sign_in(secret=secret)
    assert browser.get().status_code == 200
    managed.site.rights.revoke("brief", key.id, "me")
    answer = browser.get(f"{ROOT}/keys")
    assert answer.status_code == 401 and mentions(said(answer), "ended") and f'value="{ROOT}/keys"' in answer.text


@pytest.mark.parametrize("origin", ["http://evil.example", "null", None])
def test_forms_of_other_sites_are_refused(managed, browser, origin):
    browser.sign_in()
    headers = {"origin": origin} if origin is not None else {}
    for path in ("sign-in", "new", "keys", "sign-out"):
        answer = browser.client.post(f"{ROOT}/{path}", data={"key": managed.secret("acme")}, headers=headers)
        assert answer.status_code == 403 and "set-cookie" not in answer.headers, path
    assert browser.get().status_code == 200


def test_from_an_empty_manager_to_a_queued_job_and_its_end(managed, browser, base):
    browser.sign_in("first")
    assert "no models yet" in said(browser.get())
    form = browser.get(f"{ROOT}/new")
    assert 'enctype="multipart/form-data"' in form.text and "toy/law" in said(form)
    page = browser.train("slow\n", suffix="mail", model="toy/law", best="yes")
    assert page.status_code == 200 and re.fullmatch(rf"{ROOT}/jobs/ftjob-\w+", page.url.path)
    (job,) = managed.client("first").fine_tuning.jobs.list()
    assert page.url.path.endswith(job.id) and job.model == "toy/law" and job.status in WAITING
    assert managed.site.records.get(Job, job.id).wishes["best"]
    assert job.status in said(browser.get(page.url.path)) and "train.jsonl" in said(page)
    assert "http-equiv" not in page.text and "Cancel" in said(page)
    eventually(lambda: mentions(said(browser.get(page.url.path)), "training 55 %", "Exam 0"))
    poll = re.search(r'hx-get="([^"]+)"', browser.get(page.url.path).text)[1]
    assert browser.get(poll).status_code == 204, "nothing has changed"
    (base.store / "go").touch()
    try:
        eventually(lambda: "succeeded" in said(browser.get(page.url.path)))
    finally:
        (base.store / "go").unlink()
    ended = browser.get(page.url.path)
    assert "hx-get" not in ended.text and "<script" not in ended.text and "few texts" in said(ended)
    assert browser.get(poll).status_code == 200
    assert ended.text.count("<polyline") == 3 and "<td>0.500</td><td>1.000</td><td>1.000</td>" in ended.text
    assert f"{ROOT}/try/first.mail" in ended.text and "first.mail" in said(browser.get())


def test_a_job_is_cancelled_by_its_page(managed, browser, base):
    browser.sign_in("cancels")
    page = browser.train("slow\n")
    answer = browser.post(f"{page.url.path}/cancel")
    assert answer.url.path == page.url.path and "cancelled" in said(answer)
    assert browser.post(f"{page.url.path}/cancel").status_code == 409


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"suffix": "../x"}, 400, ["'../x'"]),
        ({"model": "none"}, 404, ["no such model"]),
        ({"n_epochs": "many"}, 400, ["'many'"]),
        ({"n_epochs": "0"}, 400, ["'n_epochs' is 0"]),
        ({"says": ""}, 400, ["'train.jsonl'", "empty"]),
    ],
)
def test_a_wrong_form_comes_back_with_its_values_and_leaves_no_file(managed, browser, fields, status, words):
    browser.sign_in("wrong")
    answer = browser.train(**{"suffix": "kept", **fields})
    assert answer.status_code == status and mentions(said(answer), *words) and 'role="alert"' in answer.text
    assert f'value="{fields.get("suffix", "kept")}"' in answer.text
    assert not [*managed.client("wrong").files.list()] and not [*managed.site.uploads._folder.glob("wrong/*")]


def test_a_checkpoint_is_brought_by_a_form(managed, browser, base):
    browser.sign_in("brings")
    assert f"{ROOT}/import" in browser.get().text and 'name="checkpoint" multiple' in browser.get(f"{ROOT}/import").text
    files = [("checkpoint", ("config.json", b"{}")), ("checkpoint", ("model.safetensors", b"x")), ("training_file", ("", b""))]
    wrong = browser.post(f"{ROOT}/import", files=files, model="toy", suffix="kept", least="2")
    assert wrong.status_code == 400 and mentions(said(wrong), "'least' is 2", "Choose the files again")
    assert 'value="kept"' in wrong.text and 'value="2"' in wrong.text
    assert not [*managed.client("brings").files.list()] and not [*managed.site.uploads._folder.glob("brings/*")]
    page = browser.post(f"{ROOT}/import", files=files, model="toy", suffix="mine", least="0.5", task="")
    assert page.status_code == 200 and mentions(said(page), "Training of brings.mine", "a checkpoint")
    (job,) = managed.client("brings").fine_tuning.jobs.list()
    assert managed.site.records.get(Job, job.id).wishes["least"] == 0.5
    names = sorted(managed.client("brings").files.retrieve(id).filename for id in job.hplm["import"])
    assert names == ["config.json", "model.safetensors"]
    many = [("checkpoint", (f"{number}.json", b"{}")) for number in range(33)]
    assert browser.post(f"{ROOT}/import", files=many, model="toy").status_code == 400
    full = browser.post(f"{ROOT}/new", files=files[:2], model="toy")
    assert full.status_code == 400 and mentions(said(full), "'checkpoint'")


def test_other_owners_pages_answer_as_unknown_ones(managed, browser, served):
    job = browser.sign_in("acme").train(suffix="mine").url.path.rpartition("/")[2]
    other = Browser(managed).sign_in("beta")
    for path, own, unknown in (
        ("jobs/{}", job, "ftjob-0"), ("models/{}", "acme.seen", "beta.none"), ("try/{}", "acme.seen", "beta.none"),
        ("models/{}?version=1", "acme.seen", "beta.none"),
    ):  # fmt: skip
        assert browser.get(f"{ROOT}/{path.format(own)}").status_code == 200
        theirs, none = (other.get(f"{ROOT}/{path.format(id)}") for id in (own, unknown))
        assert theirs.status_code == none.status_code == 404
        assert theirs.text.replace(own, "ID") == none.text.replace(unknown, "ID")
    for path, own, unknown, fields in (
        ("jobs/{}/cancel", job, "ftjob-0", {}), ("models/{}/promote", "acme.seen", "beta.none", {"version": "1"}),
        ("models/{}/rollback", "acme.seen", "beta.none", {}), ("try/{}", "acme.seen", "beta.none", {"text": "x"}),
        ("models/{}/delete", "acme.seen", "beta.none", None), ("keys/{}/revoke", "key-0", "key-1", {}),
    ):  # fmt: skip
        theirs, none = (
            other.post(f"{ROOT}/{path.format(id)}", **({"name": id} if fields is None else fields)) for id in (own, unknown)
        )
        assert theirs.status_code == none.status_code == 404, path
        assert theirs.text.replace(own, "ID") == none.text.replace(unknown, "ID")


def test_a_model_shows_its_versions_labels_and_mistakes_and_escapes_them(managed, browser, served):
    browser.sign_in()
    page = browser.get(f"{ROOT}/models/acme.seen")
    assert page.status_code == 200 and SCRIPT not in page.text and "&lt;script&gt;alert(1)" in page.text
    shown = said(page)
    assert mentions(shown, "0.750", "0.500", "waits as acme.seen.v2", "b 1", f"{SCRIPT} of 1", "0.86")
    assert "of 2" not in shown and f"{SCRIPT} of 2" in said(browser.get(f"{ROOT}/models/acme.seen?version=2"))
    assert f"{SCRIPT} of 1" in said(browser.get(f"{ROOT}/models/acme.seen?version=<99>"))
    assert SCRIPT not in browser.get(f"{ROOT}/{SCRIPT}").text
    assert SCRIPT not in browser.post(f"{ROOT}/try/acme.seen", text=SCRIPT).text
    assert "acme.seen.v2" in said(browser.get()) and "0.500" in said(browser.get())


def test_a_model_without_a_report_has_a_page(browser, served, base):
    """An operator has served its record."""
    (base.store / "tenants/acme.seen/1/report.json").unlink()
    page = browser.sign_in().get(f"{ROOT}/models/acme.seen")
    assert page.status_code == 200 and "Versions" in page.text and "Worst mistakes" not in page.text


def test_the_page_of_a_base_is_the_form_for_a_new_model_of_it(browser):
    browser.sign_in()
    for page in ("models", "try"):
        found = browser.get(f"{ROOT}/{page}/toy/law")
        assert found.url.path == f"{ROOT}/new" and "<option selected>toy/law</option>" in found.text, page


def test_a_try_without_a_server_says_so(managed, browser, served):
    answer = browser.sign_in().post(f"{ROOT}/try/acme.seen", text="a text", beside="acme.seen.v2")
    assert answer.status_code == 200 and said(answer).count("server cannot be reached") == 2
    assert mentions(said(answer), "cannot be told: the store contains no backbone")


def test_a_model_is_deleted_only_by_its_whole_name(managed, browser, served):
    answer = browser.sign_in().post(f"{ROOT}/models/acme.seen/delete", name="acme")
    assert answer.status_code == 400 and mentions(said(answer), "'acme'", "acme.seen")


def test_keys_are_made_shown_once_and_revoked(managed, browser):
    browser.sign_in("keeper")
    made = browser.post(f"{ROOT}/keys", role="ask", days="9")
    secret = re.search(r'value="(hplm_[^"]+)"', made.text)[1]
    assert managed.ask("GET", "/v1/models", owner=None, authorization=f"Bearer {secret}")[0] == 200
    assert secret not in browser.get(f"{ROOT}/keys").text
    (id,) = [one["id"] for one in managed.ask("GET", "/v1/keys", owner="keeper")[1]["data"] if one["role"] == "ask"]
    reader = Browser(managed).sign_in(secret=secret)
    assert reader.get(f"{ROOT}/keys").status_code == reader.get(f"{ROOT}/new").status_code == 403
    assert "New model" not in said(reader.get()) and reader.train().status_code == 403
    assert "revoked" in said(browser.post(f"{ROOT}/keys/{id}/revoke")) and reader.get().status_code == 401
    assert browser.post(f"{ROOT}/keys", role="ask", days="-1").status_code == 400


def test_the_styles_and_the_script_are_the_released_ones_and_need_no_session(browser):
    for name, digest in DIGESTS.items():
        answer = browser.get(f"{ROOT}/static/{name}")
        assert answer.status_code == 200 and hashlib.sha256(answer.content).hexdigest() == digest, name
    for name in ("%2e%2e/console.py", "none.css"):
        assert browser.get(f"{ROOT}/static/{name}").status_code == 404
    files = {path.name for path in (Path(manager.__file__).parent / "static").iterdir()}
    assert files == {*DIGESTS, "htmx.LICENSE", "pico.LICENSE", "own.css"}


def test_a_form_that_is_too_large_or_not_text_is_refused(browser):
    browser.sign_in()
    assert browser.post(f"{ROOT}/keys", role="a" * 200_000).status_code == 413
    raw = {"origin": browser.at, "content-type": "application/x-www-form-urlencoded"}
    assert browser.client.post(f"{ROOT}/keys", content=b"role=\xff", headers=raw).status_code == 400
    assert (
        browser.client.post(f"{ROOT}/keys", content=urlencode({str(n): n for n in range(99)}), headers=raw).status_code == 400
    )


@pytest.mark.parametrize("listening", [
    lambda: ports.listen("127.0.0.1", 0, "--port"), lambda: gateway._listen(gateway.parser().parse_args(["--port", "0"])),
])  # fmt: skip
def test_answers_are_sent_at_once(listening):
    """asyncio sets TCP_NODELAY on sockets of this protocol alone; others wait 40 ms between an answer's head and body."""
    with listening() as listener:
        assert listener.proto == socket.IPPROTO_TCP
