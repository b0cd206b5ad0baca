"""`hplm infer` and `generate`: send a text to an encoder or a prompt to a decoder through hplm_client, and print the answer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from cyclopts import Parameter

from hplm.cli.options import Text
from hplm.cli.show import columns
from hplm.errors import HplmError, InvalidInput

if TYPE_CHECKING:
    from hplm_client import Answer, HplmClient

WIDEST_EXCERPT = 48
DEFAULT_URL = "127.0.0.1:8000"
# The protocol of an address by its scheme, and the scheme that our client knows.
SCHEMES: dict[str, tuple[Literal["http", "grpc"], str]] = {
    "": ("http", ""),
    "grpc": ("grpc", ""),
    "grpcs": ("grpc", "https://"),
}


@Parameter(name="*", group="Connection")
@dataclass(frozen=True)
class ConnectionOptions:
    """The options of commands that send requests to a running server."""

    url: str | None = None
    """HOST:PORT of the server (default: 127.0.0.1:8000), or https://HOST[:PORT] for TLS, which the front door requires; over
    gRPC grpc://HOST:PORT, or grpcs://HOST[:PORT]"""
    ca_file: str | None = None
    """PEM file of the server's certificate, or of the authority that signed it, if the system does not trust it; turns TLS
    on"""

    @contextmanager
    def client(self, backbone: str | None) -> Iterator[HplmClient]:
        """Opens a client. Turns its errors into errors of the command."""
        try:
            from hplm_client import HplmClient, HplmClientError
        except ModuleNotFoundError as error:
            raise HplmError(f"{error}: install our client in the checkout with `.venv/bin/pip install -e clients`") from error
        try:
            scheme, _, rest = (self.url or DEFAULT_URL).rpartition("://")
            protocol, before = SCHEMES.get(scheme, ("http", f"{scheme}://"))  # the client refuses an unknown one
            key = os.environ.get("HPLM_API_KEY") or None  # no option: `ps` would show it. An empty one counts as unset
            with HplmClient(f"{before}{rest}", protocol, backbone, key, ca_file=self.ca_file) as client:
                yield client
        except HplmClientError as error:
            raise HplmError(str(error)) from error


LOCAL = ConnectionOptions()


def infer(
    text: str, /, *, tenant: str, pair: Text | None = None, deadline_ms: float | None = None, top_k: int | None = None,
    truncate: bool = False, rung: int | None = None, embedding: bool = False, prefix: str | None = None,
    backbone: str | None = None, connection: ConnectionOptions = LOCAL,
) -> dict[str, Any]:  # fmt: skip
    """Send a text to a running server.

    :param text: the text to send; after --, it may begin with a dash
    :param tenant: the tenant that answers
    :param pair: second text, for tenants that read two
    :param deadline_ms: time in which the answer must come (default: the tenant's own)
    :param top_k: return so many of the best labels instead of one
    :param truncate: cut a text that is too long, instead of refusing it
    :param rung: answer by this rung of the tenant, 1 is the dearest, and say which level has answered (default: by load)
    :param embedding: print the vector, of a tenant of the task embed
    :param prefix: name of the prefix that such a tenant puts before the text (default: the tenant's own)
    :param backbone: name of the backbone (default: the only one of the server; the front door does not tell it)
    """
    asked = {"tenant": tenant, "pair": pair, "deadline_ms": deadline_ms, "top_k": top_k, "truncate": truncate}
    named = {name: value for name, value in (("hplm_rung", rung), ("hplm_prefix", prefix)) if value is not None}
    with connection.client(backbone) as client:
        answer = client.infer(text, **asked, confidence=not embedding, embedding=embedding, parameters=named)
    print(_table(answer, text if pair is None else None) if not embedding else [*(answer.embedding or ())])
    sure = f", confidence {answer.confidence:.4f}" if answer.confidence is not None else ""
    level = f", level {answer.level}" if answer.level is not None else ""
    late = ", after the deadline" if answer.late else ""
    print(f"tenant {tenant}, version {answer.version}{level}{sure}{late}")
    return {
        "tenant": tenant,
        "label": answer.label,
        "score": answer.score,
        "rows": [{"label": row.label, "score": row.score, "span": list(row.span)} for row in answer.rows],
        "version": answer.version,
        "confidence": answer.confidence,
        "level": answer.level,
        "late": answer.late,
        **({"embedding": answer.embedding} if embedding else {}),
    }


