"""A decoder's backbone as a service: makes the loop from settings, and checks requests before they enter it."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from sys import getsizeof
from typing import Protocol

import numpy as np
import torch

from hplm.adapters.layout import Layout
from hplm.adapters.records import Records
from hplm.arrays import Array
from hplm.errors import HplmError, InvalidInput
from hplm.generation.cache import Cache, space_of
from hplm.generation.decoder import Decoder
from hplm.generation.generator import Generator
from hplm.generation.line import Line
from hplm.generation.loop import Loop
from hplm.generation.promise import NO_PROMISE, Promise
from hplm.generation.request import Piece, Request, Respond, Source
from hplm.generation.running import Running
from hplm.generation.sampling import Sampling
from hplm.generation.staging import Stager
from hplm.metrics.meter import Meter
from hplm.model.config import BackboneConfig
from hplm.model.openmp import compute_with
from hplm.model.prompts import Messages, Prompts, cut_prompt, started
from hplm.model.stacks import UpperStack
from hplm.options import AUTO
from hplm.plot.forest import Forest
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import DEFAULT, policy
from hplm.tasks import check_backbone
from hplm.tenants.quotas import Quotas
from hplm.tenants.snapshot import Snapshot, Tenant

log = logging.getLogger(__name__)
NO_ADDRESSES = np.empty(0, dtype=np.int64)
DRAIN_SECONDS = 8.0  # less than the exit timeout that `hplm serve` gives Triton


@dataclass(frozen=True)
class Settings:
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    max_sequences: int = 32  # the most sequences that run together
    step_tokens: int = 256  # the most tokens of a step
    cache_tokens: int = 16_384
    cache: str = AUTO
    policy: str = DEFAULT
    admission: bool = True
    queue_texts: int = 8192
    queue_bytes: int = 10**9
    promise: Promise = NO_PROMISE  # for requests whose tenant has none
    least_token_ns: int = 0  # that a request may allow between two tokens
    resident_rows: int = 0  # of each table, on the device
    threads: int = 0  # that compute, on a CPU; 0: as many as torch takes


@dataclass(frozen=True)
class Levels:
    """Counts that show how busy a service is."""

    running: int  # sequences
    waiting: int
    cached: int  # tokens whose room in the cache is taken
    room: int  # tokens that the cache has room for
    put_back: int  # sequences since the service began
    loaded: tuple[str, ...]  # the tenants whose adapters are on the device
    awaited: tuple[str, ...]  # the tenants of waiting sequences


class View(Protocol):
    """One generation of what is served (`hplm.engine.views`)."""

    @property
    def snapshot(self) -> Snapshot: ...
    @property
    def forest(self) -> Forest: ...


class Opened(Protocol):
    """An opened backbone (`hplm.engine.backbone`)."""

    config: BackboneConfig

    @property
    def view(self) -> View: ...
    @property
    def layouts(self) -> set[Layout]: ...
    @property
    def records(self) -> Records: ...
    def upper(self) -> UpperStack: ...


class Service:
    def __init__(self, backbone: Opened, prompts: Prompts, settings: Settings, meter: Meter | None = None) -> None:
        """The thread that makes a service should end (`hplm.model.openmp`)."""
        threads = settings.threads or torch.get_num_threads()
        compute_with(threads)
        config = backbone.config
        check_backbone("generate", config)
        self._backbone = backbone
        self._prompts = prompts
        self._settings = settings
        self._quotas = Quotas()
        space = space_of(settings.cache, settings.cache_tokens, config.positions, settings.device)
        cache = Cache(space, config.upper_layers, config.key_width, settings.device, settings.dtype)
        running = Running(cache, settings.max_sequences, settings.step_tokens)
        self._stager = Stager(
            config,
            lambda: backbone.view.forest,
            lambda: backbone.layouts,
            backbone.records,
            cache,
            settings.max_sequences,  # each running sequence holds one slot of a layout at most
            settings.device,
            settings.dtype,
            settings.resident_rows,
        )
        decoder = Decoder(backbone.upper(), settings.device, settings.dtype)
        limits = Limits(settings.queue_texts, settings.queue_bytes)
        self._line = Line(policy(settings.policy), limits, space.size_for, settings.admission)

        def loop(say: Callable[[Request, Piece | HplmError], None]) -> Loop:
            return Loop(self._line, running, self._stager, decoder, config.end_ids, time.monotonic_ns, say, meter)

        self.generator = Generator(self._line, loop, limits, partial(compute_with, threads))
        log.info("generating with %s on %s, with room for %d tokens", config.name, settings.device, space.tokens)

    def submit(
        self,
        view: View,
        tenant: Tenant,
        prompt: str | Messages,
        sampling: Sampling,
        respond: Respond,
        *,
        promise: Promise = NO_PROMISE,
        truncate: bool = False,
        priority: int = 0,
        arrival_ns: int = 0,
    ) -> Request:
        """Takes a request of an admitted tenant, or raises. What was taken gets pieces through `respond`, and one end.

        Another thread reads its prompt. `truncate`: leave out the beginning of one that is too long. `arrival_ns`: of the
        monotonic clock; 0: now.
        """
        check_backbone(tenant.task, self._backbone.config)
        if 0 < promise.token_ns < self._settings.least_token_ns:
            raise InvalidInput(
                f"parameter 'token_ms' is {promise.token_ns / 1e6:g}: allow {self._settings.least_token_ns / 1e6:g} or more, "
                "or send none"
            )
        sampling.check_ids(self._backbone.config.vocabulary)
        most_characters = self._prompts.most_characters
        if isinstance(prompt, str) and len(prompt) > most_characters and not truncate:
            raise InvalidInput(
                f"the prompt has {len(prompt):,} characters, but {most_characters:,} are read at most: shorten it, or send the "
                "parameter truncate=true"
            )
        self._quotas.take(tenant, 1, 0)

        def answered(piece: Piece | HplmError) -> None:
            if isinstance(piece, HplmError) or piece.is_last:
                self._quotas.charge(tenant, 0, request.generated)
                self._quotas.give_back(tenant)
            respond(piece)

        def read() -> None:
            self._quotas.check(tenant)  # others were charged while it waited
            tokens, echo = self._tokens(prompt, sampling, truncate)
            self._quotas.charge(tenant, 0, len(tokens))
            addresses = request.source.chain.lookup(tokens, np.array([len(tokens)])).addresses
            request.read(tokens.tolist(), addresses, echo if sampling.echo else "")

        own = Promise(1000 * tenant.deadline_us, 1000 * tenant.first_token_us, 1000 * tenant.token_us)
        try:
            request = Request(
                self._source(view, tenant),
                (),
                NO_ADDRESSES,
                sampling,
                answered,
                self._prompts.decode,
                arrival_ns=arrival_ns or time.monotonic_ns(),
                seed=secrets.randbits(63),
                promise=promise.or_else(own).or_else(self._settings.promise),
                priority=priority,
            )
            self.generator.submit(request, read, getsizeof(prompt if isinstance(prompt, str) else prompt.json))
        except BaseException:
            self._quotas.give_back(tenant)  # nobody will say its end
            raise
        return request

    def cancel(self, request: Request) -> None:
        self.generator.cancel(request)

    @property
    def levels(self) -> Levels:
        loop = self.generator.loop
        running = loop.running
        tokens = running.cache.space.tokens
        return Levels(
            running=len(running),
            waiting=self.generator.waiting,
            cached=tokens - running.free,
            room=tokens,
            put_back=running.put_back,
            loaded=tuple(sorted(self._stager.tenants)),
            awaited=tuple(sorted(self._line.tenants)),
        )

    def check(self) -> None:
        """Raises if no request would be answered."""
        self.generator.check()

    def close(self) -> None:
        self.generator.close(DRAIN_SECONDS)

    def _tokens(self, prompt: str | Messages, sampling: Sampling, truncate: bool) -> tuple[Array, str]:
        """Returns the tokens of a prompt, the start id first, and its text. Raises if with the answer they are too many."""
        config = self._backbone.config
        if isinstance(prompt, str):
            tokens, text = self._prompts.encode(prompt[-self._prompts.most_characters :]), prompt
        else:
            ids = self._prompts.of_messages(prompt.json)
            text = self._prompts.decode(ids)
            assert config.start_id is not None  # it is a decoder
            tokens = started(np.array(ids, dtype=np.int64), config.start_id)
        most = config.positions - sampling.max_tokens
        if len(tokens) > most and truncate and most > 0:
            tokens = cut_prompt(tokens, most)
        if len(tokens) > most:
            raise InvalidInput(
                f"a prompt of {len(tokens)} tokens and 'max_tokens' {sampling.max_tokens} are more than the {config.positions} "
                "that the model takes: shorten the prompt, lower 'max_tokens', or send the parameter truncate=true"
            )
        return tokens, text

    def _source(self, view: View, tenant: Tenant) -> Source:
        chain = view.forest.chain(tenant.domain, tenant.domain_version)  # raises if a table is broken
        return Source(tenant.id, tenant.uid, tenant.version, chain, tenant.adapter, keeps=view)
