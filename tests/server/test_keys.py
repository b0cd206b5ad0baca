"""Keys and quotas of a running server: a valid key is accepted, everything else gets the 404 of an unknown tenant."""

import time
from dataclasses import replace

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.cli.serve import open_tenants
from hplm.tenants.keys import new_key
from hplm.tenants.snapshot import Snapshot
from testing.toy import WORDS
from tests.server.stock import LIBRARIES, STATUS, Stock
from tests.support.message import mentions
from tests.support.servers import serving

pytestmark = pytest.mark.slow

SECRETS, KEYS = zip(*(new_key(), new_key(), new_key(expires=int(time.time()) - 1)), strict=True)
SETTINGS = {
    "acme": {"keys": KEYS},
    "city": {"keys": (new_key()[1],)},
    "flux": {"rate": 0.01, "burst": 3.0},
    "dune": {"texts_rate": 0.01},
    "gaia": {"tokens_rate": 0.01},
}


@pytest.fixture(scope="module")
def repository(toy, tmp_path_factory):
    repository = tmp_path_factory.mktemp("keys")
    export(toy.store, repository, ServingOptions(dtype="fp32"))
    path = repository / "toy/1/tenants.json"
    stored = Snapshot.load(path)
    tenants = [replace(tenant, **SETTINGS.get(tenant.id, {})) for tenant in stored.tenants]
    Snapshot(0, stored.branches, tenants, stored.export).save(path)
    return repository


@pytest.fixture(scope="module")
def server(repository):
    with serving(repository) as server:
        yield server


@pytest.fixture(params=LIBRARIES)
def stock(request, server):
    return Stock(server, request.param)


def _refusal(stock, *args, **kwargs):
    with pytest.raises(InferenceServerException) as caught:
        stock.ask(*args, **kwargs)
    return caught.value.status(), caught.value.message()


@pytest.mark.parametrize("model", ["toy", "hplm"])
@pytest.mark.parametrize("secret", SECRETS[:2], ids=["one", "the other"])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_each_key_is_accepted(stock, model, secret, scheme):
    answer = stock.ask([WORDS[0]], "acme", model=model, headers={"authorization": f"{scheme} {secret}"})
    assert answer["LABEL"].shape == (1, 1)


@pytest.mark.parametrize("model", ["toy", "hplm"])
def test_the_case_of_the_headers_name_does_not_matter_over_http(server, model):
    stock = Stock(server, "http")
    for name in ("Authorization", "AUTHORIZATION", "authorization"):
        assert stock.ask([WORDS[0]], "acme", model=model, headers={name: f"Bearer {SECRETS[0]}"})["LABEL"].shape == (1, 1)


@pytest.mark.parametrize("model", ["toy", "hplm"])
def test_every_refusal_equals_that_of_an_unknown_tenant(stock, model):
    stranger = _refusal(stock, [WORDS[0]], "nobody", model=model)
    assert stranger[0] == STATUS[stock.protocol][404] and "[no_tenant]" in stranger[1]
    for headers in (
        None,
        {"authorization": f"Bearer {SECRETS[2]}"},  # expired
        {"authorization": f"Bearer {new_key()[0]}"},
        {"authorization": f"Basic {SECRETS[0]}"},
        {"authorization": SECRETS[0]},
        {"authorization": f"Bearer {KEYS[0].digest}"},
        {"x-authorization": f"Bearer {SECRETS[0]}"},
    ):
        assert _refusal(stock, [WORDS[0]], "acme", model=model, headers=headers) == stranger
        assert _refusal(stock, [""], "acme", model=model, headers=headers, top_k="x") == stranger
    assert _refusal(stock, [WORDS[0]], "city", model=model, headers={"authorization": f"Bearer {SECRETS[0]}"}) == stranger


@pytest.mark.parametrize("model", ["toy", "hplm"])
def test_a_header_that_names_another_tenant_is_refused(stock, model):
    named = {"hplm-tenant": "beta"}
    assert stock.ask([WORDS[0]], "beta", model=model, headers=named)["LABEL"].shape == (1, 1)
    for tenant in ("acme", None):
        status, message = _refusal(stock, [WORDS[0]], tenant, model=model, headers=named)
        assert status == STATUS[stock.protocol][400] and mentions(message, "[invalid_input]", "hplm-tenant")


def test_lookup_gives_no_ticket_without_a_key(stock):
    text = stock.tensor("TEXT", np.array([[b"x"]], dtype=object))
    with pytest.raises(InferenceServerException) as caught:
        stock.client.infer("toy-lookup", [text], parameters={"tenant": "acme"})
    assert caught.value.status() == STATUS[stock.protocol][404]


def test_a_quota_is_503_with_a_waiting_time_and_other_tenants_are_served(server):
    stock = Stock(server, "http")
    for _ in range(3):
        stock.ask([WORDS[0]], "flux")
    for model in ("toy", "hplm"):
        status, message = _refusal(stock, [WORDS[0]], "flux", model=model)
        assert status == "503" and mentions(message, "[quota]", "'flux'", 0.01, "retry after")
    assert _refusal(Stock(server, "grpc"), [WORDS[0]], "flux")[0] == "StatusCode.UNAVAILABLE"
    assert stock.ask([WORDS[0]], "beta")["LABEL"].shape == (1, 1)


@pytest.mark.parametrize(("tenant", "unit"), [("dune", "texts"), ("gaia", "tokens")])
def test_texts_and_tokens_have_quotas_too_and_are_refused_before_they_are_tokenised(server, tenant, unit):
    stock = Stock(server, "http")
    stock.ask([WORDS[0]] * 2, tenant)
    for text in (WORDS[0], ""):  # no model reads the second one
        for model in ("toy", "hplm"):
            status, message = _refusal(stock, [text], tenant, model=model)
            assert status == "503" and mentions(message, "[quota]", f"'{tenant}'", 0.01, unit, "retry after")


def test_tenants_without_keys_are_counted(repository, tmp_path):
    assert open_tenants(repository, None) == ["beta", "dune", "echo", "flux", "gaia", "hugo"]
    assert open_tenants(tmp_path, None) == []
