"""A request for generated text, and its answers on their way: each answer is a sequence of tokens that grows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Many
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from itertools import count
from math import ceil

from hplm.adapters.record import Record
from hplm.adapters.slots import Slots
from hplm.errors import HplmError
from hplm.generation.cache import Blocks
from hplm.generation.detokenizer import Decode, Detokenizer
from hplm.generation.grammar import Grammar
from hplm.generation.sampling import Sampling, seed_of
from hplm.plot.forest import Chain

STOP, LENGTH, DEADLINE, CANCELLED = "stop", "length", "deadline", "cancelled"  # why an answer has ended
TOKEN_BYTES = 48  # that a waiting token takes: its id is a number of Python, in several lists
BIAS_BYTES, ID_BYTES = 128, 40  # that an id in `logit_bias` takes, and one in `stop_token_ids`
GRAMMAR_BYTES = 200_000  # that a compiled grammar takes
CONTEXT = 4  # tokens of the prompt with which the answer's first tokens are turned into text


@dataclass(frozen=True)
class PinnedTenant:
    """A tenant's tables and adapter that answer a request, as they were when it arrived."""

    id: str
    uid: int
    version: int
    chain: Chain
    adapter: Record | None = None
    keeps: object = None  # keeps tables open until the last answer has ended

    @cached_property
    def key(self) -> Hashable:
        """Equal keys have the same knowledge: what one of them has computed serves the other. A key keeps no table open.

        Addresses name the tables, because each snapshot has other chains over the same tables.
        """
        return self.uid, self.version, tuple(base for _, base in self.chain.links)


