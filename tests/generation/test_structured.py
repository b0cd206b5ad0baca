"""Answers with a structure: random weights write what schemas allow, beside answers that may be any text."""

import json
import re
from dataclasses import replace

import jsonschema
import pytest
import torch
from llguidance import LLParserLimits

from hplm.errors import InvalidInput
from hplm.generation import grammar
from hplm.generation.grammar import Grammars
from hplm.generation.request import LENGTH, STOP
from hplm.generation.sampler import sample
from hplm.generation.sampling import Sampling, sampling_of
from testing.toy import CHAT
from tests.generation.test_service import GREEDY, Place, end
from tests.generation.world import growing
from tests.support.message import mentioning

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": -5, "maximum": 120},
        "kind": {"enum": ["cat", "dög", None]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
    },
    "$defs": {"tag": {"type": "boolean"}},
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},  # so that 200 tokens are enough, whatever is drawn
}
WORD = {"structured_outputs": {"regex": "[a-f]{3}-[0-9]+"}}
# Integers of this kind have millions of states.
ENDLESS = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (7, 11, 13, 17, 19, 23)]}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = Place(tmp_path_factory.mktemp("structured"))
    yield place
    end(place.service)


def read(**settings) -> Sampling:
    return sampling_of({}, json.dumps(settings))


def schema(wanted, **settings) -> Sampling:
    return read(structured_outputs={"json": wanted}, **settings)


def test_random_weights_write_what_a_schema_allows_whatever_is_drawn(place):
    """The cache is too small for all: some are put back, and computed again."""
    service = place.started(cache_tokens=256)
    service.loop.running.share = 0.05  # so many start
    samplings = [schema(SCHEMA, seed=seed, temperature=seed % 4, max_tokens=200, n=1 + seed % 2) for seed in range(8)]
    said = [place.ask("Who?", ("plain", "lora")[number % 2], sampling, service) for number, sampling in enumerate(samplings)]
    texts = [one.wait().text(choice) for one in said for choice in range(one.request.sampling.n)]
    for one in said:
        assert one.error is None and {one.finish(choice) for choice in range(one.request.sampling.n)} == {STOP}
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 6 and service.loop.running.put_back > 0
    end(service)


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_neighbours_without_a_grammar_get_the_tokens_that_they_get_alone(place, temperature):
    grammars = Grammars(place.prompts, CHAT)
    own = read(temperature=temperature, **WORD)
    assert own.structured_outputs is not None
    logits = torch.randn(4, CHAT.vocabulary, generator=torch.Generator().manual_seed(1)) * 3
    free = [growing(Sampling(temperature=temperature), seed, 0) for seed in range(4)]
    alone = sample(logits.clone(), free, CHAT.end_ids)
    bound = growing(own, 2, 0, grammar=grammars.compiled(own.structured_outputs))
    together = sample(logits.clone(), [*free[:2], bound, free[3]], CHAT.end_ids)
    assert [together[number] for number in (0, 1, 3)] == [alone[number] for number in (0, 1, 3)]
    assert place.prompts.decode([together[2].id]) in "abcdef" and alone[2].id != together[2].id


def test_logprobs_are_those_of_the_model_alone(place):
    """A token that no grammar would have allowed may be the likeliest."""
    told = [place.ask("a", sampling=read(temperature=0, logprobs=1, max_tokens=1, **more)).wait() for more in ({}, WORD)]
    (free,), (bound,) = ([token for piece in one.pieces for token in piece.tokens] for one in told)
    assert bound.likeliest[0][0] == free.id == free.likeliest[0][0] != bound.id
    assert bound.likeliest[0][1] == pytest.approx(free.logprob, abs=1e-3) and bound.logprob < free.logprob


def test_an_answer_ends_where_its_grammar_ends_or_at_max_tokens(place):
    choices = ["yes", "no", 'qu"o\n']
    for seed in range(4):
        said = place.ask("a", sampling=read(seed=seed, temperature=9, structured_outputs={"choice": choices})).wait()
        assert said.text() in choices and said.finish() == STOP
    said = place.ask("a", sampling=read(max_tokens=4, **WORD)).wait()
    assert re.fullmatch("[a-f]{3}-", said.text()) and said.finish() == LENGTH
    said = place.ask("a", sampling=read(max_tokens=200, ignore_eos=True, **WORD)).wait()
    assert re.fullmatch("[a-f]{3}-[0-9]+", said.text()) and said.finish() in (STOP, LENGTH)
    for wanted in ({"json_object": True}, {"json": {}}):
        said = place.ask("a", sampling=read(max_tokens=9, temperature=0, structured_outputs=wanted)).wait()
        assert said.error is None and (said.finish() == STOP or len(said.ids()) == 9)
        assert "json" in wanted or said.text().startswith("{")


@pytest.mark.parametrize(
    ("wanted", "named"),
    [
        ({"json": {"type": "objekt"}}, ["objekt"]),
        ({"json": {"type": "object", "propertyNames": {"pattern": "a"}}}, ["propertyNames"]),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, ["minimum", 5, 3]),
        ({"json": {"$ref": "https://example.com/schema"}}, ["https://example.com/schema"]),
        ({"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, ["nothing may come next"]),
        ({"json": {"type": "number", "minimum": float("nan")}}, []),
        ({"json": {"const": "\ud800"}}, []),
        ({"json": ENDLESS}, ["too long"]),
        ({"regex": "("}, ["unclosed group"]),
        ({"regex": "[a&&b]"}, ["nothing may come next"]),
        ({"choice": ["\ud800"]}, []),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused_before_the_answer_and_harms_no_other(place, wanted, named):
    other = place.ask("a", sampling=GREEDY)
    with pytest.raises(InvalidInput, match=mentioning("'structured_outputs' is", *named)):
        place.refused("a", sampling=read(structured_outputs=wanted))
    assert other.wait().error is None
    assert place.ask("a", sampling=schema({"const": 5})).wait().text() == "5"


def test_a_grammar_that_becomes_too_large_fails_alone(place, monkeypatch):
    monkeypatch.setattr(grammar, "LIMITS", LLParserLimits(max_lexer_states=100, verbose_errors=False))
    sampling = read(structured_outputs={"regex": r"(\w|\p{L}){9,2000}"}, max_tokens=200)
    other = place.ask("a", sampling=replace(GREEDY, max_tokens=100))
    with pytest.raises(InvalidInput, match=mentioning("'structured_outputs' is", "too many states")):
        place.refused("a", sampling=sampling)
    assert len(other.wait().ids()) == 100


def test_a_tokenizer_that_cannot_be_read_is_named(place, monkeypatch):
    monkeypatch.setattr(type(place.prompts), "tokenizer_json", "{}")
    sampling = schema({"const": 5})
    assert sampling.structured_outputs is not None
    with pytest.raises(InvalidInput, match=mentioning("tokenizer")):
        Grammars(place.prompts, CHAT).compiled(sampling.structured_outputs)
