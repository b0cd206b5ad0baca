"""The form of a decoder's request: what its client has sent, as bytes for the engine's process. This module needs no torch."""

from __future__ import annotations

import marshal
from typing import Any, NamedTuple

from hplm.request.answers import AnswerEnd

FINISH_REASON, PROMPT_TOKENS, GENERATED_TOKENS, LOGPROBS = RETURNED = (
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_logprobs",
)  # inputs that ask for more outputs, with the outputs' names behind `return_`
NAMES = AnswerEnd("", 0, 0, -1)  # of the answer to a request for the names of tenants


class PromptForm(NamedTuple):
    text: str | None
    messages: str | None  # JSON
    sampling: str | None  # JSON
    parameters: dict[str, Any]
    stream: bool = False
    excludes_input: bool = True  # the answer does not begin with the prompt
    returned: tuple[str, ...] = ()  # of RETURNED
    timeout_us: int = 0  # what Triton has read of `timeout` itself; 0: nothing
    arrival_ns: int = 0  # of the monotonic clock; 0: now
    token_ids: str | None = None  # JSON

    def packed(self) -> bytes:
        """Returns its bytes. Only a process of ours may read them: others could end their reader."""
        return marshal.dumps(tuple(self))

    @classmethod
    def read(cls, form: bytes | bytearray) -> PromptForm:
        return cls(*marshal.loads(form))
