"""Generated tokens are those of the reference, whatever runs beside them, and every request gets its pieces and one end."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from hplm.errors import QueueFull
from hplm.generation import staging
from hplm.generation.cache import BATCH, EARLY
from hplm.generation.sampling import Sampling
from tests.generation.small import END, KINDS, MS, VOCABULARY, Generating, Small, decode, same_as_reference


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return Small(tmp_path_factory.mktemp("small"))


def random_sampling(chance) -> Sampling:
    settings = {"max_tokens": int(chance.integers(1, 40)), "ignore_eos": bool(chance.random() < 0.3)}
    if chance.random() < 0.5:
        settings["temperature"] = 0.0
    else:
        settings |= {"temperature": float(chance.choice([0.7, 1.0])), "seed": int(chance.integers(100))}
        settings |= [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.05}][chance.integers(4)]
    if chance.random() < 0.2:
        settings |= {"presence_penalty": 0.5, "repetition_penalty": 1.2}
    if chance.random() < 0.2:
        settings["n"] = int(chance.integers(2, 4))
    if chance.random() < 0.2:
        settings["min_tokens"] = settings["max_tokens"] // 2
    return Sampling(**settings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(10))
def test_any_mix_of_requests_gives_the_tokens_of_the_reference(small, seed, kind):
    """Any arrivals, chunks, kind and sizes of the cache, tenants, policy and putting back."""
    chance = np.random.default_rng(seed)
    generating = Generating(
        small,
        tokens=int(chance.choice([128, 224, 512])),
        seats=int(chance.choice([3, 8])),
        step_tokens=int(chance.choice([8, 32, 200])),
        cleaning=[EARLY, BATCH][seed % 2],
        order=str(chance.choice(["fcfs", "timely", "sjf", "das"])),
        kind=kind,
        block=int(chance.choice([1, 4, 16, 32])),
    )
    generating.line.learned.share = float(chance.choice([0.01, 0.3, 1.0]))  # little: many start, and are put back
    shared = chance.integers(3, VOCABULARY, 40).tolist()
    for _ in range(16):
        own = chance.integers(3, VOCABULARY, int(chance.integers(0, 30))).tolist()
        prompt = [*shared[: int(chance.integers(0, 40))], *own][:60]
        generating.ask(prompt, random_sampling(chance), int(chance.integers(len(small.sources))), seed=int(chance.integers(9)))
        for _ in range(chance.integers(4)):
            generating.loop.step()
    generating.run()
    compared = 0
    for said in generating.said:
        sampling = said.request.sampling
        for choice in range(sampling.n):
            ids = said.ids(choice)
            compared += same_as_reference(small, said, choice)
            text = [id for id in ids if id != END or sampling.ignore_eos]
            assert said.text(choice) == decode(text)
            ended = END in ids and not sampling.ignore_eos
            assert said.finish(choice) == ("stop" if ended else "length")
            assert ended or len(ids) == sampling.max_tokens
    generated = sum(len(said.ids(choice)) for said in generating.said for choice in range(said.request.sampling.n))
    assert compared > 0.8 * generated


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_cache_puts_back_the_youngest_and_its_tokens_do_not_change(small, kind):
    generating = Generating(small, tokens=128, seats=8, kind=kind)
    generating.line.learned.share = 0.01  # so that all of them start
    prompts = [[5 + i, 6, 7, 8] for i in range(4)]
    for prompt in prompts:
        generating.ask(prompt, Sampling(temperature=0, max_tokens=90, ignore_eos=True))
    generating.run()
    assert generating.loop.running.put_back
    assert sum(same_as_reference(small, said) for said in generating.said) > 200


def test_nobody_is_put_back_for_a_request_that_claims_to_have_arrived_earlier(small):
    generating = Generating(small, tokens=128)
    generating.line.learned.share = 0.01  # so that all of them start
    sampling = Sampling(temperature=0, max_tokens=90, ignore_eos=True)
    honest = generating.ask([5, 6, 7, 8], sampling)
    generating.loop.step()
    claiming = generating.ask([6, 6, 7, 8], sampling, waited_ns=79_000 * MS)
    while not honest.ended:
        generating.loop.step()
    assert generating.loop.running.put_back and not claiming.ended
    generating.run()


def test_two_tenants_in_a_step_do_not_touch(small):
    """A tenant's tokens are the same alone and beside another one, though both have the same prompt."""
    alone = []
    for tenant in (2, 3, 4):
        generating = Generating(small)
        alone.append(generating.ask(range(3, 9), Sampling(temperature=0, max_tokens=20, ignore_eos=True), tenant))
        generating.run()
    together = Generating(small)
    asked = [together.ask(range(3, 9), Sampling(temperature=0, max_tokens=20, ignore_eos=True), tenant) for tenant in (2, 3, 4)]
    together.run()
    assert [said.ids() for said in asked] == [said.ids() for said in alone]
    assert len({tuple(said.ids()) for said in asked}) == 3


def test_attention_of_a_step_with_a_seed_must_not_depend_on_neighbours(small, monkeypatch):
    asked = []
    attention = staging.attention_over
    monkeypatch.setattr(staging, "attention_over", lambda *given: asked.append(given[-1]) or attention(*given))
    generating = Generating(small)
    generating.ask([3, 4], Sampling(max_tokens=4, ignore_eos=True))
    generating.ask([3, 4], Sampling(max_tokens=2, ignore_eos=True, seed=7))
    generating.run()
    assert asked == [True] * 2 + [False] * 2


