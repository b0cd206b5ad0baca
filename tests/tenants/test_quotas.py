"""Quotas with the test's own clock; and in the service, every request is given back however it ends."""

import random
import re
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from hplm.errors import DeadlineMissed, Internal, InvalidInput, QueueFull, Quota
from hplm.tenants.quotas import Quotas
from hplm.tenants.snapshot import Snapshot
from hplm.tenants.ticket import Ticket
from testing.toy import WORDS
from tests.engine.asker import Asker
from tests.engine.test_line import Gate
from tests.support.message import mentioning, mentions

pytestmark = pytest.mark.slow


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def quotas(clock):
    return Quotas(clock)


@pytest.fixture
def acme(toy):
    return Snapshot.load(toy.folder / "tenants.json").find("acme")


def _taken(quotas, tenant, attempts):
    """Returns how many of the attempts are accepted. Each request ends at once."""
    taken = 0
    for _ in range(attempts):
        try:
            quotas.take(tenant, 1, 1)
        except Quota:
            continue
        quotas.give_back(tenant)
        taken += 1
    return taken


def test_without_a_quota_there_is_no_limit_and_no_account(quotas, acme):
    assert _taken(quotas, acme, 1000) == 1000
    assert len(quotas) == 0


@pytest.mark.parametrize("homes", [1, 2, 3, 4])
def test_the_homes_of_a_tenant_admit_together_what_its_quotas_say(clock, acme, homes):
    tenant = replace(acme, rate=12, texts_rate=1200, tokens_rate=12_000, burst=24, homes=homes)
    replicas = [Quotas(clock) for _ in range(homes)]
    assert sum(_taken(one, tenant, 100) for one in replicas) == 24
    taken = 0
    for _ in range(1000):
        clock.now += 0.01
        taken += sum(_taken(one, tenant, 1) for one in replicas)
    assert 120 - homes <= taken <= 120
    with pytest.raises(Quota, match=mentioning("12" if homes == 1 else f"{12 / homes:g}")) as caught:
        for _ in range(100):
            replicas[0].take(tenant, 1, 1)
    assert ("homes" in str(caught.value)) == (homes > 1)


@pytest.mark.parametrize(("in_flight", "homes", "each"), [(9, 3, 3), (10, 3, 3), (2, 3, 1), (7, 1, 7)])
def test_each_home_grants_its_part_of_the_requests_in_flight(quotas, acme, in_flight, homes, each):
    tenant = replace(acme, in_flight=in_flight, homes=homes)
    for _ in range(each):
        quotas.take(tenant, 1, 1)
    with pytest.raises(Quota, match=mentioning(each)):
        quotas.take(tenant, 1, 1)


@pytest.mark.parametrize("unit", ["texts", "tokens"])
def test_a_home_grants_its_part_of_texts_and_tokens(quotas, clock, acme, unit):
    tenant = replace(acme, homes=4, **{f"{unit}_rate": 40})
    quotas.take(tenant, **{"texts": 1, "tokens": 1, unit: 30})  # of 10 that may come at once
    clock.now += 1.9
    assert not _taken(quotas, tenant, 1)
    clock.now += 0.3
    assert _taken(quotas, tenant, 1)


@pytest.mark.parametrize(
    "rate, burst, at_once, in_ten_seconds",
    [(5, 0, 5, 50), (5, 20, 20, 50), (0.5, 0, 1, 5), (2.5, 0, 2, 25), (5, 0.1, 1, 50)],
)
def test_a_burst_at_once_and_then_the_rate(quotas, clock, acme, rate, burst, at_once, in_ten_seconds):
    tenant = replace(acme, rate=rate, burst=burst)
    assert _taken(quotas, tenant, 100) == at_once
    taken = 0
    for _ in range(1000):
        clock.now += 0.01
        taken += _taken(quotas, tenant, 1)
    assert taken in (in_ten_seconds, in_ten_seconds - 1, in_ten_seconds + 1)
    clock.now += 3600  # idle time does not add up
    assert _taken(quotas, tenant, 100) == at_once


@pytest.mark.parametrize("rate", [0.003, 0.5, 7, 333])
def test_a_retry_is_accepted_after_the_given_time_and_not_before(quotas, clock, acme, rate):
    tenant = replace(acme, rate=rate, burst=1)
    quotas.take(tenant, 1, 1)
    with pytest.raises(Quota) as caught:
        quotas.take(tenant, 1, 1)
    assert caught.value.wire().startswith("[quota]") and mentions(caught.value, "'acme'")
    hint = float(re.search(r"retry after (\d+\.\d+) s\b", str(caught.value))[1])
    clock.now += hint - 0.002
    with pytest.raises(Quota):
        quotas.take(tenant, 1, 1)
    clock.now += 0.002
    quotas.take(tenant, 1, 1)


def test_requests_in_flight_are_given_back(quotas, acme):
    tenant = replace(acme, in_flight=2)
    quotas.take(tenant, 1, 1)
    quotas.take(tenant, 1, 1)
    for _ in range(3):
        with pytest.raises(Quota, match=mentioning(2, "retry after 0.1 s")):
            quotas.take(tenant, 1, 1)
        quotas.give_back(tenant)
        quotas.take(tenant, 1, 1)