@dataclass(frozen=True, slots=True)
class Token:
    """A chosen token. `id` is -1 if the logits are no numbers."""

    id: int
    logprob: float | None = None  # of the model alone, before any setting; a prompt's first token has none
    likeliest: tuple[tuple[int, float], ...] = ()  # tokens and their logprobs, where they were asked for


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A part of an answer. The parts of an answer come in order, and together they are the whole."""

    choice: int  # the number of the answer, of `n`
    text: str
    tokens: tuple[Token, ...]  # that this part adds; their text may still be held back
    finish: str | None = None  # why the answer has ended, in its last part
    is_last: bool = False  # of the request
    prompt_tokens: int = 0
    generated_tokens: int = 0  # of the request until now
    prompt: tuple[Token, ...] = ()  # the prompt's tokens, in an answer's first part, if they were asked for


_NUMBERS = count()
Respond = Callable[[AnswerPart | HplmError], None]


@dataclass(eq=False, repr=False)
class DecoderRequest:
    """Waits until its prompt is read (`hplm.scheduling.turns`). Then the loop alone changes it.

    `respond` is called for each piece. The last call has a piece that `is_last`, or an error. Times are nanoseconds of the
    monotonic clock; 0 means none.
    """

    tenant: PinnedTenant
    prompt: list[int]  # empty until it was read
    sampling: Sampling
    respond: Respond
    decode: Decode
    _: KW_ONLY
    arrival_ns: int
    seed: int  # that of `sampling`, if it has one
    echo: str = ""  # said before the answer
    given_from: int = 0  # the place of the client's own first token in `prompt`: the start id may stand before it
    allowed_ns: int = 0  # from its arrival; then it ends as it is
    priority: int = 0
    in_flight_entry: bytes = b""  # what is known of it if the engine ends (`hplm.process.in_flight`)
    read: Callable[[DecoderRequest], None] | None = None  # sets `prompt`, `echo` and `grammar`; None: they are set
    unread_bytes: int = 1  # bytes of the prompt that was not read
    grammar: Grammar | None = None  # that its answers follow, at its beginning
    first_token_ns: int = field(default=0, init=False)  # when it came
    cancelled: bool = field(default=False, init=False)
    ended: bool = field(default=False, init=False)
    generated: int = field(default=0, init=False)  # tokens of all answers
    scored: list[Token] = field(default_factory=list[Token], init=False)  # the prompt's second token, and those behind it

    def __post_init__(self) -> None:
        self.number = next(_NUMBERS)
        if self.sampling.seed is not None:
            self.seed = self.sampling.seed
        self.deadline_ns = self.arrival_ns + self.allowed_ns if self.allowed_ns else 0
        self.owner = self.tenant.uid  # whose turn it takes
        self.open = set(range(self.sampling.n))  # the numbers of the answers that have not ended

    @property
    def unscored(self) -> int:
        """The tokens of the prompt whose logprobs are still to be computed."""
        return len(self.prompt) - 1 - len(self.scored) if self.sampling.scores_prompt else 0

    @property
    def told(self) -> tuple[Token, ...]:
        """The tokens that the client gave, if it asked for their logprobs. All are scored."""
        first = self.given_from
        known = [Token(id) for id in self.prompt[first : first + 1]] if self.sampling.scores_prompt else []
        return (*known, *self.scored[first:])

    @property
    def bytes(self) -> int:
        """The memory that it keeps while it waits. What each request keeps beside this is small."""
        sampling = self.sampling
        ids = BIAS_BYTES * len(sampling.logit_bias) + ID_BYTES * len(sampling.stop_token_ids)
        tokens = len(self.prompt) * (1 + (1 + (sampling.logprobs or 0) if sampling.scores_prompt else 0))
        grammars = GRAMMAR_BYTES if self.grammar is not None else 0
        return TOKEN_BYTES * tokens + ids + grammars + sum(map(sys.getsizeof, (self.echo, *sampling.stop)))

    def refuse(self, error: HplmError) -> None:
        """Ends a request that the loop does not have."""
        self.ended = True
        self.respond(error)


class Sequence:
    """One answer: the prompt's tokens, then its own. First it waits (`hplm.scheduling.limits`), then it grows."""

    def __init__(self, request: DecoderRequest, choice: int = 0) -> None:
        self.request = request
        self.choice = choice
        self.ids = request.prompt.copy()
        self.seed = seed_of(request.seed, choice)
        self.detokenizer = Detokenizer(request.decode, request.sampling.stop, request.prompt[-CONTEXT:])
        self.grammar = request.grammar and request.grammar.copy()
        self.finish: str | None = None
        self.begun = False  # whether something was said
        # While it runs:
        self.blocks: Blocks | None = None  # of its keys and values
        self.token_ns = 0  # when its newest token came
        self.computed = 0  # tokens whose keys and values are in the blocks
        self.adapter: tuple[Slots, int] | None = None  # its slot, among those of its layout
        self.unsaid: list[Token] = []  # tokens that no piece has told yet
        # As the line sees it:
        self.tokens = 0  # its weight: of the prompt and the expected answer, for each choice
        self.bytes = request.bytes
        self.arrival_ns = request.arrival_ns
        self.deadline_ns = request.deadline_ns  # by then it must have started
        self.priority = request.priority
        self.slot_key: Hashable = request.tenant.adapter
        self.tenant = request.owner

    @property
    def generated(self) -> int:
        return len(self.ids) - len(self.request.prompt)

    @property
    def uncomputed(self) -> int:
        return len(self.ids) - self.computed

    @property
    def skipped(self) -> int:
        """The most of its first tokens that need not be computed if another sequence has them: no logits of them are needed."""
        return len(self.request.scored) if self.request.unscored else len(self.ids) - 1

    def expected(self, share: float) -> float:
        """Returns how many tokens it may still get, if an answer usually has this part of `max_tokens`."""
        return max(1.0, share * self.request.sampling.max_tokens - self.generated)

    def in_the_end(self, share: float) -> int:
        """Returns how many tokens it is expected to have in the end."""
        return len(self.ids) + ceil(self.expected(share))

    def take(self, token: Token, end_ids: Many[int]) -> str:
        """Adds a chosen token, and returns the text that may be said now. Sets `finish` if the answer has ended.

        Raises if its grammar does not take the token.
        """
        sampling = self.request.sampling
        self.ids.append(token.id)
        is_whole = self.grammar is not None and self.grammar.take(token.id)
        if token.id in sampling.stop_token_ids or (token.id in end_ids and not sampling.ignore_eos):
            self.finish = STOP
            return self.detokenizer.end()
        text = self.detokenizer.add([token.id], self.generated >= sampling.min_tokens)
        if self.detokenizer.stopped:
            self.finish = STOP
        elif is_whole or self.generated >= sampling.max_tokens:
            self.finish = STOP if is_whole else LENGTH
            text += self.detokenizer.end()
            if self.detokenizer.stopped:
                self.finish = STOP
        return text
