"""Turns the pieces of an answer into outputs for its client: as they come, or all at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hplm.errors import HplmError
from hplm.generation.prompt_form import FINISH_REASON, GENERATED_TOKENS, LOGPROBS, PROMPT_TOKENS, PromptForm
from hplm.generation.request import AnswerPart, Token
from hplm.model.prompts import Prompts
from hplm.request.answers import AnswerEnd, Outputs, Reply, strings


class ReplyWriter:
    """Its first reply says that the answer grows, even if the client gets nothing before the end."""

    def __init__(
        self,
        put: Callable[[Reply | Exception], None],
        prompts: Prompts,
        number: int,
        tenant: int,
        choices: int,
        form: PromptForm,
    ) -> None:
        """`put` takes replies to the request of this number. `tenant`: its number in the queue."""
        self._put, self._prompts, self._tenant = put, prompts, tenant
        self._requests = [(number, 1)]
        self._stream, self._returned = form.stream, form.returned
        self._unsent: list[list[AnswerPart]] = [[] for _ in range(choices)]  # by choice
        self._begun = self._ended = False

    def say(self, piece: AnswerPart | HplmError) -> None:
        """Called in order, by one thread at a time."""
        if self._ended:  # what follows an error was said before the loop knew of it
            return
        if isinstance(piece, HplmError):
            self._fail(piece)
            return
        self._unsent[piece.choice].append(piece)
        if piece.is_last or self._stream or not self._begun:
            try:
                self._send(piece)
            except Exception as error:
                self._fail(error)
                raise

    def _fail(self, error: Exception) -> None:
        self._ended = True
        self._put(error)

    def _send(self, piece: AnswerPart) -> None:
        outputs: Outputs = {}
        end = None
        if piece.is_last or self._stream:
            outputs = self._outputs(piece)
            self._unsent = [[] for _ in self._unsent]
        if piece.is_last:
            end = AnswerEnd(piece.finish or "", piece.prompt_tokens, piece.generated_tokens, self._tenant)
        self._begun, self._ended = True, piece.is_last
        self._put(Reply(self._requests, outputs, end=end))

    def _outputs(self, piece: AnswerPart) -> Outputs:
        returned, parts = self._returned, self._unsent
        tokens = [[token for piece in part for token in piece.tokens] for part in parts]
        outputs = {"text_output": _strings(["".join(piece.text for piece in part) for part in parts])}
        if FINISH_REASON in returned:
            outputs["finish_reason"] = _strings([part[-1].finish or "" if part else "" for part in parts])
        if PROMPT_TOKENS in returned:
            outputs["num_input_tokens"] = np.array([piece.prompt_tokens], dtype=np.uint32)
        if GENERATED_TOKENS in returned:
            outputs["num_output_tokens"] = np.array(list(map(len, tokens)), dtype=np.uint32)
        if LOGPROBS in returned:
            prompts = [[token for piece in part for token in piece.prompt] for part in parts]
            told = [list(map(self._logprobs_of, (*prompt, *own))) for prompt, own in zip(prompts, tokens, strict=True)]
            outputs["logprobs"] = _strings(list(map(json.dumps, told)))
        return outputs

    def _logprobs_of(self, token: Token) -> dict[str, dict[str, Any]]:
        """Returns the logprobs of a token and of the likeliest ones in its place, by id. The token itself comes first."""
        known = {token.id: token.logprob, **dict(token.likeliest)}
        return {
            str(id): {"logprob": logprob, "decoded_token": self._prompts.decode([id], special=True)}
            for id, logprob in known.items()
        }


def _strings(texts: Sequence[str]) -> Any:
    return strings([text.encode() for text in texts])
