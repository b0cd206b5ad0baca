"""Reads requests in OpenAI's form, and turns them into those of a decoder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hplm_openai.completion_request import CompletionRequest
from hplm_openai.errors import wrong
from hplm_openai.fields import Given, check_no_other, flag, given_in, ours, shown

# OpenAI does not have those of the second line, but other servers with its interface do.
SAMPLING = (
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop", "n",
    "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "structured_outputs",
)  # fmt: skip
MOST_PROMPTS = 128  # of one request
ROLES = {"developer": "system"}  # OpenAI's newer names, and those that templates know


def read_completion(body: Mapping[str, Any], _: int) -> list[CompletionRequest]:
    """Returns a request for each prompt."""
    given = given_in(body)
    prompt = given.pop("prompt", None)
    prompts = prompt if isinstance(prompt, list) and not _are_ids(prompt) else [prompt]
    texts, are_ids = [one for one in prompts if isinstance(one, str)], all(map(_are_ids, prompts))
    if not 0 < len(prompts) <= MOST_PROMPTS or not (are_ids or len(texts) == len(prompts)):
        kinds = f"no text, no token ids, and no list of up to {MOST_PROMPTS} of one kind"
        raise wrong(f"the prompt is {kinds}: send that", "prompt")
    sampling = _taken(given, "max_tokens", "logprobs")
    if flag(given, "echo"):
        sampling["echo"] = True
    common = _common(given, sampling, {"token_ids": "prompt"})
    if are_ids:
        return [CompletionRequest(token_ids=json.dumps(ids), **common) for ids in prompts]
    return [CompletionRequest(text, **common) for text in texts]


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(one) is int for one in prompt)


def read_chat(body: Mapping[str, Any], usual_tokens: int) -> list[CompletionRequest]:
    """`usual_tokens`: the most tokens of an answer, where the request does not say."""
    given = given_in(body)
    messages = given.pop("messages", None)
    if not isinstance(messages, list) or not messages:
        raise wrong('the messages are no list, or empty: send one such as [{"role": "user", "content": "..."}]', "messages")
    read = [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]
    if "max_tokens" in given and "max_completion_tokens" in given:
        raise wrong("'max_tokens' stands beside 'max_completion_tokens', its newer name: leave it out", "max_tokens")
    name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    usual = None if name in given else usual_tokens
    sampling = {"max_tokens": given.pop(name, usual), **_taken(given)}
    likeliest = given.pop("top_logprobs", 0)
    if flag(given, "logprobs"):
        sampling["logprobs"] = likeliest
    elif likeliest != 0:
        raise wrong("'top_logprobs' needs 'logprobs': true", "top_logprobs")
    common = _common(given, sampling, {"max_tokens": name, "logprobs": "top_logprobs"})
    return [CompletionRequest(messages=read, **common, usual_tokens=usual)]


def _taken(given: Given, *more: str) -> dict[str, Any]:
    """Takes the settings, whose values the server checks."""
    return {name: given.pop(name) for name in (*SAMPLING, *more) if name in given}


def _common(given: Given, sampling: dict[str, Any], fields: dict[str, str]) -> dict[str, Any]:
    """Takes what both kinds of requests have. `fields`: how the request names settings."""
    stream, options = flag(given, "stream"), given.pop("stream_options", {})
    known = {"include_usage", "include_obfuscation"}  # the latter only adds noise
    if not isinstance(options, dict) or not options.keys() <= known or (options and not stream):
        raise wrong('\'stream_options\' may be {"include_usage": true}, with "stream": true', "stream_options")
    if "response_format" in given:
        sampling["structured_outputs"] = _structure(given.pop("response_format"), sampling)
        fields["structured_outputs"] = "response_format"
    more, include_usage = ours(given), flag(options, "include_usage")
    check_no_other(given)
    return {"sampling": sampling, "fields": fields, "stream": stream, "include_usage": include_usage, **more}


def _structure(form: Any, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `response_format` as a setting."""
    if "structured_outputs" in sampling:
        raise wrong("'response_format' stands beside 'structured_outputs': leave out one of the two", "response_format")
    match form:
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json": schema}
    forms = '{"type": "json_object"} or {"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}'
    raise wrong(f"'response_format' is {shown(form)}: give {forms}", "response_format")


def _message(message: Any, name: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise wrong(f"{name} is no object: send the fields 'role' and 'content'", name)
    given = {field: value for field, value in message.items() if value is not None}
    for other in given.keys() - {"role", "content", "name"}:  # no template reads a name
        raise wrong(f"{name} has the field {shown(other)}, which is not supported: leave it out", name)
    role, content = given.get("role"), given.get("content")
    if isinstance(content, list):
        content = "".join(_text(part, name) for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise wrong(f"{name} has no 'role' or no 'content' that is text: send both", name)
    return {"role": ROLES.get(role, role), "content": content}


def _text(part: Any, name: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise wrong(f"{name} has a part that is not text: send parts of the type 'text' only", name)
    return part["text"]
