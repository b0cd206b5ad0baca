"""Reads requests in OpenAI's form, and turns them into those of a decoder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hplm_client.wire import Value
from hplm_openai.completion_request import CompletionRequest
from hplm_openai.errors import wrong
from hplm_openai.fields import check_model, deadline_in, flag, given_in, priority_in, shown, unknown

# OpenAI does not have those of the second line, but other servers with its interface do.
SAMPLING = (
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop", "n",
    "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "structured_outputs",
)  # fmt: skip
COMMON = {"model", "stream", "stream_options", *SAMPLING, "response_format", "deadline_ms", "truncate", "priority"}
COMPLETION = COMMON | {"prompt", "max_tokens", "logprobs", "echo"}
CHAT = COMMON | {"messages", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs"}
# Fields that are not supported, and values of them that ask for nothing. Those of the second line are vLLM's.
NEUTRAL = {
    "best_of": [1], "suffix": [""], "modalities": [["text"]], "tools": [[]],
    "tool_choice": ["none", "auto"], "functions": [[]],
    "skip_special_tokens": [True], "add_generation_prompt": [True],
}  # fmt: skip
TOOLS = {"tools", "tool_choice", "functions", "function_call"}
MOST_PROMPTS = 128  # of one request
ROLES = {"developer": "system"}  # OpenAI's newer names, and those that templates know


def read_completion(body: Mapping[str, Any], key: str | None) -> list[CompletionRequest]:
    """Returns a request for each prompt."""
    given = _fields(body, COMPLETION)
    prompt = given.get("prompt")
    prompts = prompt if isinstance(prompt, list) and not _are_ids(prompt) else [prompt]
    texts, are_ids = [one for one in prompts if isinstance(one, str)], all(map(_are_ids, prompts))
    if not 0 < len(prompts) <= MOST_PROMPTS or not (are_ids or len(texts) == len(prompts)):
        raise wrong(
            f"the prompt is no text, no token ids, and no list of up to {MOST_PROMPTS} of one kind: send that", "prompt"
        )
    sampling = _sampling(given, "max_tokens")
    if "logprobs" in given:
        sampling["logprobs"] = given["logprobs"]
    if flag(given, "echo"):
        sampling["echo"] = True
    common = {**_common(given, key), "sampling": sampling, "fields": {**_renamed(given), "token_ids": "prompt"}}
    if are_ids:
        return [CompletionRequest(token_ids=json.dumps(ids), **common) for ids in prompts]
    return [CompletionRequest(text=text, **common) for text in texts]


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(one) is int for one in prompt)


def read_chat(body: Mapping[str, Any], key: str | None, usual_tokens: int) -> list[CompletionRequest]:
    """`usual_tokens`: the most tokens of an answer, where the request does not say."""
    given = _fields(body, CHAT)
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise wrong('the messages are no list, or empty: send one such as [{"role": "user", "content": "..."}]', "messages")
    read = [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]
    if "max_tokens" in given and "max_completion_tokens" in given:
        raise wrong("'max_tokens' stands beside 'max_completion_tokens', its newer name: leave it out", "max_tokens")
    most_tokens = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    sampling = _sampling(given, most_tokens)
    fields = {**_renamed(given), "max_tokens": most_tokens, "logprobs": "top_logprobs"}
    usual = None if most_tokens in given else usual_tokens
    if usual is not None:
        sampling["max_tokens"] = usual
    if flag(given, "logprobs"):
        sampling["logprobs"] = given.get("top_logprobs", 0)
    elif given.get("top_logprobs", 0) != 0:
        raise wrong("'top_logprobs' needs 'logprobs': true", "top_logprobs")
    said = json.dumps(read, ensure_ascii=False)
    return [CompletionRequest(messages=said, **_common(given, key), sampling=sampling, fields=fields, usual_tokens=usual)]


def _fields(body: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """Returns the fields that were given."""
    given = given_in(body)
    if given.get("stop") == "":
        del given["stop"]
    for name in [name for name in given if name not in known]:
        if given.pop(name) not in NEUTRAL.get(name, []):
            raise unknown(name, "describe the answer by 'response_format' instead" if name in TOOLS else "leave it out")
    return given


def _common(given: dict[str, Any], key: str | None) -> dict[str, Any]:
    model = given.get("model")
    check_model(model)
    stream = flag(given, "stream")
    options = given.get("stream_options", {})
    known = {"include_usage", "include_obfuscation"}  # the latter only adds noise
    if not isinstance(options, dict) or not options.keys() <= known or (options and not stream):
        raise wrong('\'stream_options\' may be {"include_usage": true}, with "stream": true', "stream_options")
    deadline_ms, priority = deadline_in(given), priority_in(given)
    more: dict[str, Value] = {} if priority is None else {"hplm_priority": priority}
    if flag(given, "truncate"):
        more["truncate"] = True
    return {
        "tenant": model,
        "stream": stream,
        "include_usage": flag(options, "include_usage"),
        "timeout_us": None if deadline_ms is None else max(1, round(1000 * deadline_ms)),
        "more": more,
        "key": key,
    }


def _sampling(given: Mapping[str, Any], most_tokens: str) -> dict[str, Any]:
    """Returns the settings, whose values the server checks. `most_tokens`: the field that says how long an answer may be."""
    sampling = {name: given[name] for name in SAMPLING if name in given}
    if most_tokens in given:
        sampling["max_tokens"] = given[most_tokens]
    if (structured := _structured(given)) is not None:
        sampling["structured_outputs"] = structured
    return sampling


def _structured(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns `response_format` as a setting; None: any text."""
    asked = given.get("response_format", {"type": "text"})
    if asked != {"type": "text"} and "structured_outputs" in given:
        raise wrong("'response_format' stands beside 'structured_outputs': leave out one of the two", "response_format")
    match asked:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json": schema}
    forms = '{"type": "json_object"} or {"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}'
    raise wrong(f"'response_format' is {shown(asked)}: give {forms}", "response_format")


def _renamed(given: Mapping[str, Any]) -> dict[str, str]:
    """Returns by which field a request has named the form of its answer."""
    return {} if "structured_outputs" in given else {"structured_outputs": "response_format"}


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
