"""The process of a decoder: makes its loop from settings, and checks requests before they enter it.

python -m hplm.generation.service CHANNEL BATCHES: generates text for the model process that started it, and ends with it.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from sys import getsizeof

from hplm.arrays import Array
from hplm.engine.backbone import Backbone, own_threads
from hplm.errors import HplmError, InvalidInput
from hplm.generation.cache import Cache
from hplm.generation.grammar import Grammars
from hplm.generation.loop import Loop
from hplm.generation.prompt_form import LOGPROBS, NAMES, PromptForm
from hplm.generation.queue import SequenceQueue
from hplm.generation.reader import PromptReader
from hplm.generation.reply_writer import ReplyWriter
from hplm.generation.request import AnswerPart, DecoderRequest, PinnedTenant, Respond
from hplm.generation.running import RunningSequences
from hplm.generation.sampling import Sampling, sampling_of
from hplm.generation.settings import DecoderSettings, read_settings
from hplm.generation.staging import Decoder, DecoderStager
from hplm.lookup.views import RegistryWatcher, View
from hplm.metrics import names
from hplm.metrics.meter import Meter, Series
from hplm.model.cpu import apart, compute_with
from hplm.model.prompts import Prompts
from hplm.parameters import request_flag, request_number, request_timeout_us, yes_or_no
from hplm.plot.table import Table
from hplm.process.channel import Apart, Begin, Channel, Passed
from hplm.process.driver import Driver
from hplm.process.host import Host, run
from hplm.process.in_flight import InFlight, InFlightEntry
from hplm.process.suspects import refusal
from hplm.request.answers import Reply, strings
from hplm.scheduling.policy import policy
from hplm.tasks.tasks import check_backbone
from hplm.tenants.authorize import LIST, admit, listed
from hplm.tenants.quotas import Quotas
from hplm.tenants.snapshot import Tenant

log = logging.getLogger("hplm.generation.service")  # also where it is the process's main module


class DecoderService:
    """Its `reader` is what `hplm.process.driver` drives."""

    def __init__(self, backbone: Backbone, prompts: Prompts, settings: DecoderSettings, host: Host | None = None) -> None:
        """`host`: of the process; None: nothing leaves it. The thread that makes a service should end (`hplm.model.cpu`)."""
        self.threads = settings.threads or own_threads(backbone.folder)
        compute_with(self.threads)
        config = backbone.config
        check_backbone("generate", config)
        self.meter = Meter()
        self.meter.look = self.look
        self._backbone = backbone
        self._prompts = prompts
        self._grammars = Grammars(prompts, config)
        self._settings = settings
        self._outbox = host and host.outbox
        self._watcher: RegistryWatcher | None = None
        self._quotas = Quotas()
        self._refused: frozenset[int] = frozenset()  # uids of tenants
        self._requests: dict[int, DecoderRequest] = {}  # by their numbers in the model process
        self._counted = defaultdict[Series, int](int)  # until now
        sizes = settings.cache_tokens, config.positions, config.upper_layers, config.key_width
        cache = Cache(*sizes, settings.device, settings.dtype)
        # Each running sequence holds one slot of a layout at most.
        slots = settings.max_sequences
        self._stager = DecoderStager(backbone, cache, slots, settings.resident_rows, settings.kept_bytes)
        running = RunningSequences(cache, settings.max_sequences, settings.step_tokens)
        self.loop = Loop(
            SequenceQueue(policy(settings.policy), settings.limits, running),
            self._stager,
            Decoder(backbone.upper(settings.dtype), settings.device, settings.dtype),
            config.end_ids,
            meter=self.meter,
            together=self._outbox,
            device_failed=host.device_failed if host is not None else lambda: None,
            in_flight=InFlight(1, settings.max_sequences, host.shown if host is not None else -1),
        )
        self.reader = PromptReader(self.loop, settings.limits)
        self.busy_since = self.reader.busy_since
        log.info("generating with %s on %s, with room for %d tokens", config.name, settings.device, cache.tokens)

    def driven(self, channel: Channel | None = None, take_in: Callable[[object], None] = lambda message: None) -> Driver:
        """Starts the threads that drive the loop, and follows the registry."""
        self._watcher = RegistryWatcher(self._backbone)
        driver = Driver(self.reader, (self.threads, 1), channel, take_in)
        self.reader.wake = driver.wake
        return driver

    def take(self, requests: Iterable[Passed]) -> None:
        """Takes requests, and answers them through the outbox. It does not raise."""
        assert self._outbox is not None
        for number, wanted, _, given in requests:
            put = partial(self._outbox.put, number, wanted, 0)
            try:
                self._take(PromptForm.read(given), number, put)
            except Exception as error:
                put(error)

    def _take(self, form: PromptForm, number: int, put: Callable[[Reply | Exception], None]) -> None:
        """Takes what a client has sent, or raises. `put` takes replies, of which one is the end."""
        view, now = self._backbone.view, time.time()
        if request_flag(form.parameters, LIST):
            found = listed(view.snapshot, form.parameters, now, self._backbone.is_stale)
            put(Reply([(number, 1)], {"text_output": strings([found])}, end=NAMES))
            return
        tenant = admit(view.snapshot, form.parameters, now, self._backbone.is_stale)
        if tenant.uid in self._refused:
            raise refusal(tenant.id)
        request_number(form.parameters, "hplm_rung", 0, 2**16 - 1)  # raises if it is none; decoders have one rung
        if [form.text, form.messages, form.token_ids].count(None) != 2:
            raise InvalidInput("the request needs 'text_input', 'messages' or 'token_ids': send just one of them")
        sampling = sampling_of(form.parameters, form.sampling)
        if LOGPROBS in form.returned and sampling.logprobs is None:
            sampling = replace(sampling, logprobs=0)
        writer = ReplyWriter(put, self._prompts, number, tenant.uid, sampling.n, form)
        self.submit(view, tenant, form, sampling, writer.say, number)

    def submit(
        self, view: View, tenant: Tenant, form: PromptForm, sampling: Sampling, respond: Respond, number: int = -1
    ) -> DecoderRequest:
        """Takes a request of an admitted tenant, or raises. What was taken gets pieces through `respond`, and one end.

        `number`: the request's, in the model process.
        """
        timeout_us = request_timeout_us(form.parameters, form.timeout_us)
        truncate = request_flag(form.parameters, "truncate")
        priority = request_number(form.parameters, "hplm_priority", -(2**31), 2**31 - 1)
        check_backbone(tenant.task, self._backbone.config)
        sampling.check_ids(self._backbone.config.vocabulary, self._backbone.config.end_ids)
        structured = sampling.structured_outputs
        text, most_characters = form.text or form.token_ids or "", self._prompts.most_characters
        if len(text) > most_characters and not truncate:
            raise InvalidInput(
                f"the prompt has {len(text):,} characters, but {most_characters:,} are read at most: shorten it, or send the "
                "parameter truncate=true"
            )
        self._quotas.take(tenant, 1, 0)

        def answered(piece: AnswerPart | HplmError) -> None:
            if isinstance(piece, HplmError) or piece.is_last:
                self._requests.pop(number, None)
                self._quotas.charge(tenant, 0, request.generated)
                self._quotas.give_back(tenant)
            respond(piece)

        def read(request: DecoderRequest) -> None:
            self._quotas.check(tenant)  # others were charged while it waited
            tokens, request.given_from, text = self._tokens(form, sampling, truncate)
            if structured is not None:
                request.grammar = self._grammars.compiled(structured)
            self._quotas.charge(tenant, 0, len(tokens))
            request.prompt = tokens.tolist()
            request.echo = text if sampling.echo or not form.excludes_input else ""

        try:
            chain = view.forest.chain(tenant.domain, tenant.domain_version)  # raises if a table is broken
            request = DecoderRequest(
                PinnedTenant(tenant.id, tenant.uid, tenant.version, chain, tenant.adapter, keeps=view),
                [],
                sampling,
                answered,
                self._prompts.decode,
                arrival_ns=form.arrival_ns or time.monotonic_ns(),
                seed=secrets.randbits(63),
                allowed_ns=1000 * (timeout_us or tenant.deadline_us or self._settings.deadline_us),
                priority=priority,
                in_flight_entry=InFlightEntry(number, tenant.uid, tenant.id).packed(),
                read=read,
                unread_bytes=max(1, getsizeof(form.messages or text)) + (getsizeof(form.sampling) if structured else 0),
            )
            self._requests[number] = request
            self.reader.submit(request, at_once=form.messages is None and structured is None)  # these may take long
            self.meter.add(names.PROMISED, request.allowed_ns > 0)
        except BaseException:
            self._requests.pop(number, None)
            self._quotas.give_back(tenant)  # nobody will say its end
            raise
        return request

    def cancel(self, number: int) -> None:
        """Ends a request soon. It still gets its end."""
        if (request := self._requests.get(number)) is not None:
            self.loop.cancel(request)

    def separate(self, apart: Apart) -> None:
        """Sets which tenants run alone, and which are refused."""
        self.loop.alone, self._refused = apart.alone, apart.refused

    def close(self) -> None:
        """Ends what follows the registry. Its requests are answered before."""
        self.reader.join()
        if self._watcher is not None:
            self._watcher.close()

    def look(self) -> None:
        """Sets the meter's gauges, and adds to its counters what has been counted elsewhere."""
        running, computed, queue = self.loop.running, self._stager.computed, self.loop.queue
        room = running.cache.tokens
        cached = room - running.free
        gauges: dict[Series, float] = {
            (names.RUNNING_SEQUENCES, ()): len(running),
            (names.WAITING_SEQUENCES, ()): len(self.reader) + len(queue),
            (names.CACHE_TOKENS, ()): cached,
            (names.CACHE_ROOM, ()): room,
            (names.CACHE_SHARE, ()): cached / room,
        }
        if self._backbone.state is not None:
            gauges[names.REGISTRY_AGE_SECONDS, ()] = self._backbone.age
            gauges[names.REGISTRY_GENERATION, ()] = self._backbone.generation
        self.meter.set_all(gauges)
        counted: dict[Series, int] = {
            (names.PUT_BACK, ()): running.put_back,
            (names.MISSING_WINDOWS, ("computed",)): computed.computed,
            (names.MISSING_WINDOWS, ("kept",)): computed.found,
        }
        for (name, labels), count in counted.items():
            self.meter.add(name, count - self._counted[name, labels], *labels)
        self._counted.update(counted)

    def _tokens(self, form: PromptForm, sampling: Sampling, truncate: bool) -> tuple[Array, int, str]:
        """Returns the tokens of a prompt, where its own begin, and its text. Raises if with the answer they are too many."""
        positions, max_tokens, prompts = self._backbone.config.positions, sampling.max_tokens, self._prompts
        if form.messages is not None:
            ids = prompts.ids_of_messages(form.messages)
            text = prompts.decode(ids)
        elif form.token_ids is not None:
            ids = prompts.ids_in(form.token_ids)
            text = prompts.decode(ids, special=True)
        else:
            text = form.text or ""
            ids = prompts.ids_of(text[-prompts.most_characters :])
        tokens = prompts.started(ids, as_given=form.token_ids is not None)
        added, most = len(tokens) - len(ids), positions - max(1, max_tokens)
        if len(tokens) > most and truncate and most > 0:  # what is generated follows the end
            tokens = prompts.end_of(tokens, most)
            if sampling.scores_prompt:
                text = prompts.decode(tokens[added:].tolist(), special=True)
        if len(tokens) > most:
            raise InvalidInput(
                f"a prompt of {len(tokens)} tokens and 'max_tokens' {max_tokens} are more than the {positions} "
                "that the model takes: shorten the prompt, lower 'max_tokens', or send the parameter truncate=true"
            )
        return tokens, added, text


def open_service(begin: Begin, host: Host) -> DecoderService:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the other cores compute
    settings = read_settings(begin.parameters)
    preloads = yes_or_no(begin.parameters, "plot_preload")

    def prepare(table: Table) -> None:
        """Opens what the first request would otherwise wait for."""
        _, rows = table.index, table.rows
        if preloads:
            rows.preload()

    backbone = Backbone(begin.folder, begin.state, prepare, settings.device)
    prompts = Prompts.load(backbone.folder / Backbone.TOKENIZER, backbone.config)
    service = apart(lambda: DecoderService(backbone, prompts, settings, host))
    backbone.catch_up()
    return service


if __name__ == "__main__":
    run(open_service)
