"""A request to a decoder: its tenant, text or messages, and settings of sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hplm_client.generation import Messages, Prompt
from hplm_client.wire import Value


@dataclass(frozen=True)
class CompletionRequest(Prompt):
    """Has either `text`, `messages` or `token_ids`."""

    text: str | None = None
    messages: Messages | None = None
    tenant: str = ""
    token_ids: str | None = None  # JSON
    include_usage: bool = False  # a stream ends with the counts of tokens
    deadline_ms: float | None = None
    more: Mapping[str, Value] = field(default_factory=dict[str, Value])  # parameters
    fields: Mapping[str, str] = field(default_factory=dict[str, str])  # by setting: of the request, under another name
    usual_tokens: int | None = None  # the gateway's `max_tokens`, for a request without one

    def __post_init__(self) -> None:
        """The gateway has checked it."""

    @property
    def timeout_us(self) -> int | None:
        return None if self.deadline_ms is None else max(1, round(1000 * self.deadline_ms))

    @property
    def logprobs(self) -> int | None:
        """The number of likeliest tokens that are told with each token. The server has taken it, as text too."""
        given = self.sampling.get("logprobs")
        return None if given is None else int(given)

    @property
    def choices(self) -> int:
        """The number of answers to each prompt. The server has taken it, as text too."""
        return int(self.sampling.get("n", 1))

    @property
    def prompt_field(self) -> str | None:
        """The request's field that has the prompt; None of a request to an encoder."""
        return "messages" if self.messages is not None else "prompt" if self.tenant else None

    def inputs(self) -> dict[str, str | bool]:
        ids = {} if self.token_ids is None else {"token_ids": self.token_ids}
        return {**super().inputs(), **ids}

    def parameters(self) -> dict[str, Value]:
        return {**super().parameters(), **self.more}
