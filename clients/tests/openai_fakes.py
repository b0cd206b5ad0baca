"""A gateway over HTTP whose decoders are played here."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hplm_client.errors import BY_WORD, ConnectionLost
from hplm_openai.__main__ import server_of
from hplm_openai.app import Gateway, Limits
from tests.support.wait import eventually

PATIENCE = 30
BUSY = "[quota] the tenant has 1 request in flight: retry after 1.5 s (gRPC from 10.0.0.7:8001)"
TENANTS = {None: {"open": "chat"}, "secret": {"open": "chat", "keyed": "other"}}
KNOWN = {"open", "keyed", "slow", "cut", "stopped", "lost", "bug", *BY_WORD}


class FakeDecoders:
    """Tenants that each behave in one way.

    `open` and `keyed` say the prompt again, a character at a time. `slow` says one and then nothing. After one
    character the connection of `cut` breaks, and the server of `stopped` refuses to go on. A tenant named like a word of an
    error raises that error.
    """

    def __init__(self):
        self.asked = []
        self.begun = 0
        self.ended = 0

    async def opened(self, key):
        return TENANTS.get(key, TENANTS[None])

    async def ask(self, asked):
        self.asked.append(asked)
        self.begun += 1
        try:
            async for response in self.answer(asked):
                yield response
        finally:
            self.ended += 1

    async def answer(self, asked):
        if asked.tenant not in KNOWN or (asked.tenant == "keyed" and asked.key != "secret"):
            raise BY_WORD["no_tenant"]("[no_tenant] no such tenant (gRPC from 10.0.0.7:8001)")
        if asked.tenant in BY_WORD:
            raise BY_WORD[asked.tenant](BUSY.replace("quota", asked.tenant))
        if asked.tenant == "lost":
            raise ConnectionLost("Socket closed (gRPC from 10.0.0.7:8001)")
        if asked.tenant == "bug":
            raise KeyError("bug")
        for name, most in (("n", 16), ("logprobs", 20)):
            if type(value := asked.sampling.get(name, 1)) is not int or not 0 <= value <= most:
                raise BY_WORD["invalid_input"](f"[invalid_input] {name!r} is out of range (gRPC from 10.0.0.7:8001)")
        text = asked.text if asked.messages is None else json.loads(asked.messages)[-1]["content"]
        n = asked.sampling.get("n", 1)
        if not asked.stream and asked.tenant != "slow":
            yield response(asked, [text] * n, "deadline" if text == "late" else "stop", len(text))
            return
        for number, character in enumerate(text):
            if number and asked.tenant == "cut":
                raise ConnectionLost("Socket closed (gRPC from 10.0.0.7:8001)")
            if number and asked.tenant == "stopped":
                raise BY_WORD["draining"](BUSY.replace("quota", "draining"))
            yield response(asked, [character] * n, "length" if number + 1 == len(text) else "", 1)
            if asked.tenant == "slow":
                await asyncio.sleep(PATIENCE)

    async def ready(self):
        return True

    async def close(self):
        pass


def response(asked, texts, reason, tokens):
    outputs = {
        "text_output": texts,
        "finish_reason": [reason] * len(texts),
        "num_input_tokens": [4],
        "num_output_tokens": [tokens] * len(texts),
    }
    if asked.logprobs is not None:  # the chosen token, then the likeliest, which may have it again
        others = {str(ord("x") + i): {"logprob": -0.25 - i, "decoded_token": "xyz"[i]} for i in range(asked.logprobs)}
        told = [[{"7": {"logprob": -2.0, "decoded_token": one}, **others} for one in text] for text in texts]
        outputs["logprobs"] = [json.dumps(tokens) for tokens in told]
    return outputs


@dataclass
class Served:
    port: int
    decoders: FakeDecoders

    def connect(self):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)

    def send(self, method, path, body=None, **headers):
        """Returns status, headers and body of the answer. `body`: bytes, or what is sent as JSON."""
        connection = self.connect()
        sent = body if isinstance(body, bytes) or body is None else json.dumps(body)
        connection.request(method, path, sent, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        read = answer.read()
        connection.close()
        return answer.status, answer.headers, read

    def post(self, path, _headers=None, **body):
        """Returns the status and the answer to a request: JSON, or the list of a stream's events."""
        status, headers, read = self.send("POST", f"/v1/{path}", body, **(_headers or {}))
        if headers["content-type"].startswith("text/event-stream"):
            return status, [line.removeprefix("data: ") for line in read.decode().split("\n\n") if line]
        return status, json.loads(read)

    def complete(self, prompt="abc", **fields):
        return self.post("completions", **{"model": "open", "prompt": prompt, **fields})

    def chat(self, text="abc", **fields):
        messages = [{"role": "user", "content": text}]
        return self.post("chat/completions", **{"model": "open", "messages": messages, **fields})


@contextmanager
def gateway(**limits) -> Iterator[Served]:
    decoders, listening = FakeDecoders(), socket.create_server(("127.0.0.1", 0))
    server = server_of(Gateway(lambda: decoders, Limits(**limits)))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    port = listening.getsockname()[1]
    thread.start()
    try:
        eventually(lambda: server.started)
        yield Served(port, decoders)
    finally:
        server.should_exit = True
        thread.join()