def _table(answer: Answer, text: str | None) -> str:
    """Returns the rows. For a pair there are no excerpts: the task decides which of the two texts spans refer to."""
    rows = list[tuple[str, str, str, str]]()
    for row in answer.rows:
        start, end = row.span
        excerpt = " ".join(text[start:end].split()) if text is not None else ""
        if len(excerpt) > WIDEST_EXCERPT:
            excerpt = excerpt[: WIDEST_EXCERPT - 1] + "…"
        rows.append((row.label or "-", f"{row.score:.4f}", f"{start}-{end}", excerpt))
    return columns(("LABEL", "SCORE", "SPAN", "TEXT" if text is not None else ""), rows) if rows else "no labels"


def generate(
    prompt: str | None = None, /, *, tenant: str, chat: Text | None = None, system: Text | None = None, stream: bool = False,
    max_tokens: int | None = None, temperature: float | None = None, sampling: str | None = None,
    deadline_ms: float | None = None, truncate: bool = False, backbone: str | None = None,
    connection: ConnectionOptions = LOCAL,
) -> dict[str, Any]:  # fmt: skip
    """Let a decoder of a running server go on with a text, or answer in a chat.

    :param prompt: the text to go on with; after --, it may begin with a dash
    :param tenant: the tenant that answers
    :param chat: what the user writes in a chat; give it instead of the prompt
    :param system: instructions that the chat begins with (its system message)
    :param stream: print the answer while it grows
    :param max_tokens: most tokens of the answer (default: 16)
    :param temperature: 0 takes the likeliest token (default: 1)
    :param sampling: further settings in JSON, such as '{"top_p": 0.9, "stop": ["."]}' (docs/generation.md has all)
    :param deadline_ms: time after which the answer ends (default: the tenant's own)
    :param truncate: leave out the beginning of a prompt that is too long
    :param backbone: name of the decoder (default: the first that lists the tenant; the front door does not tell it)
    """
    named = {"max_tokens": max_tokens, "temperature": temperature}
    settings = _settings(sampling) | {name: value for name, value in named.items() if value is not None}
    if stream and settings.get("n", 1) != 1:
        raise InvalidInput("--stream prints one answer: leave it out, or 'n' out of --sampling")
    asked = {"prompt": prompt, "messages": _messages(prompt, chat, system), "tenant": tenant, "deadline_ms": deadline_ms}
    asked |= {"truncate": truncate, **settings}
    with connection.client(backbone) as client:
        if stream:
            pieces = []
            for piece in client.stream(**asked):
                pieces.append(piece.text)
                print(piece.text, end="", flush=True)
            print()
            return {"tenant": tenant, "texts": ["".join(pieces)]}
        answer = client.generate(**asked)
    print("\n\n".join(answer.texts))
    return {"tenant": tenant, **asdict(answer)}


def _messages(prompt: str | None, chat: str | None, system: str | None) -> list[dict[str, str]] | None:
    """Returns the messages of a chat, or None if a prompt was given."""
    if (prompt is None) == (chat is None):
        raise InvalidInput("give either a text to go on with, or --chat and what the user writes")
    if chat is None:
        if system is not None:
            raise InvalidInput("--system begins a chat: give --chat instead of a text to go on with")
        return None
    said = {"system": system, "user": chat}
    return [{"role": role, "content": content} for role, content in said.items() if content is not None]


def _settings(sampling: str | None) -> dict[str, Any]:
    """Returns the settings of --sampling."""
    import json

    if not sampling:
        return {}
    try:
        settings = json.loads(sampling)
    except ValueError as error:
        raise InvalidInput(f"--sampling is not JSON ({error}): give an object such as '{{\"top_k\": 40}}'") from error
    if not isinstance(settings, dict):
        raise InvalidInput("--sampling is no object: give one such as '{\"top_k\": 40}'")
    return settings
