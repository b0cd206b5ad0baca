"""`hplm generate`: sends a prompt to a decoder through hplm_client and prints the answer."""

from __future__ import annotations

from typing import Any

from hplm.cli.client import LOCAL, Connection
from hplm.cli.options import Json, Text, Texts
from hplm.errors import InvalidInput


def generate(
    prompt: str | None = None, /, *, tenant: str, chat: Text | None = None, system: Text | None = None, stream: bool = False,
    max_tokens: int | None = None, temperature: float | None = None, top_p: float | None = None, seed: int | None = None,
    stop: Texts = (), sampling: str | None = None, deadline_ms: float | None = None, truncate: bool = False,
    backbone: str | None = None, connection: Connection = LOCAL, json: Json = False,
) -> dict[str, Any]:  # fmt: skip
    """Let a decoder of a running server go on with a text, or answer in a chat.

    :param prompt: the text to go on with; after --, it may begin with a dash
    :param tenant: the tenant that answers
    :param chat: what the user writes in a chat; give it instead of the prompt
    :param system: instructions that the chat begins with (its system message)
    :param stream: print the answer while it grows
    :param max_tokens: most tokens of the answer (default: 16)
    :param temperature: 0 takes the likeliest token (default: 1)
    :param top_p: choose among the likeliest tokens, which sum up to this
    :param seed: the same seed gives the same answer
    :param stop: end the answer before this text; may be given again
    :param sampling: further settings in JSON, such as '{"top_k": 40}' (docs/generation.md has all)
    :param deadline_ms: time after which the answer ends (default: the tenant's own)
    :param truncate: leave out the beginning of a prompt that is too long
    :param backbone: name of the decoder (default: the only one of the server); hplm: whole answers through the front door
    """
    named = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, "stop": [*stop] or None}
    settings = _settings(sampling) | {name: value for name, value in named.items() if value is not None}
    if stream and settings.get("n", 1) != 1:
        raise InvalidInput("--stream prints one answer: leave it out, or 'n' out of --sampling")
    asked = {"prompt": prompt, "messages": _messages(prompt, chat, system), "tenant": tenant, "deadline_ms": deadline_ms}
    asked |= {"truncate": truncate, **settings}
    with connection.client(backbone) as client:
        if stream and not json:
            for piece in client.stream(**asked):
                print(piece.text, end="", flush=True)
            print()
            return {}
        answer = client.generate(**asked)
    print("\n\n".join(answer.texts))
    told = {name: getattr(answer, name) for name in ("texts", "finish_reasons", "prompt_tokens", "generated_tokens")}
    return {"tenant": tenant, **told}


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
