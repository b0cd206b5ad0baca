"""A gateway over HTTP, before a fake Triton whose decoders do what a tenant's name says."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
from triton_fakes import FakeTriton, Refusal, Request, tensors

from hplm_client.errors import BY_WORD
from hplm_openai.__main__ import server_of
from hplm_openai.app import Gateway, RequestLimits
from hplm_openai.backbones import Backbones
from tests.support.wait import PATIENCE, eventually

BUSY = "[quota] the tenant has 1 request in flight: retry after 1.5 s"


class Tenants(FakeTriton):
    """Tenants that each behave in one way.

    `open` and `keyed` say the prompt again, a character at a time. `slow` says one and then nothing. After one
    character the connection of `cut` breaks, and the server of `stopped` refuses to go on. `odd` says what is no text.
    `strict` refuses with the prompt as the sentence. A tenant named like a word of an error gets that error.
    """

    models = frozenset({"chat", "minilm", "minilm-lookup", "minilm-upper"})
    encoded = ("mood",)  # tenants of the encoder, by ENCODED

    def __init__(self) -> None:
        self.held = threading.Event()
        super().__init__()

    def take(self, request: Request) -> dict[str, np.ndarray]:
        """Lists the tenants of the encoder, or answers as one of them.

        A text `[word] ...` is refused so, and `wait` waits until `held` is set.
        """
        tenant, known = request.parameters.get("tenant"), {name: ENCODED[name] for name in self.encoded}
        if "hplm_tenants" in request.parameters:
            return {"LABEL": np.array([[listing(known, tenant).encode()]], np.object_)}
        self._note(request)
        if tenant not in known:
            raise Refusal("[no_tenant] no such tenant", 404)
        texts, pairs = request.inputs["TEXT"], request.inputs.get("TEXT_PAIR", ())
        if texts[0].startswith("["):
            raise Refusal(texts[0])
        if texts[0] == "wait":
            self.held.wait(PATIENCE)
        rows = [ENCODED[tenant][2](*each) for each in zip(texts, *[pairs] * bool(pairs), strict=True)]
        most = request.parameters.get("top_k", 9) or 9
        vectors = [[float(len(text)), 0.0, -1.0] for text in texts]
        outputs = tensors([own[:most] for own in rows], LOGITS=[[LOGITS]] * len(texts), EMBEDDING=vectors)
        outputs["TOKENS"] = np.array([[len(text)] for text in texts], np.int32)
        return {name: outputs[name] for name in request.outputs}

    def decode(self, request: Request) -> Iterator[dict[str, Any]]:
        tenant, is_keyed = request.parameters.get("tenant"), request.headers.get("authorization") == "Bearer secret"
        if "hplm_tenants" in request.parameters:
            yield {"text_output": listing(dict.fromkeys(["open", *["keyed"] * is_keyed], ("generate", [])), tenant)}
            return
        self._note(request)
        if tenant in BY_WORD:
            raise Refusal(BUSY.replace("quota", tenant))
        if tenant == "lost":
            raise Refusal(status=None)
        if tenant == "odd":
            yield {"text_output": b"\xff"}
            return
        if tenant not in ("open", "slow", "cut", "stopped", "strict") and not (tenant == "keyed" and is_keyed):
            raise Refusal("[no_tenant] no such tenant")
        sampling = json.loads(request.inputs.get("sampling_parameters", ["{}"])[0])
        n, logprobs = int(sampling.get("n", 1)), sampling.get("logprobs")  # numbers may be text
        logprobs = None if logprobs is None else int(logprobs)
        given = {name: request.inputs[name][0] for name in ("text_input", "messages") if name in request.inputs}
        text = given["text_input"] if "text_input" in given else json.loads(given["messages"])[-1]["content"]
        if tenant == "strict":
            raise Refusal(f"[invalid_input] {text}")
        if not request.inputs["stream"] and tenant != "slow":
            yield part(text, n, logprobs, "deadline" if text == "late" else "stop")
            return
        for number, character in enumerate(text):
            if number and tenant == "cut":
                raise Refusal(status=None)
            if number and tenant == "stopped":
                raise Refusal(BUSY.replace("quota", "draining"))
            yield part(character, n, logprobs, "length" if number + 1 == len(text) else "")
            if tenant == "slow":
                request.gone.wait(PATIENCE)


LOGITS = [0.0, 1.0, -1.0]  # of each text, for `bad`, `good` and `so`
WORDS = [("Ada", "B-PER-X"), ("King", "I-PER-X"), ("met", "O"), ("Bob", "B-PER-X"), ("\u200b", "")]


def words(text: str) -> list[Any]:
    return [(tag, 0.5 if tag else 0.0, (text.index(word), text.index(word) + len(word))) for word, tag in WORDS]


ENCODED: dict[str, tuple[str, list[str], Any]] = {  # by name: the task, the labels, and the rows of a text or pair
    "mood": ("classify", ["bad", "good", "so"], lambda text, *_: each_label([0.25, 0.67, 0.08], text)),
    "flags": ("multilabel", ["bad", "good", "so"], lambda text: each_label([0.5, 0.75, 0.25], text)),
    "names": ("tag", ["O", "B-PER-X", "I-PER-X"], words),
    "near": ("regress", ["value"], lambda text, pair: [(str(len(pair) - len(text)), 0.0, (0, len(text)))]),
    "vector": ("embed", [], lambda text: [("", 0.0, (0, len(text)))]),
    "find": ("span", ["start", "end"], lambda text, pair: [(pair[4:7], 0.75, (4, 7))]),
}


def each_label(scores: list[float], text: str) -> list[Any]:
    """Returns rows of the labels, the likeliest first."""
    rows = [(label, score, (0, len(text))) for label, score in zip(("bad", "good", "so"), scores, strict=True)]
    return sorted(rows, key=lambda row: -row[1])


def listing(known: Mapping[str, Any], named: str | None) -> str:
    """`known`: by name the task and labels."""
    if named is None:
        return json.dumps([{"tenant": name, "task": task} for name, (task, *_) in known.items()])
    if named not in known:
        raise Refusal("[no_tenant] no such tenant", 404)
    return json.dumps([{"tenant": named, "task": known[named][0], "labels": known[named][1]}])


def part(text: str, n: int, logprobs: int | None, reason: str) -> dict[str, Any]:
    outputs = {
        "text_output": [text] * n,
        "finish_reason": [reason] * n,
        "num_input_tokens": 4,
        "num_output_tokens": [len(text)] * n,
    }
    if logprobs is not None:  # the chosen token, then the likeliest, which may have it again
        others = {str(ord("x") + i): {"logprob": -0.25 - i, "decoded_token": "xyz"[i]} for i in range(logprobs)}
        pieces = [one.strip().replace("水", "\ufffd") for one in text]  # as SentencePiece; a part of a character
        told = [{"7": {"logprob": -2.0, "decoded_token": one}, **others} for one in pieces]
        outputs["logprobs"] = [json.dumps(told)] * n
    return outputs


class Served:
    def __init__(self, port: int, triton: Tenants) -> None:
        self._port, self.triton = port, triton
        self.address = f"127.0.0.1:{port}"

    @property
    def asked(self) -> Request:
        """The last request that a decoder got."""
        return self.triton.requests[-1]

    @property
    def sampling(self) -> dict[str, Any]:
        return json.loads(self.asked.inputs["sampling_parameters"][0])

    def connect(self):
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)

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
        """Returns the status and the answer to a request: JSON, or a stream's events. `path` is below /v1, or whole."""
        status, headers, read = self.send("POST", path if path[0] == "/" else f"/v1/{path}", body, **(_headers or {}))
        if headers["content-type"].startswith("text/event-stream"):
            return status, [line.removeprefix("data: ") for line in read.decode().split("\n\n") if line]
        return status, json.loads(read)

    def complete(self, prompt="abc", **fields):
        return self.post("completions", **{"model": "open", "prompt": prompt, **fields})

    def chat(self, text="abc", **fields):
        messages = [{"role": "user", "content": text}]
        return self.post("chat/completions", **{"model": "open", "messages": messages, **fields})


@contextmanager
def gateway(url: str = "", fake: type[Tenants] = Tenants, **limits) -> Iterator[Served]:
    """`url`: of another Triton than the fake."""
    with ExitStack() as stack:
        triton, listening = stack.enter_context(fake()), socket.create_server(("127.0.0.1", 0))
        server = server_of(Gateway(lambda: Backbones(url or triton.grpc_url, (), PATIENCE), RequestLimits(**limits)).app())
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        port = listening.getsockname()[1]
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.handle_exit, signal.SIGTERM, None)
        eventually(lambda: server.started)
        yield Served(port, triton)
