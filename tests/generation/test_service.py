"""A served decoder: bad input is refused, limits and promises are kept. `tests/server/test_generation.py` has its answers."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from builder.store.store import TenantFile
from hplm.engine.backbone import Backbone
from hplm.engine.driver import Driver
from hplm.errors import Draining, InvalidInput, Quota
from hplm.generation.asked import Asked
from hplm.generation.sampling import Sampling
from hplm.generation.service import Service
from hplm.generation.settings import Promise, Settings
from hplm.metrics.names import ADAPTERS_INFO, PROMISED
from hplm.model.prompts import READ_CHARACTERS, Prompts
from hplm.tenants.manager import Manager
from testing.toy import CHAT
from tests.generation.small import written
from tests.generation.world import Said
from tests.support.generative import GenerativeReference
from tests.support.message import mentioning
from tests.support.wait import Hold, eventually

HOUR = 3600 * 10**9  # nanoseconds
PLAIN = TenantFile("plain", 1, "root", 1, "generate", [], 0)
LORA = TenantFile("lora", 1, "law", 1, "generate", [], 4, "lora", ("query", "value", "ffn_in", "ffn_out", "ffn_gate"))
WIDE = TenantFile("wide", 1, "root", 1, "generate", [], 16, "lora", ("query", "key", "value", "attention_out"))
GREEDY = Sampling(temperature=0, max_tokens=24, ignore_eos=True)
ONCE = replace(GREEDY, max_tokens=1)
ALL_BUT_END = tuple({*range(CHAT.vocabulary)} - {*CHAT.end_ids})
READ = READ_CHARACTERS * CHAT.positions
LEAST_NS = 2_000_000  # between two tokens


class Reading(Prompts):
    """Notes what was tokenised last."""

    def encode(self, text):
        self.read = text
        return super().encode(text)


class Place:
    def __init__(self, folder, **settings):
        tenants = [PLAIN, LORA, WIDE, replace(LORA, id="alike")]
        version, state = written(folder, tenants), folder / "state"
        self.manager = Manager(version, state)
        self.manager.registry.begin()
        self.backbone = Backbone(version, state)
        self.prompts = Reading.load(version / Backbone.TOKENIZER, self.backbone.config)
        self.service = self.started(**settings)

    def made(self, **settings):
        return Service(self.backbone, self.prompts, Settings(**{"cache_tokens": 512, "max_sequences": 8, **settings}))

    def started(self, **settings):
        service = self.made(**settings)
        service.driver = Driver(service.reader)
        service.reader.wake = service.driver.wake
        return service

    def ask(self, prompt, tenant="plain", sampling=GREEDY, service=None, messages=None, before=lambda: None, **more):
        """`before` is called before each piece is taken. `more`: other parameters of the request."""
        view, said = self.backbone.view, Said()
        service = service or self.service
        asked, respond = Asked(prompt, messages, None, more), lambda piece: (before(), said(piece))
        said.request = service.submit(view, view.snapshot.find(tenant), asked, sampling, respond)
        service.reader.wake()
        return said

    def refused(self, *given, **more):
        """Raises what the request was refused with, at once or when its prompt was read."""
        said = self.ask(*given, **more).wait()
        if said.error is not None:
            raise said.error

    @contextmanager
    def limits(self, tenant, **limits):
        for own in (limits, dict.fromkeys(limits, 0)):
            self.manager.limit(tenant, **own)
            self.backbone.refresh()
            if own is limits:
                yield


def end(service):
    """Ends a service when it has answered all."""
    service.driver.close()
    service.reader.join()
    service.reader.wake = lambda: None
    service.driver.join()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = Place(tmp_path_factory.mktemp("service"), least_token_ns=LEAST_NS)
    yield place
    end(place.service)


@pytest.mark.parametrize(
    ("prompt", "given", "named"),
    [
        ("a" * CHAT.positions, {}, ["max_tokens", CHAT.positions]),
        ("a" * (READ + 1), {}, ["truncate", f"{READ:,}"]),
        ("a", {"token_ms": LEAST_NS / 1e6 - 0.001}, ["token_ms", 2]),
        ("a", {"sampling": replace(GREEDY, min_tokens=1, stop_token_ids=ALL_BUT_END)}, ["min_tokens", "stop_token_ids"]),
    ],
    ids=["long", "too long to be read", "less than the operator allows", "no token is left"],
)
def test_bad_input_is_refused(place, prompt, given, named):
    """Which values are refused by themselves: `tests/refusals/test_contract.py`."""
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        place.refused(prompt, **given)


def test_only_the_end_of_a_long_prompt_is_read_and_kept_if_it_may_be_cut(place):
    end = "".join(chr(97 + i % 26) for i in range(READ))
    said = place.ask("b" * 10 * READ + end, sampling=replace(GREEDY, max_tokens=8), truncate=True).wait()
    assert place.prompts.read == end
    kept = place.prompts.encode(end).tolist()
    kept = [kept[0], *kept[len(kept) - (CHAT.positions - 8 - 1) :]]
    assert said.pieces[-1].prompt_tokens == len(kept) == CHAT.positions - 8
    expected = GenerativeReference(place.backbone).generate(kept, "plain", 8)
    assert said.ids()[:1] == expected.tokens[:1] or expected.margins[0] <= 1e-3


def test_requests_and_generated_tokens_count_for_the_quotas(place):
    with place.limits("plain", tokens_rate=1):
        place.ask("a", sampling=replace(GREEDY, max_tokens=90)).wait()
        with pytest.raises(Quota):
            place.refused("a")
    ended = place.started()
    end(ended)
    with place.limits("lora", in_flight=1):
        for _ in range(2):  # what was refused is not in flight
            with pytest.raises(InvalidInput):
                place.refused(None, "lora", messages="no JSON")
            with pytest.raises(Draining):
                place.refused("a", "lora", service=ended)
        with Hold() as hold:
            first = place.ask("a", "lora", before=hold.pass_through)
            with pytest.raises(Quota):  # before its prompt is read, which takes time
                place.ask(None, "lora", messages="no JSON")
        first.wait()
        assert place.ask("a", "lora").wait().error is None


def adapters(service):
    """Returns the tenants whose adapters are loaded, and awaited."""
    service.look()
    ((labels, _),) = [(labels, level) for (metric, labels), level in service.meter.take()[1].items() if metric is ADAPTERS_INFO]
    return labels[1:]


def test_levels_name_the_tenants_whose_adapters_are_loaded_and_awaited(place):
    service, asked = place.made(max_sequences=1), []

    def ask(*tenants):
        asked.extend(place.ask("a", tenant, service=service) for tenant in tenants)
        eventually(lambda: len(service.loop.queue) == len(tenants))
        service.loop.step()

    assert adapters(service) == ("", "")
    ask("lora")
    ask("wide", "plain", "plain")
    assert adapters(service) == ("lora", "plain,wide")
    while service.loop.step():
        pass
    assert adapters(service) == ("lora,wide", ""), "adapters of other layouts keep their slots"
    ask("alike")
    assert adapters(service) == ("alike,wide", "")
    service.loop.abandon()
    assert [said.error for said in asked[:-1]] == [None] * 4
    service.reader.close()
    service.reader.join()


def test_a_promise_is_the_requests_own_or_its_tenants_or_the_backbones(place):
    """Each of the three times for itself."""
    service = place.started(admission=False, promise=Promise(7 * HOUR, 8 * HOUR, 9 * HOUR), least_token_ns=3 * HOUR)
    own_times = {"deadline_us": 4 * HOUR // 1000, "first_token_us": 5 * HOUR // 1000, "token_us": 6 * HOUR // 1000}
    with place.limits("plain", **own_times), place.limits("wide", token_us=6 * HOUR // 1000):
        for tenant, own, expected in (
            ("lora", {}, (7, 8, 9)),
            ("wide", {}, (7, 8, 6)),
            ("plain", {}, (4, 5, 6)),
            ("plain", {"first_token_ms": 2 * HOUR / 1e6}, (4, 2, 6)),
            ("plain", {"timeout": HOUR // 1000, "first_token_ms": 2 * HOUR / 1e6, "token_ms": 3 * HOUR / 1e6}, (1, 2, 3)),
        ):
            said = place.ask("a", tenant, ONCE, service=service, **own).wait()
            assert said.request.promise == Promise(*(hours * HOUR for hours in expected))
    end(service)
    counts = [one.meter.take()[0].get((PROMISED, ()), 0) for one in (service, place.service)]
    assert counts == [5, 0], "of requests with a promise, and of those without any"
