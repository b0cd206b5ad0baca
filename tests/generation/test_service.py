"""A served decoder: answers equal the reference of stored files, bad input is refused, and tenants change on the way."""

import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from builder.publish.export import write_version
from builder.publish.live import knowledge_of
from builder.store.store import TenantFile
from hplm.engine.backbone import Backbone
from hplm.errors import DeadlineMissed, Draining, InvalidInput, NoTenant, Quota
from hplm.generation.decoder import Decoder
from hplm.generation.promise import Promise
from hplm.generation.sampling import Sampling
from hplm.generation.service import Service, Settings
from hplm.model.openmp import apart
from hplm.model.prompts import READ_CHARACTERS, Messages, Prompts
from hplm.options import PAGED, SLOTTED
from hplm.tenants.manager import Manager
from testing.generative import GenerativeReference
from testing.random_store import random_store, random_tenant
from testing.toy import CHAT
from tests.support.message import mentioning
from tests.support.wait import eventually

PATIENCE = 60
HOUR = 3600 * 10**9  # nanoseconds
PLAIN = TenantFile("plain", 1, "root", 1, "generate", [], 0)
LORA = TenantFile("lora", 1, "law", 1, "generate", [], 4, "lora", ("query", "value", "ffn_in", "ffn_out", "ffn_gate"))
WIDE = TenantFile("wide", 1, "root", 1, "generate", [], 16, "lora", ("query", "key", "value", "attention_out"))
GREEDY = Sampling(temperature=0, max_tokens=24, ignore_eos=True)


class Answer:
    def __init__(self):
        self.done, self.pieces, self.error = threading.Event(), [], None

    def __call__(self, piece):
        if isinstance(piece, Exception):
            self.error = piece
        else:
            self.pieces.append(piece)
        if self.error is not None or piece.is_last:
            self.done.set()

    def wait(self):
        assert self.done.wait(PATIENCE)
        return self

    @property
    def ids(self):
        return [token.id for piece in self.pieces for token in piece.tokens]

    @property
    def text(self):
        return "".join(piece.text for piece in self.pieces)


class Place:
    def __init__(self, tmp_path, tenants=(PLAIN, LORA, WIDE), **settings):
        self.store = random_store(tmp_path / "store", CHAT, list(tenants), ["law"], corpus_tokens=500, spread=0.3)
        self.folder, self.state = tmp_path / "repository" / "chat" / "1", tmp_path / "state"
        write_version(self.store, self.store.tenants(), self.folder)
        self.backbone = Backbone(self.folder, self.state)
        self.prompts = Prompts.load(self.folder / Backbone.TOKENIZER, self.backbone.config)
        self.service = Service(self.backbone, self.prompts, Settings(**{"cache_tokens": 512, "seats": 8, **settings}))

    def ask(self, prompt, tenant="plain", sampling=GREEDY, **more):
        view, answer = self.backbone.view, Answer()
        answer.request = self.service.submit(view, view.snapshot.find(tenant), prompt, sampling, answer, **more)
        return answer

    @contextmanager
    def gated(self):
        """While the context is open, only those steps are computed for which the semaphore is released."""
        decoder, may_run = self.service.generator.loop._decoder, threading.Semaphore(0)
        run = decoder.run

        def gated(step):
            assert may_run.acquire(timeout=PATIENCE)
            return run(step)

        decoder.run = gated
        try:
            yield may_run
        finally:
            decoder.run = run
            may_run.release()  # a step may wait

    def expected(self, prompt, tenant, count=24):
        return GenerativeReference(self.backbone).generate(self.prompts.encode(prompt).tolist(), tenant, count)


@pytest.fixture(params=[SLOTTED, PAGED])
def place(request, tmp_path):
    place = Place(tmp_path, cache=request.param)
    yield place
    place.service.close()


def test_answers_of_several_tenants_equal_the_reference(place):
    prompts = ["", "a", "several words of a prompt", "é水👍"]
    asked = [(prompt, tenant, place.ask(prompt, tenant)) for prompt in prompts for tenant in ("plain", "lora", "wide")]
    compared = 0
    for prompt, tenant, answer in asked:
        written = place.expected(prompt, tenant)
        ids = answer.wait().ids
        same = written.sure()
        assert ids[:same] == written.tokens[:same]
        assert answer.text == place.prompts.decode(ids)
        compared += same
    assert compared > 150