def test_a_refused_request_does_not_count_for_the_rate(quotas, clock, acme):
    tenant = replace(acme, rate=10, burst=2, in_flight=1)
    quotas.take(tenant, 1, 1)
    for _ in range(5):
        with pytest.raises(Quota, match=mentioning(1, "retry after 0.1 s")):
            quotas.take(tenant, 1, 1)
    quotas.give_back(tenant)
    quotas.take(tenant, 1, 1)


def test_spending_counts_only_the_rate_and_its_accounts_are_forgotten(quotas, clock, acme):
    tenant = replace(acme, rate=2, in_flight=1)
    for _ in range(2):
        quotas.spend(tenant)
    with pytest.raises(Quota, match=r"retry after 0\.500 s"):
        quotas.spend(tenant)
    clock.now += 10
    quotas.spend(replace(acme, uid=77, rate=1))
    quotas.spend(acme)
    assert len(quotas) == 1


COSTS = {"texts": (7, 1), "tokens": (1, 7)}  # of a request: texts, tokens


@pytest.mark.parametrize("unit", COSTS)
@pytest.mark.parametrize("rate", [0.5, 5, 40])
def test_a_request_takes_all_its_texts_and_tokens_and_the_rate_holds_in_the_mean(quotas, clock, acme, unit, rate):
    tenant, taken = replace(acme, **{f"{unit}_rate": rate}), 0
    for _ in range(10_000):
        clock.now += 0.01
        try:
            quotas.take(tenant, *COSTS[unit])
        except Quota as refused:
            assert mentions(refused, "'acme'", f"{rate:g}", unit)
        else:
            quotas.give_back(tenant)
            taken += 7
    assert 100 * rate - 7 <= taken <= 100 * rate + max(1, rate) + 7


@pytest.mark.parametrize("unit", COSTS)
def test_a_request_in_debt_is_accepted_after_the_given_time_and_not_before(quotas, clock, acme, unit):
    tenant = replace(acme, **{f"{unit}_rate": 2})
    quotas.take(tenant, *COSTS[unit])  # two were left, and seven are taken
    with pytest.raises(Quota, match=mentioning("'acme'", 2, unit, "retry after 3.000 s")):
        quotas.take(tenant, 1, 1)
    clock.now += 2.998
    with pytest.raises(Quota):
        quotas.take(tenant, 1, 1)
    clock.now += 0.002
    quotas.take(tenant, 1, 1)


def test_of_several_limits_the_one_with_the_longest_wait_is_named(quotas, acme):
    tenant = replace(acme, rate=1, texts_rate=2, tokens_rate=1000)
    quotas.take(tenant, 12, 3000)
    with pytest.raises(Quota, match=mentioning(2, "texts", "retry after 5.500 s")):
        quotas.take(tenant, 1, 1)


def test_a_cost_that_is_known_later_counts_as_much(quotas, clock, acme):
    tenant = replace(acme, texts_rate=10, tokens_rate=1000)
    quotas.spend(tenant)
    quotas.spend(tenant)  # the cost of the first one is not known yet
    quotas.charge(tenant, 3, 500)
    quotas.charge(tenant, 3, 700)
    with pytest.raises(Quota, match=mentioning("1,000", "tokens", "retry after 0.201 s")):
        quotas.spend(tenant)
    quotas.charge(acme, 3, 500)  # without limits
    clock.now += 100
    quotas.spend(replace(acme, uid=77, rate=1))
    assert len(quotas) == 1, "an account that has recovered is forgotten"


def test_tenants_have_separate_quotas(quotas, acme):
    one, other = replace(acme, rate=3), replace(acme, uid=77, rate=3)
    assert _taken(quotas, one, 10) == 3
    assert _taken(quotas, other, 10) == 3


def test_new_settings_apply_to_the_next_request(quotas, clock, acme):
    assert _taken(quotas, replace(acme, rate=2), 100) == 2
    assert _taken(quotas, replace(acme, rate=50), 100) == 0  # a higher rate, but not for the time that has passed
    clock.now += 1
    assert _taken(quotas, replace(acme, rate=50), 100) == 50
    clock.now += 1
    assert _taken(quotas, replace(acme, rate=2), 100) == 2
    assert _taken(quotas, acme, 100) == 100


def test_a_new_quota_counts_requests_that_are_already_in_flight(quotas, acme):
    for _ in range(3):
        quotas.take(acme, 1, 1)
    with pytest.raises(Quota, match=mentioning(3, "retry after 0.1 s")):
        quotas.take(replace(acme, in_flight=3), 1, 1)
    for _ in range(3):
        quotas.give_back(acme)
    quotas.take(replace(acme, in_flight=3), 1, 1)


