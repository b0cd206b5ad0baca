"""A served decoder: bad input is refused, limits and deadlines are kept. `tests/server/test_generation.py` has its answers."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from builder.store.store import TenantVersion
from hplm.engine.backbone import Backbone
from hplm.errors import DeadlineMissed, Draining, InvalidInput, Quota
from hplm.generation.prompt_form import PromptForm
from hplm.generation.request import DEADLINE
from hplm.generation.sampling import Sampling
from hplm.generation.service import DecoderService
from hplm.generation.settings import DecoderSettings
from hplm.metrics.names import PROMISED
from hplm.model.prompts import READ_CHARACTERS, Prompts
from hplm.process.driver import Driver
from hplm.tenants.manager import Manager
from testing.toy import CHAT
from tests.generation.small import written
from tests.generation.world import Said
from tests.support.generative import GenerativeReference
from tests.support.message import mentioning
from tests.support.wait import Hold

HOUR_US = 3600 * 10**6
PLAIN = TenantVersion("plain", 1, "root", 1, "generate", [], 0)
LORA = TenantVersion("lora", 1, "law", 1, "generate", [], 4, "lora", ("query", "value", "ffn_in", "ffn_out", "ffn_gate"))
WIDE = TenantVersion("wide", 1, "root", 1, "generate", [], 16, "lora", ("query", "key", "value", "attention_out"))
GREEDY = Sampling(temperature=0, max_tokens=24, ignore_eos=True)
ONCE = replace(GREEDY, max_tokens=1)
ALL_BUT_END = tuple({*range(CHAT.vocabulary)} - {*CHAT.end_ids})
READ = READ_CHARACTERS * CHAT.positions


class Reading(Prompts):
    """Notes what was tokenised last."""

    def ids_of(self, text):
        self.read = text
        return super().ids_of(text)


class Place:
    def __init__(self, folder, **settings):
        tenants = [PLAIN, LORA, WIDE]
        version, state = written(folder, tenants), folder / "state"
        self.manager = Manager(version, state)
        self.manager.registry.begin()
        self.backbone = Backbone(version, state)
        self.prompts = Reading.load(version / Backbone.TOKENIZER, self.backbone.config)
        self.service = self.started(**settings)

    def made(self, **settings):
        return DecoderService(
            self.backbone, self.prompts, DecoderSettings(**{"cache_tokens": 512, "max_sequences": 8, **settings})
        )

    def started(self, **settings):
        service = self.made(**settings)
        service.driver = Driver(service.reader)
        service.reader.wake = service.driver.wake
        return service

    def ask(self, prompt, tenant="plain", sampling=GREEDY, service=None, messages=None, before=lambda: None, **more):
        """`before` is called before each piece is taken. `more`: other parameters of the request."""
        view, said = self.backbone.view, Said()
        service = service or self.service
        asked, respond = PromptForm(prompt, messages, None, more), lambda piece: (before(), said(piece))
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
    place = Place(tmp_path_factory.mktemp("service"))
    yield place
    end(place.service)


@pytest.mark.parametrize(
    ("prompt", "given", "named"),
    [
        ("a" * CHAT.positions, {}, ["max_tokens", CHAT.positions]),
        ("a" * (READ + 1), {}, ["truncate", f"{READ:,}"]),
        ("a", {"sampling": replace(GREEDY, min_tokens=1, stop_token_ids=ALL_BUT_END)}, ["min_tokens", "stop_token_ids"]),
    ],
    ids=["long", "too long to be read", "no token is left"],
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


def test_a_deadline_is_the_requests_own_or_its_tenants_or_the_backbones(place):
    service = place.started(deadline_us=3 * HOUR_US)
    with place.limits("plain", deadline_us=2 * HOUR_US):
        for tenant, own, hours in (
            ("lora", {}, 3), ("plain", {}, 2), ("plain", {"timeout": HOUR_US}, 1),
            ("plain", {"timeout": 2**63 - 1}, 10**9 / 3.6e6),
        ):  # fmt: skip
            said = place.ask("a", tenant, ONCE, service=service, **own).wait()
            assert said.request.allowed_ns == pytest.approx(1000 * hours * HOUR_US)
    with pytest.raises(InvalidInput, match="'timeout'"):
        place.ask("a", timeout=2**63)
    end(service)
    counts = [one.meter.take()[0].get((PROMISED, ()), 0) for one in (service, place.service)]
    assert counts == [4, 0], "of requests with a deadline, and of those without"


def test_an_answer_with_a_deadline_has_what_was_generated_by_then(place):
    """However long it would take: what cannot be whole is not refused."""
    with Hold() as hold:
        said = place.ask("a", sampling=replace(GREEDY, max_tokens=200), before=hold.pass_through, timeout=HOUR_US)
        hold.until_reached()
        said.request.deadline_ns = 1  # as if the time had passed
    said.wait()
    assert said.error is None and said.finish() == DEADLINE and 0 < len(said.ids()) < 200
    late = place.ask("a", timeout=1).wait()
    assert isinstance(late.error, DeadlineMissed), "without a token there is no answer"
