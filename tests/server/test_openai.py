"""OpenAI's client, the gateway and a real Triton: prompts of token ids, logprobs of prompts, answers with a structure."""

from typing import Literal

import openai
import pydantic
import pytest

from tests.support.generative import GenerativeReference
from tests.support.wait import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.server("chat")]

TEXT = "Where is the café?"
FEW = {"temperature": 0, "max_tokens": 4, "extra_body": {"ignore_eos": True}}
SCORES = {"echo": True, "logprobs": 1}


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"http://{server.gateway}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        yield client


def read(choices):
    """Joins the parts of a choice."""
    parts = [one.logprobs for one in choices if one.logprobs]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return "".join(one.text for one in choices), {
        name: [one for part in parts for one in getattr(part, name)] for name in names
    }


def test_a_list_of_token_ids_is_a_prompt_and_lists_of_them_are_several(client, prompts):
    ids, others = prompts.ids_of(TEXT), prompts.ids_of("ab")
    alone = client.completions.create(model="plain", prompt=ids, **FEW)
    assert alone.choices[0].text == client.completions.create(model="plain", prompt=TEXT, **FEW).choices[0].text
    several = client.completions.create(model="plain", prompt=[ids, others], echo=True, **FEW)
    assert several.choices[0].text == TEXT + alone.choices[0].text and several.choices[1].text.startswith("ab")
    assert several.usage.prompt_tokens == len(ids) + len(others) + 2, "each begins with a start id, as the tables need it"


@pytest.mark.parametrize("tenant", ["plain", "lora"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_logprobs_of_a_prompt_are_those_of_the_reference(client, backbone, prompts, tenant, stream, count):
    ids = prompts.ids_of(TEXT)
    for prompt in (TEXT, ids):
        asked = {**FEW, **SCORES, "max_tokens": count, "n": 2}
        answer = client.completions.create(model=tenant, prompt=prompt, stream=stream, **asked)
        choices = [one for part in answer for one in part.choices] if stream else answer.choices
        for number in range(2):
            text, told = read([one for one in choices if one.index == number])
            assert len(told["tokens"]) == len(ids) + count and text.startswith(TEXT)
            assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
            logs = GenerativeReference(backbone).logits(prompts.encode(TEXT).tolist(), tenant).log_softmax(1)[1:]
            for place, id in enumerate(ids[1:]):
                own, top = told["token_logprobs"][place + 1], told["top_logprobs"][place + 1]
                assert own == pytest.approx(logs[place, id].item(), abs=2e-3)
                assert max(top.values()) == pytest.approx(logs[place].max().item(), abs=2e-3)
                assert (own == max(top.values())) == (logs[place].argmax().item() == id)
            whole = [
                (at, token) for at, token in zip(told["text_offset"], told["tokens"], strict=True) if "\ufffd" not in token
            ]
            assert all(text[at:].startswith(token) for at, token in whole[: len(ids) - 2]) and len(whole) > 15
        if not stream:
            assert answer.usage.completion_tokens == 2 * count and answer.choices[0].finish_reason == "length"


class Pet(pydantic.BaseModel, extra="forbid"):
    kind: Literal["cat", "dög"]
    age: int = pydantic.Field(ge=0, le=30)
    is_mine: bool


ASKED = {"model": "lora", "messages": [{"role": "user", "content": "Which pet?"}], "temperature": 2, "max_tokens": 600}


def test_an_answer_has_the_structure_that_was_asked_for_whole_and_in_parts(client):
    for seed in range(4):
        answer = client.chat.completions.parse(response_format=Pet, seed=seed, **ASKED)
        (choice,) = answer.choices
        assert choice.finish_reason == "stop" and isinstance(choice.message.parsed, Pet)
        form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": Pet.model_json_schema()}}
        parts = list(client.chat.completions.create(response_format=form, seed=seed, stream=True, **ASKED))
        assert len(parts) > 10 and parts[-1].choices[0].finish_reason == "stop"
        assert Pet.model_validate_json("".join(part.choices[0].delta.content or "" for part in parts))
    answer = client.chat.completions.create(response_format={"type": "json_object"}, **{**ASKED, "max_tokens": 1})
    assert answer.choices[0].finish_reason == "length" and answer.choices[0].message.content.startswith("{")
    (choice,) = client.completions.create(
        model="plain", prompt="a", extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    ).choices
    assert choice.text in ("yes", "no") and choice.finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_followed_is_refused(client, stream):
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": {"type": "object", "unevaluatedItems": False}}}
    with pytest.raises(openai.BadRequestError, match=r"'response_format' is.*unevaluatedItems") as refused:
        client.chat.completions.create(response_format=form, stream=stream, **ASKED)
    assert refused.value.param == "response_format" and refused.value.code == "invalid_input"


def test_a_prompt_that_is_cut_is_told_as_it_is_read(client, prompts, backbone):
    positions = backbone.config.positions
    asked = {**FEW, **SCORES, "max_tokens": 1, "extra_body": {"truncate": True}}
    (choice,) = client.completions.create(model="plain", prompt="b" * 40 + "a" * positions, **asked).choices
    assert len(choice.logprobs.tokens) == positions - 1 and choice.text.startswith("a" * (positions - 2))


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ([5, 300], "300"),
        ([5, -1], "-1"),
        ([[5], "a"], "prompt"),
        ([5, "a"], "prompt"),
        ([[5], []], "prompt"),
        ([1.5], "prompt"),
    ],
)
def test_a_prompt_of_another_kind_is_refused(client, prompt, named):
    with pytest.raises(openai.BadRequestError, match=named) as refused:
        client.completions.create(model="plain", prompt=prompt)
    assert refused.value.param == "prompt"


def test_ids_that_are_too_many_are_refused(client, backbone):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="plain", prompt=[5] * backbone.config.positions)
    assert refused.value.code == "context_length_exceeded"