def test_accounts_of_idle_tenants_are_forgotten(quotas, clock, acme):
    """A hundred thousand tenants, ten requests a second: only tenants of the last seconds have accounts."""
    rng, most = random.Random(1), 0
    stuck = replace(acme, uid=10**7, in_flight=1)
    quotas.take(stuck, 1, 1)
    for uid in range(5000):
        clock.now += 0.1
        _taken(quotas, replace(acme, uid=uid, rate=rng.choice([0, 1, 5]), burst=rng.choice([0, 10])), 3)
        most = max(most, len(quotas))
    assert most < 100
    assert len(quotas) >= 1
    with pytest.raises(Quota):
        quotas.take(stuck, 1, 1)


def test_many_threads_at_once_never_exceed_the_limit(quotas, acme):
    tenant = replace(acme, rate=1000, burst=500, in_flight=8)
    with ThreadPoolExecutor(16) as pool:
        taken = sum(pool.map(lambda _: _taken(quotas, tenant, 100), range(16)))
    assert taken <= 500
    assert _taken(quotas, replace(acme, in_flight=1), 5) == 5, "something was not given back"


@pytest.fixture
def limited(toy, tmp_path):
    def make(tenant_id="acme", **changes):
        folder = shutil.copytree(toy.folder, tmp_path / "1")
        snapshot = Snapshot.load(folder / "tenants.json")
        tenants = [replace(tenant, **changes) if tenant.id == tenant_id else tenant for tenant in snapshot.tenants]
        Snapshot(0, snapshot.branches, tenants, snapshot.export).save(folder / "tenants.json")
        return folder

    return make


def test_the_service_counts_only_tenants_with_a_quota(limited, monkeypatch):
    with monkeypatch.context() as patched:
        gate, asker = Gate(patched), Asker(limited(in_flight=2))
        numbers = [asker.ask("acme", [WORDS[i]]) for i in range(2)]
        _refused(asker, Quota, "acme", [WORDS[2]])
        numbers += [asker.ask("beta", [WORDS[i]]) for i in range(5)]
        gate.opened.set()
        assert not any(isinstance(asker.wait(number), Exception) for number in numbers)
    asker.wait(asker.ask("acme", [WORDS[0]]))
    asker.close()


def test_the_rate_holds_in_the_service(limited):
    asker = Asker(limited(rate=0.001, burst=3))
    for _ in range(3):
        asker.wait(asker.ask("acme", [WORDS[0]]))
    _refused(asker, Quota, "acme", [WORDS[0]])
    asker.close()


def test_the_service_counts_texts_and_tokens(limited, clock):
    asker = Asker(limited(texts_rate=4, tokens_rate=11))
    asker.service.served[0].quotas = Quotas(clock)
    asker.wait(asker.ask("acme", [" ".join(WORDS[:3])] * 2))  # two texts with five tokens each
    asker.wait(asker.ask("acme", [WORDS[0]]))
    with pytest.raises(Quota, match=mentioning(11, "tokens")):
        asker.ask("acme", [WORDS[0]])
    asker.answers.pop()  # the request was refused
    clock.now += 1
    asker.wait(asker.ask("acme", [WORDS[0]] * 4))
    clock.now += 0.2
    with pytest.raises(Quota, match=mentioning(11, "tokens")):
        asker.ask("acme", [WORDS[0]])
    asker.answers.pop()
    asker.close()


def test_a_request_is_given_back_however_it_ends(limited, monkeypatch):
    """At most one request is in flight. If one were not given back, the next would be refused."""
    asker = Asker(limited("beta", in_flight=1), queue_texts="4")
    _refused(asker, InvalidInput, "beta", [WORDS[0]], top_k=2)
    _refused(asker, QueueFull, "beta", [WORDS[0]] * 5)
    with monkeypatch.context() as patched:
        Gate(patched, failure=RuntimeError("device lost")).opened.set()
        assert isinstance(asker.wait(asker.ask("beta", [WORDS[0]] * 3)), Internal)
    assert isinstance(asker.wait(asker.ask("beta", [WORDS[0]], deadline_ns=1)), DeadlineMissed)
    assert not isinstance(asker.wait(asker.ask("beta", [WORDS[0]] * 3)), Exception)
    asker.close()


def test_a_request_whose_answer_cannot_be_sent_is_given_back(limited):
    asker = Asker(limited(in_flight=1))
    view, tried = asker.backbone.view, threading.Event()
    resolved = asker.lookup.resolve(view, view.snapshot.find("acme"), [WORDS[0]], None, False)

    def nobody_listens(answer, counted):
        tried.set()
        raise OSError("nobody listens")

    ticket = Ticket(view.snapshot.export_number, 0, view.snapshot.find("acme").uid, 1, time.monotonic_ns(), 0, 0, 0)
    asker.service.submit(ticket, resolved, nobody_listens)
    assert tried.wait(60)
    assert not isinstance(asker.wait(asker.ask("acme", [WORDS[0]])), Exception)
    asker.close()


def _refused(asker, kind, *args, **kwargs):
    with pytest.raises(kind):
        asker.ask(*args, **kwargs)
    asker.answers.pop()  # the request was refused