def test_the_same_seed_gives_the_same_text_in_any_company(small):
    def text(company, seed):
        generating = Generating(small, seats=8)
        for i in range(company):
            generating.ask([3 + i] * i, Sampling(max_tokens=20), tenant=i % 5, seed=i)
            generating.loop.step()
        said = generating.ask(range(3, 12), Sampling(max_tokens=20, seed=seed, ignore_eos=True), tenant=3)
        generating.run()
        return said.text()

    assert text(0, 7) == text(3, 7) == text(6, 7) != text(0, 8)


def test_changing_a_token_changes_no_logit_before_it(small):
    source = small.sources[3]
    ids = [1, *range(3, 23)]
    before = small.all_logits(ids, source)
    ids[10] = 39
    after = small.all_logits(ids, source)
    assert torch.equal(before[:10], after[:10]) and not torch.allclose(before[10:], after[10:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cleaning", [EARLY, BATCH])
def test_a_finished_slot_serves_the_next_request(small, cleaning, kind):
    """TCB 4.2.2: with early cleaning at once, otherwise when all that run with it have finished."""
    generating = Generating(small, tokens=128, seats=8, cleaning=cleaning, kind=kind)
    long = generating.ask(range(3, 30), Sampling(temperature=0, max_tokens=35, ignore_eos=True))
    short = generating.ask(range(4, 31), Sampling(temperature=0, max_tokens=5, ignore_eos=True))
    for _ in range(8):
        generating.loop.step()
    assert short.ended
    late = generating.ask(range(5, 32), Sampling(temperature=0, max_tokens=5, ignore_eos=True))
    while not late.ended:
        generating.loop.step()
    assert long.ended == (cleaning == BATCH)
    generating.run()


def test_stop_strings_and_stop_ids_end_an_answer(small):
    plain = Generating(small)
    whole = plain.ask(range(3, 9), Sampling(temperature=0, max_tokens=20, ignore_eos=True))
    plain.run()
    ids = whole.ids()
    fifth = next(i for i in range(4, 20) if ids[i] not in ids[:i])
    generating = Generating(small)
    by_text = generating.ask(range(3, 9), Sampling(temperature=0, max_tokens=20, stop=(decode(ids[fifth - 1 : fifth + 1]),)))
    by_id = generating.ask(range(3, 9), Sampling(temperature=0, max_tokens=20, stop_token_ids=(ids[fifth],)))
    echoed = generating.ask(range(3, 9), Sampling(temperature=0, max_tokens=3, echo=True), echo="the prompt")
    generating.run()
    assert by_text.finish() == by_id.finish() == "stop"
    assert by_text.text() == decode(ids[: fifth - 1]) and by_id.text() == decode(ids[:fifth])
    assert by_text.ids() == by_id.ids() == ids[: fifth + 1]
    assert echoed.text().startswith("the prompt") and echoed.text().endswith(decode([id for id in echoed.ids() if id != END]))


def test_pieces_count_tokens_and_tell_logprobs(small):
    generating = Generating(small)
    said = generating.ask(range(3, 9), Sampling(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True))
    generating.run()
    assert [len(piece.tokens) for piece in said.pieces] == [1] * 6
    assert [piece.generated_tokens for piece in said.pieces] == [1, 2, 3, 4, 5, 6]
    assert {piece.prompt_tokens for piece in said.pieces} == {7}
    ids = said.request.prompt.copy()
    for piece in said.pieces:
        (token,) = piece.tokens
        plain = small.all_logits(ids, said.request.source)[-1].log_softmax(0)
        assert token.logprob == pytest.approx(float(plain[token.id]), abs=1e-3)
        assert len(token.likeliest) == 2 and token.likeliest[0][1] == pytest.approx(float(plain.max()), abs=1e-3)
        ids.append(token.id)


def test_a_full_line_takes_the_place_of_the_tenant_with_the_largest_part(small):
    generating = Generating(small, seats=1, limit=4)
    many = [generating.ask([3], Sampling(max_tokens=3), tenant=1) for _ in range(4)]
    with pytest.raises(QueueFull):
        generating.ask([3], Sampling(max_tokens=3), tenant=1)
    few = generating.ask([3], Sampling(max_tokens=3), tenant=2)
    generating.run()
    assert few.error is None
    assert [type(said.error) for said in many] == [type(None)] * 3 + [QueueFull]


@pytest.mark.parametrize("kind", KINDS)
def test_the_oldest_are_not_starved_by_those_that_come(small, kind):
    generating = Generating(small, tokens=160, seats=6, kind=kind)
    asked = []
    for i in range(40):
        asked.append(generating.ask([3 + i % 30] * (i % 20), Sampling(temperature=0, max_tokens=60, ignore_eos=True)))
        generating.loop.step()
        generating.loop.step()
    generating.run()
    ends = Counter(said.finish() for said in asked)
    assert ends == {"length": 40}


def test_the_times_of_tokens_are_counted(small):
    generating = Generating(small)
    generating.ask([5, 6, 7], replace(Sampling(temperature=0, max_tokens=5, ignore_eos=True), n=2))
    generating.run()
    counts, _ = generating.meter.take()
    found = {(metric.name, *labels): count for (metric, labels), count in counts.items()}
    assert found["hplm_first_token_seconds_count",] == 1 and found["hplm_token_seconds_count",] == 2 * 4
    assert found["hplm_token_seconds_sum",] == pytest.approx(8e-3), "a step takes a millisecond"
    assert 0 < found["hplm_first_token_seconds_sum",] < 5e-3
