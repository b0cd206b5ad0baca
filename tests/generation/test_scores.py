"""Logprobs of prompts: those of the reference, however a prompt is cut, shared or put back."""

from dataclasses import replace

import pytest

from tests.generation.small import Small
from tests.generation.world import World, greedy

ASKED = greedy(3, echo=True, logprobs=2)
PROMPT = [(7 * i) % 250 for i in range(60)]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return Small(tmp_path_factory.mktemp("scores"))


def assert_scored(model, said, choice=0):
    """Compares what was told of a prompt with the reference, which reads it whole."""
    request = said.request
    told = [token for piece in said.pieces if piece.choice == choice for token in piece.prompt]
    assert [token.id for token in told] == request.prompt[request.given_from :]
    first, *others = told
    assert first.logprob is None and first.likeliest == ()
    logs = model.all_logits(request.prompt, request.tenant).log_softmax(1)[request.given_from :]
    for token, row in zip(others, logs, strict=False):
        best = row.topk(request.sampling.logprobs).values.tolist()
        assert token.logprob == pytest.approx(row[token.id].item(), abs=2e-3)
        assert [logprob for _, logprob in token.likeliest] == pytest.approx(best, abs=2e-3)
        assert all(logprob == token.logprob for id, logprob in token.likeliest if id == token.id)


@pytest.mark.parametrize("step_tokens", [8, 200], ids=["in pieces", "whole"])
def test_logprobs_of_a_prompt_are_those_of_the_reference_beside_others(small, step_tokens):
    world = World(small, step_tokens=step_tokens)
    plain = [world.ask(PROMPT[:count], greedy(5), tenant) for tenant, count in ((0, 20), (2, 9))]
    scored = [
        world.ask(PROMPT[at : at + count], ASKED, tenant, start=start, given_from=given)
        for at, (tenant, count, start, given) in enumerate(
            ((0, 50, True, 1), (1, 30, False, 0), (2, 1, True, 0), (3, 1, False, 0), (2, 17, True, 1))
        )
    ]
    world.run()
    for said in (*plain, *scored):
        assert world.assert_right(said) > 0
    for said in scored:
        assert_scored(small, said)
    assert not any(piece.prompt for said in plain for piece in said.pieces)


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]], ids=["long", "short"])
def test_without_a_token_to_generate_only_the_prompt_is_told(small, prompt):
    world = World(small)
    said = world.ask(prompt, replace(ASKED, max_tokens=0, n=2))
    plain = world.ask(prompt, greedy(0))
    world.run()
    for one in (said, plain):
        assert (one.ids(), one.text(), one.finish(), one.pieces[-1].generated_tokens) == ([], "", "length", 0)
    for choice in range(2):
        assert_scored(small, said, choice)


def test_what_others_have_computed_is_not_taken_for_a_prompt_to_score_but_its_own_is(small):
    world = World(small)
    world.ask(PROMPT, greedy(2))
    world.run()
    scored = world.ask(PROMPT, replace(ASKED, n=2))
    world.run()
    assert world.cache.alike == 1, "only the second answer begins with what the first has"
    for choice in range(2):
        assert_scored(small, scored, choice)


def test_a_sequence_that_is_put_back_is_scored_once(small):
    world = World(small, tokens=256, step_tokens=16, share=0.01)
    asked = [world.ask(PROMPT, replace(ASKED, max_tokens=60)) for _ in range(4)]
    world.step(6)
    while world.running.put_back == 0:
        world.step()
    world.run()
    for said in asked:
        assert_scored(small, said)
