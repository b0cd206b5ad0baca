"""The ways in, up to where a request is taken or refused. Each reads a good request of which one value is another one.

Each returns what says whether it was refused: None, or its refusal. So many can be sent before the first one is waited for.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request as HttpRequest

from builder.store.store import TenantVersion
from hplm.engine.settings import check
from hplm.errors import BY_WORD, HplmError
from hplm.tenants.manager import Manager
from hplm_openai.completion_request import CompletionRequest
from hplm_openai.connections import read_body
from hplm_openai.errors import Refused
from hplm_openai.requests import read_chat, read_completion
from testing.toy import WORDS, Toy, make_chat
from tests.support.fake_triton import Request, model_of
from tests.support.servers import server_environment

Said = Callable[[], "str | None"]
REFUSAL = re.compile(rf"\[({'|'.join(BY_WORD)})\] ")
TAKEN = ("deadline", "queue_full")  # the value was read, and cannot be met
ENCODER = {"tenant": "city"}
PROMPT = {"text_input": "ab", "stream": True}
FEW = {"max_tokens": 2, "temperature": 0}
LOOP = asyncio.new_event_loop()


class Models:
    """The model folders of encoders and of a decoder, loaded into this process."""

    def __init__(self, lookup: Any, decoder: Any, chat: Path) -> None:
        self._lookup, self._decoder, self.chat = lookup, decoder, chat

    def encode(self, parameters: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> Said:
        return _sent(self._lookup, Request(inputs or {"TEXT": [WORDS[0]]}, {**ENCODER, **parameters}))

    def generate(self, parameters: Mapping[str, Any], inputs: Mapping[str, Any] = PROMPT) -> Said:
        return _sent(self._decoder, Request(inputs, {"tenant": "plain", **parameters}))

    def sample(self, settings: Mapping[str, Any]) -> Said:
        return self.generate({}, {**PROMPT, "sampling_parameters": json.dumps(settings)})


def _sent(model: Any, request: Request) -> Said:
    (answer,) = model.execute([request]) or [None]  # of a request that is not deferred
    return lambda: _refusal(request.first() if answer is None else answer)


def _refusal(answer: Any) -> str | None:
    if not isinstance(answer, str):
        return None
    word = REFUSAL.match(answer)
    assert word, f"a refusal without a word: {answer[:200]}"
    return None if word[1] in TAKEN else answer


@contextmanager
def models(toy: Toy, folder: Path) -> Iterator[Models]:
    chat = make_chat(folder, [TenantVersion("plain", 1, "root", 1, "generate", [], 0)])
    with ExitStack() as stack:
        stack.enter_context(server_environment(stack.enter_context(pytest.MonkeyPatch.context())))
        lookup = stack.enter_context(model_of(toy.repository, "toy-lookup", "hplm_lookup"))
        yield Models(lookup, stack.enter_context(model_of(chat.repository, "chat", "hplm_generate")), chat.folder)


def said_by(read: Callable[[], Any]) -> Said:
    """Of a reader that raises."""
    try:
        read()
    except HplmError as error:
        refusal = error.wire()
        return lambda: refusal
    return lambda: None


def openai(found: Models, path: str, name: str, value: Any) -> Said:
    """Sends a body of OpenAI's form through the gateway's readers and to the decoder."""
    good: dict[str, Any] = {"model": "plain", "stream": True, **FEW}
    good |= {"prompt": "ab"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    if name == "max_completion_tokens":
        del good["max_tokens"]
    if name == "top_logprobs":
        good["logprobs"] = True
    try:
        asked = _asked(path, json.dumps({**good, name: value}).encode())
    except Refused as refused:
        assert refused.status == 400 and (refused.param in (name, None)), refused.body
        refusal = f"[{refused.code}] {refused}"
        return lambda: refusal
    timeout = {"timeout": asked.timeout_us} if asked.timeout_us else {}
    return found.generate({**asked.parameters(), **timeout}, {**asked.inputs(), "stream": True})


def _asked(path: str, body: bytes) -> CompletionRequest:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    read = LOOP.run_until_complete(read_body(HttpRequest({"type": "http", "headers": []}, receive), 10**6))
    return replace((read_completion if path == "completions" else read_chat)(read, 16)[0], tenant=read["model"])


def limit(manager: Manager, name: str, value: Any) -> Said:
    return said_by(lambda: manager.limit("plain", **{name: value}))


def option(good: Mapping[str, str], name: str, value: Any) -> Said:
    """Puts a text into a `config.pbtxt`."""
    return said_by(lambda: check({**good, name: value}))
