"""Asks models a text, for the console's page on which owners try them."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from hplm.errors import HplmError
from hplm_openai.app import Gateway
from manager import coverage
from manager.models import Served

ASKS = ("classify", "multilabel", "tag", "generate")  # tasks
MOST_SAID, MOST_TOKENS = 5, 200  # of an answer: labels, tokens
READERS = 2  # processes that read tables at a time


class Trying:
    def __init__(self, gateway: Gateway, secret: str) -> None:
        """`secret`: opens the models."""
        self._asking, self._secret = gateway.inner(), secret
        self._readers = asyncio.Semaphore(READERS)

    async def ask(self, request: Request, model: Any, text: str) -> dict[str, Any]:
        """Returns a model's answer, or why there is none, and the milliseconds that it took."""
        id, task = model["id"], model["hplm"]["task"]
        path, body = {
            "tag": (f"/models/{id}", {"inputs": text}),
            "generate": ("/v1/completions", {"model": id, "prompt": text, "max_tokens": MOST_TOKENS}),
        }.get(task, ("/v1/classifications", {"model": id, "input": [text]}))
        begun, sent, status, came = time.monotonic(), [json.dumps(body).encode()], 0, bytearray()

        async def receive() -> Any:
            return {"type": "http.request", "body": sent.pop()} if sent else await request.receive()

        async def send(part: Any) -> None:
            nonlocal status
            status = part.get("status", status)
            came.extend(part.get("body", b""))

        headers = [(b"authorization", f"Bearer {self._secret}".encode())]
        scope = {**request.scope, "method": "POST", "path": path, "query_string": b"", "headers": headers, "path_params": {}}
        await self._asking(scope, receive, send)
        found = json.loads(came) if came else {}
        said = _said(task, id, found) if status == 200 else []
        error = None if status == 200 else (found["error"]["message"] if "error" in found else found.get("message"))
        return {"model": model, "ms": 1000 * (time.monotonic() - begun), "said": said, "error": error}

    async def covered(self, served: Served, text: str) -> dict[str, Any]:
        """Returns how the tables of a model's domain know a text: its parts, and its words by how they are known."""
        store, tenant = served.base.store, served.tenant
        domain = f"{served.base.name}/{tenant.domain}"
        async with self._readers:
            try:
                parts = await run_in_threadpool(coverage.parts_of, store, tenant.domain, tenant.domain_version, text)
            except HplmError as error:
                return {"domain": domain, "error": str(error).replace(str(Path(store)), "the store")}
        words = {kind: [*dict.fromkeys(word for word, known in parts if known == kind)] for kind in coverage.MEANINGS}
        return {"domain": domain, "error": None, "parts": parts, "words": {kind: own for kind, own in words.items() if own}}


def _said(task: str, id: str, answer: Any) -> list[tuple[str, float | None]]:
    """Returns what a model has answered, the likeliest first."""
    if task == "generate":
        return [(answer["choices"][0]["text"], None)]
    if task == "tag":
        return [(f"{one['word']}: {one['entity_group']}", one["score"]) for one in answer]
    scores = answer["results"][0][id]["scores"]
    return sorted(scores.items(), key=lambda one: -one[1])[:MOST_SAID]
