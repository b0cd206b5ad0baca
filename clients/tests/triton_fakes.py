"""A fake Triton over HTTP and gRPC, whose models are functions of a test."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import deserialize_bytes_tensor, np_to_triton_dtype, serialize_byte_tensor

from tests.support.fakes import Asked, FakeEndpoints
from tests.support.wait import PATIENCE

STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CODES = {400: "INVALID_ARGUMENT", 404: "NOT_FOUND", 500: "INTERNAL", 503: "UNAVAILABLE"}
PART = {"text_output": "a", "finish_reason": "stop", "num_input_tokens": 1, "num_output_tokens": 1}


class Refusal(Exception):
    """How the fake refuses a request. Without a status, the connection is lost."""

    def __init__(self, message: str = "Socket closed", status: int | None = 503) -> None:
        super().__init__(message)
        self.status = status

    def end(self, context: grpc.ServicerContext) -> NoReturn:
        context.abort(getattr(grpc.StatusCode, CODES[self.status or 503]), str(self))


@dataclass
class Request:
    model: str
    inputs: dict[str, Any]  # texts, or a flag
    outputs: list[str]
    parameters: dict[str, Any]
    headers: dict[str, str]
    id: str = ""
    gone: threading.Event = field(default_factory=threading.Event)  # of a stream over gRPC: it has ended
    is_over: bool = False  # all of the stream was said
    has_left: bool = False  # its client has closed a stream that was not over

    def end(self) -> None:
        self.has_left = not self.is_over
        self.gone.set()


def tensors(rows: Sequence[Sequence[tuple[str, float, tuple[int, int]]]], **more: Any) -> dict[str, np.ndarray]:
    """Returns outputs of these rows for each text, filled up with '', 0 and -1. `more`: other outputs of all texts."""
    shape = len(rows), max(map(len, rows))
    filled = [[*row, *[("", 0.0, (-1, -1))] * (shape[1] - len(row))] for row in rows]
    labels, scores, spans = ([[one[part] for one in row] for row in filled] for part in range(3))
    outputs = {
        "LABEL": np.array([[label.encode() for label in row] for row in labels], np.object_).reshape(shape),
        "SCORE": np.array(scores, np.float32).reshape(shape),
        "SPAN": np.array(spans, np.int32).reshape(*shape, 2),
        "VERSION": np.full((shape[0], 1), b"v7", np.object_),
    }
    return outputs | {name: np.asarray(value, np.int32 if name == "LEVEL" else np.float32) for name, value in more.items()}


def echo(request: Request) -> dict[str, np.ndarray]:
    """Answers each text with itself, and its pair if it has one."""
    texts = request.inputs["TEXT"]
    pairs = [f"|{pair}" for pair in request.inputs.get("TEXT_PAIR", ())] or [""] * len(texts)
    rows = [[(text + pair, 1.0, (0, len(text)))] for text, pair in zip(texts, pairs, strict=True)]
    return tensors(rows, CONFIDENCE=[[-1]] * len(texts), LEVEL=[[1]] * len(texts))


class FakeTriton(FakeEndpoints):
    """Has an encoder, and a decoder. `script`: refusals of its next requests; `answer`: outputs of the others.

    `parts` are what the decoder says to each prompt; if the last one has no reason to end, it waits until the client leaves.
    `refuses_unread`: a stream, before its prompt is read.
    """

    models = frozenset({"minilm", "minilm-lookup", "minilm-upper", "chat"})
    parts = (PART,)
    refuses_unread: Refusal | None = None

    def __init__(self) -> None:
        self.script: list[Refusal] = []
        self.answer = echo
        self.requests: list[Request] = []
        super().__init__()

    def take(self, request: Request) -> dict[str, np.ndarray]:
        self._note(request)
        outputs = self.answer(request)
        return {name: outputs[name] for name in request.outputs}

    def decode(self, request: Request) -> Iterator[dict[str, Any]]:
        """Yields the parts of an answer to a prompt."""
        self._note(request)
        yield from self.parts

    def inputs_of(self, model: str) -> list[dict[str, str]]:
        return [{"name": "text_input" if model == "chat" else "TEXT"}]

    def _note(self, request: Request) -> None:
        self.requests.append(request)
        if request.model not in self.models:
            raise Refusal(f"Request for unknown model: '{request.model}' is not found", 404)
        if self.script:
            raise self.script.pop(0)

    def ServerReady(self, request, context):
        return service_pb2.ServerReadyResponse(ready=True)

    def ModelReady(self, request, context):
        return service_pb2.ModelReadyResponse(ready=request.name in self.models)

    def ModelStatistics(self, request, context):
        return service_pb2.ModelStatisticsResponse(model_stats=[{"name": name} for name in sorted(self.models)])

    def ModelMetadata(self, request, context):
        try:
            return service_pb2.ModelMetadataResponse(inputs=self.inputs_of(request.name))
        except Refusal as refusal:
            refusal.end(context)

    def ModelInfer(self, request, context):
        try:
            return _response_of(self.take(_request_of(request, context)))
        except Refusal as refusal:
            refusal.end(context)

    def ModelStreamInfer(self, request_iterator, context):
        if self.refuses_unread:
            self.refuses_unread.end(context)
        for request in request_iterator:
            asked = _request_of(request, context)
            context.add_callback(asked.end)
            try:
                for part in self.decode(asked):
                    arrays = {name: np.array(value if isinstance(value, list) else [value]) for name, value in part.items()}
                    kinds = {name: np.object_ if array.dtype.kind in "US" else np.int32 for name, array in arrays.items()}
                    response = _response_of({name: array.astype(kinds[name]) for name, array in arrays.items()})
                    yield service_pb2.ModelStreamInferResponse(infer_response=response)
                    if part.get("finish_reason") == "" and part is self.parts[-1]:  # more would come
                        asked.gone.wait(PATIENCE)
            except Refusal as refusal:  # in a stream it has no status
                if refusal.status is None:
                    refusal.end(context)
                yield service_pb2.ModelStreamInferResponse(error_message=str(refusal))
                return
            asked.is_over = True

    def over_http(self, asked: Asked) -> None:
        _, _, kind, *rest = asked.path.split("/")
        if asked.method == "POST":
            self._answer(asked, *rest[:2])
        elif rest == ["stats"]:
            asked.say(200, {"model_stats": [{"name": name} for name in sorted(self.models)]})
        elif kind == "models" and rest[-1] != "ready":
            asked.say(200, {"inputs": self.inputs_of(rest[0])})
        else:
            asked.say(200 if kind == "health" or rest[0] in self.models else 400, {})

    def _answer(self, asked: Asked, model: str, way: str) -> None:
        size = int(asked.headers.get("inference-header-content-length", len(asked.body)))
        head, binary, inputs = json.loads(asked.body[:size]), asked.body[size:], {}
        for tensor in head.get("inputs", []):
            length = tensor.get("parameters", {}).get("binary_data_size", 0)
            inputs[tensor["name"]] = tensor.get("data") or [text.decode() for text in deserialize_bytes_tensor(binary[:length])]
            binary = binary[length:]
        outputs = [output["name"] for output in head.get("outputs", [])]
        parameters = head.get("parameters", {}) if way == "infer" else head
        request = Request(model, inputs, outputs, parameters, asked.headers, head.get("id", ""))
        try:
            if way == "infer":
                found = self.take(request)
            else:
                parts = list(self.decode(request))
        except Refusal as refusal:
            asked.say(refusal.status or 503, {"error": str(refusal)})
            return
        if way == "generate":
            asked.say(200, parts[-1])
        elif way == "generate_stream":
            asked.write(STREAM + b"".join(event(part) for part in parts))
            if parts[-1]["finish_reason"]:
                asked.write(chunk(b""))
            else:  # more would come: the stream ends when its client leaves
                asked.until_gone()
                request.end()
        elif size < len(asked.body):
            asked.say(200, *_as_binary(_response_of(found)))
        else:
            listed = {name: array.ravel().tolist() for name, array in found.items()}
            texts = {name: [one.decode() if isinstance(one, bytes) else one for one in own] for name, own in listed.items()}
            asked.say(200, {"outputs": [{"name": name, "data": own} for name, own in texts.items()]})


def _as_binary(response: Any) -> tuple[dict[str, Any], bytes]:
    """Returns the head and the tensors of an answer over HTTP."""
    raw = response.raw_output_contents
    sizes = ({"binary_data_size": len(blob)} for blob in raw)
    described = [(one.name, one.datatype, [*one.shape], size) for one, size in zip(response.outputs, sizes, strict=True)]
    names = ("name", "datatype", "shape", "parameters")
    return {"outputs": [dict(zip(names, one, strict=True)) for one in described]}, b"".join(raw)


def _request_of(request: Any, context: grpc.ServicerContext) -> Request:
    inputs: dict[str, Any] = {}
    for one, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        is_flag = one.datatype == "BOOL"
        inputs[one.name] = raw == b"\1" if is_flag else [text.decode() for text in deserialize_bytes_tensor(raw)]
    parameters = {name: getattr(one, one.WhichOneof("parameter_choice")) for name, one in request.parameters.items()}
    headers = {name: str(value) for name, value in context.invocation_metadata()}
    return Request(request.model_name, inputs, [one.name for one in request.outputs], parameters, headers, request.id)


def _response_of(outputs: dict[str, np.ndarray]) -> Any:
    tensors = [{"name": name, "datatype": np_to_triton_dtype(one.dtype), "shape": one.shape} for name, one in outputs.items()]
    raw = [serialize_byte_tensor(one).item() if one.dtype == object else one.tobytes() for one in outputs.values()]
    return service_pb2.ModelInferResponse(outputs=tensors, raw_output_contents=raw)


def chunk(content: bytes) -> bytes:
    return f"{len(content):x}\r\n".encode() + content + b"\r\n"


def event(part: dict[str, Any]) -> bytes:
    return chunk(b"data: " + json.dumps(part).encode() + b"\n\n")
