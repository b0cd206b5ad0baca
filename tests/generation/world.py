"""A loop that generates on a clock of its own, a cache that poisons its free places, and what is said of each request."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import torch

from hplm.errors import HplmError
from hplm.generation.cache import Cache, places_of, table_of
from hplm.generation.loop import Loop
from hplm.generation.queue import SequenceQueue
from hplm.generation.request import LENGTH, STOP, AnswerPart, DecoderRequest
from hplm.generation.running import RunningSequences
from hplm.generation.sampler import sample
from hplm.generation.sampling import Sampling, seed_of
from hplm.metrics.meter import Meter
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import policy
from tests.generation.fake import NO_MEMORY, STAYS, UNEXPECTED, Fake, Machine
from tests.support.device import DEVICE
from tests.support.wait import PATIENCE

MS = 1_000_000
MARGIN = 1e-3  # between two logits that may be exchanged


def decode(ids):
    """Each token is one character."""
    return "".join(chr(0x4E00 + id) for id in ids)


def places(cache, own, start=0, stop=None):
    """Returns where the tokens of a sequence are, from `start` to `stop`; None: to the end of its blocks."""
    stop = cache.size_of(own) if stop is None else stop
    return places_of(table_of([own]), cache.block, np.array([start]), np.array([stop - start]))


class Poisoned(Cache):
    """Counts the owners of each place. It fills with NaN what nobody owns or has filled. A copy fails if told to."""

    def __init__(self, tokens, longest, layers, width, dtype=torch.float32, block=16):
        """A block is smaller than when serving, so that short sequences have several."""
        device = DEVICE if dtype is torch.float32 else torch.device("cpu")  # where a fake computes
        super().__init__(tokens, longest, layers, width, device, dtype, block)
        self._layers, self._owners = range(layers), np.zeros(self.tokens, dtype=np.int64)
        self.meets = lambda fault: False
        self.alike = 0  # how many sequences began with what another has
        self._poison(np.arange(self.tokens))

    def grow(self, own, tokens):
        grown = super().grow(own, tokens)
        if grown is not None:
            self._changed(grown[len(own) :], 1)
        return grown

    def take(self, tokens, like=(), alike=0):
        own = super().take(tokens, like, alike)
        if own is not None:
            self.alike += alike > 0
            self._changed(self.shared(like, alike), 1)
        return own

    def give_back(self, own):
        super().give_back(own)
        self._changed(own, -1)

    def copy(self, source, into, tokens):
        if tokens and self.meets("copy"):
            raise RuntimeError(UNEXPECTED[0])
        super().copy(source, into, tokens)

    def _changed(self, own, more):
        self._owners[places(self, own)] += more
        assert self._owners.min() >= 0 and self.free == np.count_nonzero(self._owners == 0)
        self._poison(np.flatnonzero(self._owners == 0))

    def _poison(self, at):
        for number in self._layers:
            for part in self.layer(number):
                part[torch.from_numpy(at)] = torch.nan


@dataclass
class Said:
    """Keeps the pieces that were said of a request. Nothing may follow its end."""

    request: DecoderRequest = None  # pyright: ignore[reportAssignmentType]
    pieces: list[AnswerPart] = field(default_factory=list)
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def __call__(self, piece) -> None:
        assert not self.ended, "something was said behind the end"
        if isinstance(piece, Exception):
            self.error = piece
        else:
            self.pieces.append(piece)
        if self.error is not None or piece.is_last:
            self.done.set()

    @property
    def ended(self) -> bool:
        return self.done.is_set()

    def wait(self) -> Said:
        assert self.done.wait(PATIENCE), "it has not ended"
        return self

    def text(self, choice=0) -> str:
        return "".join(piece.text for piece in self.pieces if piece.choice == choice)

    def ids(self, choice=0) -> list[int]:
        return [token.id for piece in self.pieces if piece.choice == choice for token in piece.tokens]

    def finish(self, choice=0) -> str | None:
        (reason,) = [piece.finish for piece in self.pieces if piece.choice == choice and piece.finish]
        return reason


class World:
    """A loop whose steps take a millisecond each, and all requests that it took."""

    def __init__(
        self, model, tokens=1024, max_sequences=8, step_tokens=64, order="fcfs", limit=1000,
        block=16, share=1.0, clock=None,
    ) -> None:  # fmt: skip
        """`share`: the part of `max_tokens` that answers are expected to have. With little, many start and are put back."""
        self.model, self.now, self.step_tokens, self.limit = model, 1, step_tokens, limit
        self.fault, self.hit = None, defaultdict(set)  # the next fault; by request, the errors of faults that hit it
        self.met: list[str] = []  # faults
        self.prompt_tokens = 0  # that a fake computed, those of sequences that were put back too
        config = model.config
        dtype = torch.float64 if isinstance(model, Fake) else torch.float32
        self.cache = Poisoned(tokens, config.positions, config.upper_layers, config.key_width, dtype, block)
        choice = policy(order) if isinstance(order, str) else order
        self.running = RunningSequences(self.cache, max_sequences, step_tokens)
        self.running.share = share
        self.queue = SequenceQueue(choice, Limits(limit, 10**9), self.running)
        self.stager, self.decoder = model.machine(self, self.cache, max_sequences)
        self.meter = Meter()
        self.ended = 0  # how often the process would have ended
        parts = self.queue, self.stager, self.decoder, self.model.config.end_ids
        self.loop = Loop(*parts, clock or self._tick, self.meter, device_failed=self._fail)
        self.said: list[Said] = []

    def _fail(self):
        self.ended += 1

    def _tick(self) -> int:
        self.now += MS // 2
        return self.now

    def request(self, prompt, sampling, respond, tenant=0, arrival_ns=0, seed=0, start=True, **more) -> DecoderRequest:
        """`start`: the start id stands before the prompt."""
        source, prompt = self.model.pinned[tenant], [self.model.config.start_id] * start + list(prompt)
        return DecoderRequest(source, prompt, sampling, respond, decode, arrival_ns=arrival_ns, seed=seed, **more)

    def ask(self, prompt, sampling, tenant=0, waited_ns=0, **more) -> Said:
        """Offers a request, or raises. `waited_ns`: at the front door."""
        said = Said()
        arrival = self.now - waited_ns
        said.request = self.request(prompt, sampling, said, tenant, arrival, **more)
        self.loop.enqueue(said.request)
        self.said.append(said)
        return said

    def step(self, times=1) -> None:
        """Steps. Whoever was cancelled or too late before a step has ended after it."""
        for _ in range(times):
            ending = [said for said in self.said if not said.ended and self._must_end(said.request)]
            oldest = sorted(self.running.sequences, key=self._received)[:1]
            self.loop.step()
            assert all(said.ended for said in ending)
            for one in oldest:
                back = one.blocks is None and one.finish is None and not one.request.ended
                younger = any(self._received(one) < self._received(other) for other in self.running.sequences)
                assert not (back and younger), "it was put back for a younger one"

    @staticmethod
    def _received(sequence) -> tuple[int, int]:
        """Returns what the oldest have least of, whatever arrival a client claims."""
        return sequence.request.number, sequence.choice

    def cancel(self, said) -> None:
        self.loop.cancel(said.request)

    def run(self, most=10_000) -> None:
        """Steps until everything has ended. Then nothing is held."""
        for _ in range(most):
            if not self.loop.step() and not len(self.running) and not len(self.queue):
                break
        else:
            raise AssertionError("it does not end")
        assert all(said.ended for said in self.said)
        assert self.running.free == self.cache.tokens, "a block is lost"
        assert not self.held, "slots are lost"

    @property
    def held(self) -> bool:
        if isinstance(self.stager, Machine):
            return bool(self.stager.held)
        return any(slots.pinned for slots in self.stager.slots().values())

    def _must_end(self, request) -> bool:
        return request.cancelled or 0 < request.deadline_ns <= self.now

    def assert_right(self, said) -> int:
        """Checks an answer's tokens, text and ends. Returns how many tokens were compared."""
        request, sampling, compared = said.request, said.request.sampling, 0
        if said.error is not None:
            assert isinstance(said.error, HplmError)
            assert not any(words in str(said.error) for words in (*UNEXPECTED, NO_MEMORY, STAYS)), "these words are for the log"
            return 0
        assert said.pieces[-1].generated_tokens == sum(len(said.ids(choice)) for choice in range(sampling.n))
        assert {piece.prompt_tokens for piece in said.pieces} == {len(request.prompt)}
        for choice in range(sampling.n):
            ids, finish = said.ids(choice), said.finish(choice)
            count = same_as_reference(self.model, said, choice)
            assert isinstance(self.model, Fake) <= (count == len(ids))
            compared += count
            told = [len(piece.tokens) for piece in said.pieces if piece.choice == choice]
            assert sampling.logprobs is None or told == [1] * len(ids) or (finish in ("cancelled", "deadline") and told[-1] < 2)
            tokens = [token for piece in said.pieces if piece.choice == choice for token in piece.tokens]
            assert {len(token.likeliest) for token in tokens} <= {sampling.logprobs or 0}
            text, reason = written(ids, sampling, self.model.config.end_ids)
            assert finish == reason or (finish in ("cancelled", "deadline") and reason is None), (finish, reason, ids)
            mine = said.text(choice)
            assert mine.startswith(request.echo) and (finish == "cancelled" or mine == request.echo + text)
            assert text.startswith(mine[len(request.echo) :])
        return compared


