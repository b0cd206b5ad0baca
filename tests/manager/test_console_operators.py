"""The operators' pages of the console."""

import pytest

from manager.pages import ACTS_FOR
from manager.rendering import ROOT
from manager.rights import COMMAND_LINE, OPERATOR
from tests.manager.browsing import Browser, said
from tests.support.message import mentions

PAGES = ("operate", "owners", "owners/acme", "domains", "log")


@pytest.fixture(scope="module")
def operator(managed):
    managed.secret("acme")
    browser = Browser(managed).sign_in(secret=managed.site.rights.add_key(None, OPERATOR, 0, COMMAND_LINE)[0])
    yield browser
    browser.client.close()


@pytest.mark.parametrize("page", PAGES)
def test_operators_pages_are_for_operators(managed, operator, page):
    assert operator.get(f"{ROOT}/{page}").status_code == 200
    owner = Browser(managed).sign_in()
    answer = owner.get(f"{ROOT}/{page}")
    assert answer.status_code == 403 and mentions(said(answer), "'manage'", "'operator'")
    assert owner.post(f"{ROOT}/{page}", name="x", owner="beta").status_code in (403, 404)


def test_an_operator_begins_with_what_runs(managed, operator):
    page = operator.get()
    assert page.url.path == f"{ROOT}/operate" and mentions(said(page), "127.0.0.1:1", "no: it gives no metrics", "toy 0 2")
    assert operator.get(f"{ROOT}/keys").url.path == f"{ROOT}/operate", "whose keys?"
    job = Browser(managed).sign_in().train("slow\n", suffix="queue").url.path.rpartition("/")[2]
    assert mentions(said(operator.get()), job[:14], "acme.queue")
    Browser(managed).sign_in().post(f"{ROOT}/jobs/{job}/cancel")


def test_owners_are_added_limited_and_acted_for(managed, operator):
    page = operator.post(f"{ROOT}/owners", name="epsilon")
    assert page.status_code == 200 and 'value="hplm_' in page.text and "hplm_" not in operator.get(f"{ROOT}/owners").text
    assert operator.post(f"{ROOT}/owners", name="epsilon").status_code == 400
    page = operator.post(f"{ROOT}/owners/epsilon", jobs_a_day="3", bytes="")
    assert page.url.path == f"{ROOT}/owners" and "0 of 3" in said(page)
    assert operator.post(f"{ROOT}/owners/epsilon", jobs_a_day="many").status_code == 400
    assert operator.get(f"{ROOT}/owners/none").status_code == operator.post(f"{ROOT}/act-as", owner="none").status_code == 404
    assert ACTS_FOR not in operator.client.cookies
    page = operator.post(f"{ROOT}/act-as", owner="epsilon")
    assert page.url.path == ROOT and mentions(said(page), "epsilon", "You have no models yet", "Stop acting for epsilon")
    assert mentions(said(operator.get(f"{ROOT}/log")), "owner limits", "jobs_a_day", "epsilon")
    assert operator.post(f"{ROOT}/act-as").url.path == f"{ROOT}/operate" and ACTS_FOR not in operator.client.cookies


def test_an_owner_who_says_to_act_for_another_one_does_not(managed, operator):
    owner = Browser(managed).sign_in("beta")
    assert owner.post(f"{ROOT}/act-as", owner="acme").status_code == 403
    owner.client.cookies.set(ACTS_FOR, "acme", path=ROOT)
    assert "acme" not in said(owner.get())


def test_a_domain_is_built_of_a_corpus_by_a_form(managed, operator):
    corpus = [("corpus", ("law.txt", b"a text\n" * 50))]
    wrong = operator.post(f"{ROOT}/domains", files=corpus, id="none/law")
    assert wrong.status_code == 400 and mentions(said(wrong), "'none/law'", "Choose the file again")
    assert 'value="none/law"' in wrong.text and not [*managed.site.uploads._folder.glob("operators/*")]
    page = operator.post(f"{ROOT}/domains", files=corpus, id="toy/shop", minutes="0.5", parent="")
    assert page.status_code == 200 and mentions(said(page), "toy/shop", "law.txt"), said(page)
    assert page.url.path.startswith(f"{ROOT}/jobs/ftjob-")


def test_unknown_domains_and_wrong_records_are_refused_by_forms(managed, operator):
    for verb in ("rollback", "delete"):
        answer = operator.post(f"{ROOT}/domains/toy/none/{verb}")
        assert answer.status_code == 404 and mentions(said(answer), "'toy/none'")
    record = [("file", ("a.safetensors", b"no record"))]
    for id, model, named in (("nobody.a", "toy", "'nobody.a'"), ("acme.a", "none", "'none'")):
        wrong = operator.post(f"{ROOT}/records", files=record, id=id, model=model)
        assert wrong.status_code == 400 and mentions(said(wrong), named, "Choose the file again")
        assert f'value="{id}"' in wrong.text and not [*managed.site.uploads._folder.glob("operators/*.safetensors")]
