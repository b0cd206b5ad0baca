"""Errors in the form of each interface, and which of them an error of the server becomes."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse

from hplm_client import errors
from hplm_client.errors import HplmClientError
from hplm_openai.completion_request import CompletionRequest

log = logging.getLogger(__name__)
STATUSES: dict[int, tuple[type[HplmClientError], ...]] = {  # the first that fits; all others: 500
    400: (errors.InvalidInput,),
    404: (errors.NoTenant, errors.NoBackbone),
    429: (errors.QuotaExceeded,),
    502: (errors.ConnectionLost,),
    503: (errors.SafeToRetry, errors.DeadlineMissed, errors.OutOfCapacity, errors.Quarantined, errors.Unavailable),
    504: (errors.ClientTimeout,),
}
ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}  # below 500 else "invalid_request_error"
TEI_TYPES = {**dict.fromkeys((400, 401, 404, 408, 413, 415), "validation"), **dict.fromkeys((429, 503), "overloaded")}
CODES = {"no_tenant": "model_not_found", "quota": "rate_limit_exceeded"}  # for others: our word
TOO_LONG = re.compile(r"are more than the \d+ that the model takes|characters, but [\d,]+ are read at most")  # of a prompt
DRAINING_S = 1.0  # when to come again where the server does not say: another replica may be there


@dataclass(eq=False)
class Refused(Exception):
    """Raised to answer a request with this status and error. `param`: the field of the request that is wrong."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] | None = None

    def __str__(self) -> str:
        return self.message

    def body(self, path: str) -> dict[str, Any]:
        """Returns the error in the form of the interface that has this path: OpenAI's and vLLM's, if it is no other's."""
        kind = ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        match re.sub("^/models/[^/]+(?=/)", "", path):
            case "/v1/classifications":  # Mistral's
                return {"object": "error", **error}
            case "/v1/rerank" | "/v2/rerank":  # Cohere's and Jina's
                return {"message": self.message, "detail": self.message, "code": self.code}
            case "/predict" | "/embed" | "/rerank":  # TEI's
                return {"error": self.message, "error_type": TEI_TYPES.get(self.status, "backend")}
            case other if other.startswith("/models/"):  # Hugging Face's
                return {"error": self.message}
        return {"error": error}

    def response(self, path: str) -> JSONResponse:
        return JSONResponse(self.body(path), self.status, self.headers)


def wrong(message: str, param: str | None = None) -> Refused:
    """Returns the refusal of a request that is wrong itself."""
    return Refused(400, message, "invalid_input", param)


def refusal(error: HplmClientError, request: CompletionRequest) -> Refused:
    """Returns the error that the client gets for an error of the server.

    An error without a word of ours is logged with the request's id, because the client learns only its kind.
    """
    if error.word is None:
        log.error("%s: %s: %s", request.id, type(error).__name__, error)
    if isinstance(error, errors.NoTenant) and request.key is None:
        return Refused(401, "no such model is open without a key: check the model, or send its key", "invalid_api_key", "model")
    status = next((status for status, kinds in STATUSES.items() if isinstance(error, kinds)), 500)
    headers: dict[str, str] = {}
    seconds = error.retry_after_s if isinstance(error, errors.SafeToRetry) else None
    if seconds is None and isinstance(error, errors.Draining):
        seconds = DRAINING_S
    if seconds is not None:
        headers = {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(1000 * seconds))}
    elif isinstance(error, errors.DeadlineMissed | errors.OutOfCapacity | errors.Crashed | errors.Quarantined):
        headers = {"x-should-retry": "false"}  # the same request would be late, take the same memory, or end the engine again
    message, param = _message(error), "model" if status == 404 else None
    code = CODES.get(error.word or "", error.word)
    if isinstance(error, errors.InvalidInput) and TOO_LONG.search(message):
        code, param = "context_length_exceeded", request.prompt_field
    if request.usual_tokens is not None and "'max_tokens'" in message:
        message += f". The request has no 'max_tokens', so {request.usual_tokens} was taken, the gateway's default"
    for setting, field in request.fields.items():
        message = message.replace(f"'{setting}'", f"'{field}'")
    if named := re.match(r"(?:parameter )?'(\w+)' (?:is|names) ", message):
        param = named[1]
    return Refused(status, message, code, param, headers)


def _message(error: HplmClientError) -> str:
    """Returns the server's sentence without its word and the server's address. An error without a word gets one of ours."""
    if isinstance(error, errors.NoTenant):
        return "no such model, or not yours: check the model and the key"
    if error.word is None:
        return _WITHOUT_WORD.get(type(error), "the server failed: the gateway's log says how")
    sentence = str(error).partition(f"[{error.word}] ")[2] or str(error)
    return re.sub(r" \(gRPC from \S+\)$", "", sentence)


_WITHOUT_WORD: dict[type[HplmClientError], str] = {
    errors.InvalidInput: "the server takes no such request: check its fields",
    errors.NoBackbone: "the server has no model that is ready: try again later",
    errors.ClientTimeout: "the server did not answer in time: ask for less, or try again later",
    errors.ConnectionLost: "the server closed the connection before the answer was whole: try again",
    errors.NotConnected: "the server cannot be reached: try again later",
    errors.Unavailable: "the server takes no requests now: try again later",
}