def written(ids, sampling, end_ids) -> tuple[str, str | None]:
    """Returns the text of an answer with these tokens, and why it ends with the last of them. None: it does not."""
    text, first = "", max(sampling.min_tokens - 1, 0)
    for place, id in enumerate(ids):
        if id in sampling.stop_token_ids or (id in end_ids and not sampling.ignore_eos):
            assert place == len(ids) - 1 >= sampling.min_tokens
            return text, STOP
        text += decode([id])
        found = [at for at in (text.find(stop, first) for stop in sampling.stop) if at >= 0]
        if found and place + 1 >= sampling.min_tokens:
            assert place == len(ids) - 1
            return text[: min(found)], STOP
    return text, LENGTH if len(ids) >= sampling.max_tokens else None


def growing(sampling, seed, place, ids=(), grammar=None):
    """Returns as much of a sequence as the choice of its next token reads. The last `place` ids are those of its answer."""
    request = SimpleNamespace(sampling=sampling)
    return SimpleNamespace(request=request, seed=seed, generated=place, ids=list(ids), grammar=grammar)


def same_as_reference(model, said: Said, choice: int = 0) -> int:
    """Compares an answer with the reference, token by token. Returns how many tokens were compared.

    Where nearly equal logits would give another token, both are right, and what follows is not compared.
    """
    request, ids = said.request, list(said.request.prompt)
    sampling, found = request.sampling, said.ids(choice)
    seed, prompt = seed_of(request.seed, choice), len(request.prompt)
    of_each = model.all_logits([*ids, *found], request.tenant)[prompt - 1 :]

    def chosen(logits, grown):
        return sample(logits[None].clone(), [grown], model.config.end_ids)[0].id

    for place, (token, logits) in enumerate(zip(found, of_each, strict=False)):
        grown = growing(replace(sampling, logprobs=None), seed, place, ids)
        if chosen(logits, grown) != token:
            near = [logits + torch.randn(len(logits), generator=torch.Generator().manual_seed(i)) * MARGIN for i in range(50)]
            exact = isinstance(model, Fake)
            assert not exact and token in {chosen(one, grown) for one in near}, f"token {place} of {found}"
            return place
        ids.append(token)
    return len(found)


def greedy(most, **more) -> Sampling:
    return Sampling(temperature=0, max_tokens=most, ignore_eos=True, **more)