def test_the_thread_that_generates_has_the_number_of_threads_of_the_settings(tmp_path, monkeypatch):
    before, found = torch.get_num_threads(), []
    run = Decoder.run
    monkeypatch.setattr(Decoder, "run", lambda decoder, step: found.append(torch.get_num_threads()) or run(decoder, step))
    place = Place(tmp_path)
    place.service.close()
    try:
        service = apart(lambda: Service(place.backbone, place.prompts, Settings(cache_tokens=512, seats=8, threads=before + 2)))
        torch.set_num_threads(before + 1)  # what a thread would take over that sets no number of its own
        place.service = service
        place.ask("ab").wait()
        service.close()
    finally:
        torch.set_num_threads(before)
    assert set(found) == {before + 2}


def test_an_answer_is_counted_and_echoed(place):
    answer = place.ask("ab", sampling=replace(GREEDY, echo=True, max_tokens=5)).wait()
    assert answer.text.startswith("ab")
    last = answer.pieces[-1]
    assert (last.prompt_tokens, last.generated_tokens, last.finish) == (3, 5, "length")


def test_a_tenant_that_is_updated_or_deleted_ends_its_answer_as_it_began(place):
    long = replace(GREEDY, max_tokens=60)
    before, kept = (place.ask("words", tenant, long).wait().ids for tenant in ("lora", "wide"))
    manager = Manager(place.folder, place.state)
    random_tenant(place.store, replace(LORA, version=2), 0.3, seed=50)
    with place.gated() as may_run:
        asked, deleted = (place.ask("words", tenant, long) for tenant in ("lora", "wide"))
        may_run.release(5)
        eventually(lambda: asked.request.generated and deleted.request.generated)
        manager.update("lora", knowledge_of(place.store, place.store.tenant("lora")))
        place.backbone.refresh()
        updated = place.ask("words", "lora", long)
        manager.delete("wide")
        place.backbone.refresh()
        with pytest.raises(NoTenant):
            place.ask("words", "wide")
        assert not asked.request.ended and not deleted.request.ended
    assert deleted.wait().ids == kept
    assert asked.wait().ids == before
    assert updated.wait().ids != before


@pytest.mark.parametrize(
    ("prompt", "sampling", "named"),
    [
        ([1, CHAT.vocabulary], GREEDY, [CHAT.vocabulary]),
        ([-1], GREEDY, [-1]),
        ("a", replace(GREEDY, stop_token_ids=(CHAT.vocabulary,)), ["stop_token_ids"]),
        ("a", replace(GREEDY, logit_bias={10**6: 1.0}), ["logit_bias"]),
        ("a", replace(GREEDY, max_tokens=CHAT.positions), ["max_tokens", CHAT.positions]),
        ("a" * CHAT.positions, GREEDY, ["max_tokens", CHAT.positions]),
        ("a" * (READ_CHARACTERS * CHAT.positions + 1), GREEDY, ["truncate", f"{READ_CHARACTERS * CHAT.positions:,}"]),
    ],
)
def test_bad_input_is_refused_before_anything_is_queued(place, prompt, sampling, named):
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        place.ask(prompt, sampling=sampling)
    assert not len(place.service.generator.loop.running)


def test_a_long_prompt_keeps_its_end_if_it_may_be_cut(place):
    sampling = replace(GREEDY, max_tokens=8)
    prompt = "".join(chr(97 + i % 26) for i in range(3 * CHAT.positions))
    answer = place.ask(prompt, sampling=sampling, truncate=True).wait()
    kept = place.prompts.encode(prompt).tolist()
    kept = [kept[0], *kept[len(kept) - (CHAT.positions - 8 - 1) :]]
    assert answer.pieces[-1].prompt_tokens == len(kept) == CHAT.positions - 8
    written = GenerativeReference(place.backbone).generate(kept, "plain", 8)
    assert answer.ids[:1] == written.tokens[:1] or written.margins[0] <= 1e-3


def test_only_the_end_of_a_very_long_prompt_is_read(place, monkeypatch):
    read, encode = [], place.prompts.encode
    monkeypatch.setattr(place.prompts, "encode", lambda text: read.append(text) or encode(text))
    most = READ_CHARACTERS * CHAT.positions
    answer = place.ask("b" * 10 * most + "a" * most, sampling=replace(GREEDY, max_tokens=1), truncate=True).wait()
    assert answer.error is None and read == ["a" * most]


