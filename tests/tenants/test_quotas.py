"""Quotas by the test's own clock. The machine of the encoders shows that each request is given back however it ends."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hplm.errors import Quota
from hplm.tenants.quotas import Quotas
from hplm.tenants.snapshot import Snapshot, Tenant
from testing.toy import WORDS
from tests.engine.asker import Asker
from tests.support.message import refusing
from tests.support.wait import Clock

ACME = Tenant("acme", 1, 1, "root", 1, "classify", ("no", "yes"), None, None)


@pytest.fixture
def clock():
    return Clock(100.0)


@pytest.fixture
def quotas(clock):
    return Quotas(clock.monotonic)


class Books:
    """What one home of a tenant may still grant, in exact fractions."""

    def __init__(self, tenant):
        self.tenant, self.in_flight = tenant, 0
        rates = {"requests": tenant.rate, "texts": tenant.texts_rate, "tokens": tenant.tokens_rate}
        self.rates = {unit: Fraction(rate) / tenant.homes for unit, rate in rates.items() if rate}
        self.most = {unit: max(Fraction(1), rate) for unit, rate in self.rates.items()}
        if tenant.rate and tenant.burst:
            self.most["requests"] = max(Fraction(1), Fraction(tenant.burst) / tenant.homes)
        self.left = dict(self.most)

    def wait(self, seconds):
        self.left = {
            unit: min(self.most[unit], left + self.rates[unit] * Fraction(seconds)) for unit, left in self.left.items()
        }

    def refusal(self, takes):
        """Returns what a refusal must say, or nothing if the request is accepted."""
        most = max(1, self.tenant.in_flight // self.tenant.homes)
        if takes and self.tenant.in_flight and self.in_flight >= most:
            return [f"{most} requests in flight", "retry after 0.1 s"]
        waits = {unit: (1 - left) / self.rates[unit] for unit, left in self.left.items() if left < 1}
        if not waits:
            return []
        unit = max(waits, key=waits.get)
        return [f"{float(self.rates[unit]):,.12g} {unit} a second", f"retry after {ceil(waits[unit] * 1000) / 1000:.3f} s"]

    def charge(self, **cost):
        self.left = {unit: left - cost.get(unit, 0) for unit, left in self.left.items()}


TENANTS = st.builds(
    replace,
    st.just(ACME),
    rate=st.sampled_from([0, 0.5, 2, 8]),
    burst=st.sampled_from([0, 0.25, 1, 16]),
    texts_rate=st.sampled_from([0, 0.5, 4, 32]),
    tokens_rate=st.sampled_from([0, 4, 2048]),
    in_flight=st.sampled_from([0, 1, 3, 8]),
    homes=st.sampled_from([1, 1, 2, 4]),
)
COSTS = st.tuples(st.integers(1, 8), st.sampled_from([1, 3, 64, 4096]))
STEPS = st.one_of(
    st.tuples(st.just("take"), st.integers(0, 1), COSTS),
    st.tuples(st.just("spend"), st.integers(0, 1), COSTS),
    st.tuples(st.just("give back"), st.integers(0, 1), st.none()),
    st.tuples(st.just("wait"), st.none(), st.sampled_from([0.125, 1, 16, 3600, "as told"])),
)


@given(st.tuples(TENANTS, TENANTS), st.lists(STEPS, max_size=60))
@example((replace(ACME, in_flight=4, homes=2),) * 2, [("take", 0, (1, 1))] * 3)
def test_a_request_is_accepted_if_and_only_if_there_is_something_left_of_each_limit(tenants, steps):
    """It takes what it costs, now or when that is known; a refused one takes nothing, and is told how long to wait."""
    clock, hint = Clock(128.0), 0.0
    quotas, books = Quotas(clock.monotonic), [Books(replace(tenant, uid=uid)) for uid, tenant in enumerate(tenants)]
    for step, who, what in steps:
        if step == "wait":
            seconds = ceil((hint if what == "as told" else what) * 8) / 8  # exact as a float
            clock.seconds += seconds
            for one in books:
                one.wait(seconds)
            continue
        book = books[who]
        if step == "give back":
            if book.in_flight:
                quotas.give_back(book.tenant)
                book.in_flight -= 1
            continue
        texts, tokens = what
        expected = book.refusal(step == "take")
        try:
            if step == "take":
                quotas.take(book.tenant, texts, tokens)
            else:
                quotas.spend(book.tenant)
        except Quota as refused:
            assert refused.wire().startswith("[quota]") and expected and all(part in str(refused) for part in expected)
            assert "'acme'" in str(refused) and ("homes" in str(refused)) == (book.tenant.homes > 1)
            hint = float(expected[1].split()[2])
            continue
        assert not expected, f"a request was taken, which is to be refused with {expected}"
        book.in_flight += step == "take"
        book.charge(requests=1, texts=texts, tokens=tokens)
        if step == "spend":
            quotas.charge(book.tenant, texts, tokens)
    clock.seconds += 10**6
    for book in books:
        for _ in range(book.in_flight):
            quotas.give_back(book.tenant)
    quotas.spend(replace(ACME, uid=77, rate=1))
    assert len(quotas) == 1, "accounts that have recovered are forgotten"


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


def test_new_settings_apply_to_the_next_request(quotas, clock):
    assert _taken(quotas, ACME, 1000) == 1000 and len(quotas) == 0, "no limit, no account"
    assert _taken(quotas, replace(ACME, rate=2), 100) == 2
    assert _taken(quotas, replace(ACME, rate=50), 100) == 0  # a higher rate, but not for the time that has passed
    clock.seconds += 1
    assert _taken(quotas, replace(ACME, rate=50), 100) == 50
    clock.seconds += 1
    assert _taken(quotas, replace(ACME, rate=2), 100) == 2
    assert _taken(quotas, ACME, 100) == 100
    for _ in range(3):
        quotas.take(ACME, 1, 1)
    with refusing(Quota, 3, "retry after 0.1 s"):
        quotas.take(replace(ACME, in_flight=3), 1, 1)  # requests that were in flight before


def test_many_threads_at_once_never_exceed_the_limit(quotas):
    tenant = replace(ACME, rate=1000, burst=500, in_flight=8)
    with ThreadPoolExecutor(16) as pool:
        taken = sum(pool.map(lambda _: _taken(quotas, tenant, 100), range(16)))
    assert taken <= 500
    assert _taken(quotas, replace(ACME, in_flight=1), 5) == 5, "something was not given back"


def test_the_service_counts_texts_and_tokens(toy, tmp_path, clock):
    folder = shutil.copytree(toy.folder, tmp_path / "1")
    snapshot = Snapshot.load(folder / "tenants.json")
    rates = {"acme": {"tokens_rate": 11}, "beta": {"texts_rate": 3}}
    tenants = [replace(one, **rates.get(one.id, {})) for one in snapshot.tenants]
    Snapshot(0, snapshot.branches, tenants, snapshot.export).save(folder / "tenants.json")
    asker = Asker(folder)
    asker.service.served.quotas = Quotas(clock.monotonic)
    asker.wait(asker.ask("acme", [" ".join(WORDS[:3])] * 2))  # two texts with five tokens each
    asker.wait(asker.ask("acme", [WORDS[0]]))
    with refusing(Quota, 11, "tokens"):
        asker.ask("acme", [WORDS[0]])
    asker.answers.pop()  # the request was refused
    asker.wait(asker.ask("beta", [WORDS[0]] * 3))
    with refusing(Quota, 3, "texts"):
        asker.ask("beta", [WORDS[0]])
    asker.answers.pop()
    asker.close()