def test_generated_tokens_count_for_the_quota(place):
    manager = Manager(place.folder, place.state)
    manager.limit("plain", tokens_rate=1)
    place.backbone.refresh()
    place.ask("a", sampling=replace(GREEDY, max_tokens=90)).wait()
    with pytest.raises(Quota):
        place.ask("a")
    manager.limit("lora", in_flight=1)
    place.backbone.refresh()
    with place.gated():
        first = place.ask("a", "lora")
        with pytest.raises(Quota):
            place.ask("a", "lora")
    first.wait()
    assert place.ask("a", "lora").wait().error is None


def test_levels_name_the_tenants_whose_adapters_are_loaded_and_awaited(tmp_path):
    place = Place(tmp_path, (PLAIN, LORA, replace(LORA, id="alike"), WIDE), seats=1)
    try:
        assert (place.service.levels.loaded, place.service.levels.awaited) == ((), ())
        with place.gated():
            first = place.ask("a", "lora")
            eventually(lambda: place.service.levels.running)
            others = [place.ask("a", tenant) for tenant in ("wide", "plain", "plain")]
            assert place.service.levels.loaded == ("lora",)
            assert place.service.levels.awaited == ("plain", "wide")
        for answer in (first, *others):
            assert answer.wait().error is None
        assert place.service.levels.loaded == ("lora", "wide"), "adapters of other layouts keep their slots"
        assert place.service.levels.awaited == ()
        assert place.ask("a", "alike").wait().error is None
        assert place.service.levels.loaded == ("alike", "wide")
    finally:
        place.service.close()


def test_a_quota_is_checked_before_the_prompt_is_read(place):
    """A tenant over its limit must not take the time in which a prompt is tokenised, or a template written."""
    manager = Manager(place.folder, place.state)
    manager.limit("plain", in_flight=1)
    place.backbone.refresh()
    for _ in range(2):  # what was refused is not in flight
        with pytest.raises(InvalidInput):
            place.ask(Messages("no JSON"))
    with place.gated():
        first = place.ask("a")
        with pytest.raises(Quota):
            place.ask(Messages("no JSON"))
    first.wait()


def test_a_refused_request_is_not_in_flight(place):
    manager = Manager(place.folder, place.state)
    manager.limit("plain", in_flight=1)
    place.backbone.refresh()
    place.service.generator._line.close()
    for _ in range(2):
        with pytest.raises(Draining):
            place.ask("a")


def test_a_promise_is_the_requests_own_or_its_tenants_or_the_backbones(tmp_path):
    """Each of the three times for itself."""
    place = Place(tmp_path, admission=False, promise=Promise(7 * HOUR, 8 * HOUR, 9 * HOUR))
    manager = Manager(place.folder, place.state)
    manager.limit("plain", first_token_us=5 * HOUR // 1000, token_us=6 * HOUR // 1000)
    place.backbone.refresh()
    once = replace(GREEDY, max_tokens=1)
    for tenant, own, expected in (
        ("lora", Promise(), (7, 8, 9)),
        ("plain", Promise(), (7, 5, 6)),
        ("plain", Promise(first_token_ns=2 * HOUR), (7, 2, 6)),
        ("plain", Promise(HOUR, 2 * HOUR, 3 * HOUR), (1, 2, 3)),
    ):
        promise = place.ask("a", tenant, once, promise=own).wait().request.promise
        assert promise == Promise(*(hours * HOUR for hours in expected))
    manager.limit("plain", token_us=0)
    place.backbone.refresh()
    assert place.ask("a", "plain", once).wait().request.promise.token_ns == 9 * HOUR
    place.service.close()


def test_a_tenants_time_until_the_first_token_is_kept(place):
    manager = Manager(place.folder, place.state)
    manager.limit("plain", first_token_us=1)
    place.backbone.refresh()
    assert isinstance(place.ask("a").wait().error, DeadlineMissed)
    patient = place.ask("a", promise=Promise(first_token_ns=HOUR)).wait()
    assert patient.error is None
    assert place.ask("a", "lora").wait().error is None  # another tenant has no such limit


def test_a_tenants_deadline_is_the_promise_of_its_requests(place):
    manager = Manager(place.folder, place.state)
    manager.limit("plain", deadline_us=1)
    place.backbone.refresh()
    answer = place.ask("a").wait()
    assert answer.error is not None and not answer.pieces
    patient = place.ask("a", promise=Promise(whole_ns=10**12)).wait()
    assert patient.error is None
