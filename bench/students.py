"""`hplm bench students`: texts that students answer, beside the full stack: alone, in full batches, and in bursts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import torch

from bench.engine import clock
from bench.rows import NotNegative, Positive, Row, Rows, ServedDtype, Size, Whole, benchmark, expect_text, say
from bench.server import settings_of, stage, texts_of, waiting
from bench.turns import alternate
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.adapters.layout import PROJECTIONS
from hplm.engine.backbone import Backbone
from hplm.engine.engine import computed, resolve_device, resolve_precision
from hplm.engine.request import Text
from hplm.engine.served import open_engine
from hplm.engine.service import ANSWERING_NS
from hplm.errors import HplmError, InvalidInput
from hplm.model.config import BackboneConfig
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import policy
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.selection import Capacity
from hplm.simulate.arrivals import Lengths, Stream
from hplm.simulate.encoders import Machine, one_stage, simulate_one
from hplm.tenants.students import MOST, Team
from testing.random_store import SIZES, random_store, random_students, random_tenants

TENANTS, RANK, LABELS, SPREAD = 4, 16, 4, 0.02
FULL, ONE, ADAPTIVE = "full", "students-1", "adaptive"
POOL = 64  # texts from which batches are taken in turn
SERVED = ServingOptions()
OVERLOAD, CV = 3.0, 3.0  # of a burst: times what the full stack can serve, and how uneven the arrivals are
ALLOWED = (2.0, 12.0)  # deadlines in times of the full stack's batches, drawn evenly
NOISE = 0.05  # of the time of a simulated batch
SEED = 1


@benchmark(size=("toy",), tokens=(8, 16), students=2, batch_tokens=(64, 128), seconds=0.01, batches=20, cost_us=(1000.0, 20.0))
def students(
    *,
    size: tuple[Size, ...] = ("minilm", "bert-base"),
    tokens: tuple[Whole, ...] = (32, 128),
    layers: Whole = 1,
    students: Whole = 3,
    batch_tokens: tuple[Whole, ...] = (1024, 4096),
    seconds: Positive = 1.0,
    batches: Whole = 200,
    cost_us: tuple[NotNegative, Positive] | None = None,
    dtype: ServedDtype = "auto",
) -> Rows:
    """Measures how students serve: random ones, so this says nothing of their answers.

    `one`: a text alone, staged and computed. `batches`: texts a second that the engine computes, in batches of equal work.
    `burst`: three times what the full stack can serve, with Gamma gaps (CV 3) and deadlines of 2 to 12 batch times, on a
    virtual clock: the share in time, and the work of an answer in `passes` through all layers. There batches of the longest
    texts take the measured times. `adaptive`: the governor lowers the number of students.

    :param size: of the model, one or several
    :param tokens: of a text
    :param layers: that each student passes
    :param students: of a tenant, after pruning
    :param batch_tokens: of a batch, in tokens that all layers compute
    :param seconds: for each figure
    :param batches: that the full stack could compute in a burst
    :param cost_us: microseconds of a batch and of a token in bursts, instead of the measured ones
    """
    rooms, device = sorted(batch_tokens), resolve_device("auto")
    if rooms[0] <= max(tokens):
        raise InvalidInput(f"--batch-tokens {rooms[0]}: give more than the {max(tokens)} tokens of a text")
    if students > MOST:
        raise InvalidInput(f"--students {students}: a tenant has {MOST} at most")
    for name in size:
        if layers > SIZES[name].upper_layers:
            raise InvalidInput(f"--layers {layers}: the size {name} has {SIZES[name].upper_layers} upper layers")
        for length in tokens:
            expect_text(length, name)
    for name in size:
        say(f"measuring {name} on {device}")
        with _exported(SIZES[name], layers, students, dtype) as folder:
            ways, at = Ways(folder, seconds), name.replace("-", "_")
            found = {length: [ways.timings(length, room) for room in (0, *rooms)] for length in sorted(tokens)}
        for length, (alone, *full) in found.items():
            by_room, ratio = dict(zip(rooms, full, strict=True)), SIZES[name].upper_layers / layers
            yield from _figures(at, length, alone, by_room, ratio)
        yield from _burst(f"{at}/burst", max(tokens), rooms[-1], batches, found[max(tokens)], cost_us, ways.teams)
    yield Row("dtype", resolve_precision(dtype, device).name)
    yield Row("device", device.type)
    yield Row("threads", torch.get_num_threads())


@contextmanager
def _exported(config: BackboneConfig, layers: int, students: int, dtype: str) -> Iterator[Path]:
    """Gives the folder of an exported backbone whose tenants have a LoRA of all layers, and students."""
    tenants = [replace(one, adapter="lora", places=tuple(PROJECTIONS)) for one in random_tenants(TENANTS, RANK, LABELS)]
    with TemporaryDirectory(prefix="hplm-bench-") as folder:
        store, repository = random_store(Path(folder) / "store", config, tenants), Path(folder) / "repository"
        for number, tenant in enumerate(tenants):
            random_students(store, tenant, range(students, 0, -1), layers, RANK, SPREAD, number)
        yield repository / export(store, repository, replace(SERVED, dtype=dtype)).backbone


def name_of(team: Team) -> str:
    return f"students-{team.members}"


class Timing(NamedTuple):
    """The median times of batches of one kind."""

    texts: int
    work: int  # tokens as the scheduler counts them: those that all layers compute
    staging_s: float
    computing_s: float


Timings = Mapping[str, Timing]  # by way to answer: `full`, `students-1` and so on


class Ways:
    """An engine, and tenants that their full stacks answer, or some of their students."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._backbone, self._seconds, settings = Backbone(folder / "1"), seconds, settings_of(folder)
        self._engine, self._stager = open_engine(self._backbone, settings)
        self._device, self._clock = settings.device, clock(settings.device)
        tenants = self._backbone.view.snapshot.tenants
        assert tenants[0].students is not None  # as they were exported
        self.teams = tenants[0].students.teams
        self._ways = {FULL: ([replace(tenant, students=None) for tenant in tenants], 0)}  # the tenants, and their rung
        self._ways |= {name_of(team): ([*tenants], rung) for rung, team in reversed([*enumerate(self.teams)])}

    def timings(self, tokens: int, room: int) -> Timings:
        """Measures batches of texts of one length. They have `room` tokens of work, or one text. All ways take turns."""
        works = {way: sum(part.tokens for part in self._asked(way, tokens, 1)[0]) for way in self._ways}
        counts = {way: max(1, room // work) for way, work in works.items()}
        asked = {way: self._asked(way, tokens, max(POOL, count)) for way, count in counts.items()}
        staging: dict[str, list[float]] = {way: [] for way in asked}

        def run(way: str, number: int) -> float:
            first = number % (len(asked[way]) - counts[way] + 1)
            texts = [part for parts in asked[way][first : first + counts[way]] for part in parts]
            begin = self._clock()
            batch = stage(self._stager, texts)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            staged = self._clock()
            computed(self._engine, batch)  # its answers are read, so that the device has done all
            took = self._clock() - staged
            self._stager.release(batch.held)
            staging[way].append(staged - begin)
            return took

        computing = alternate({way: partial(run, way) for way in asked}, self._seconds, warm_up=2)
        return {
            way: Timing(count, count * works[way], median(staging[way]), computing[way] / 1e6) for way, count in counts.items()
        }

    def _asked(self, way: str, tokens: int, count: int) -> list[list[Text]]:
        return waiting(self._backbone, texts_of(self._backbone.config, [tokens] * count), *self._ways[way])


def _figures(at: str, tokens: int, alone: Timings, full: Mapping[int, Timings], ratio: float) -> Rows:
    """`full`: batches by their work. `ratio`: how many times as many layers the full stack has as a student."""
    took = {way: own.staging_s + own.computing_s for way, own in alone.items()}
    best = dict.fromkeys(took, 0.0)
    for way, own in took.items():
        yield Row(f"{at}/one/{tokens}/{way}_ms", 1e3 * own, "ms")
    for room, timings in full.items():
        for way, own in timings.items():
            best[way] = max(best[way], own.texts / own.computing_s)
            yield Row(f"{at}/batches/{tokens}/{room}/{way}", own.texts / own.computing_s, "texts/s")
            yield Row(f"{at}/batches/{tokens}/{room}/staging_over_computing/{way}", own.staging_s / own.computing_s)
    for way in [way for way in took if way != FULL]:
        yield Row(f"{at}/one/{tokens}/latency_{way}_over_full", took[way] / took[FULL])
        yield Row(f"{at}/batches/{tokens}/throughput_{way}_over_full", best[way] / best[FULL])
    share = best[ONE] / best[FULL] / ratio
    yield Row(f"{at}/batches/{tokens}/one_student_throughput_over_ratio_of_layers", share, least=0.85)


def _burst(
    at: str, tokens: int, room: int, batches: int, timings: Sequence[Timings], cost_us: tuple[float, float] | None,
    teams: Sequence[Team],
) -> Rows:  # fmt: skip
    """Yields the share in time with the full stack, with a fixed number of students, and as the governor chooses.

    Texts of so many `tokens` come, more than the full stack can serve, on a virtual clock. `timings`: of batches of such texts,
    from one text to `room` tokens. `cost_us`: of a batch and a token, in their place.
    """

    def batch_ns(ways: Sequence[str]) -> Callable[[int], float]:
        """Returns the time of a batch by its tokens: a straight line with the least relative errors.

        The next batch is staged meanwhile, and may take longer.
        """
        if cost_us is not None:
            batch, token = (1e3 * us for us in cost_us)
        else:
            measured = [own[way] for own in timings for way in ways]
            ns = np.array([1e9 * max(own.staging_s, own.computing_s) for own in measured])
            token, batch = np.polyfit([own.work for own in measured], ns, 1, w=1 / ns).tolist()
            if token <= 0:
                raise HplmError("larger batches took no more time than small ones: give --seconds more")
        return lambda tokens: max(0.0, batch) + token * tokens

    whole_ns = batch_ns([FULL])(room)
    least, most = ((ANSWERING_NS + times * whole_ns) / 1e6 for times in ALLOWED)
    rate, lengths = OVERLOAD * 1e9 * room / tokens / whole_ns, Lengths(tokens, 0.0, tokens, tokens)
    load = Stream(rate, batches * whole_ns / 1e9, lengths, (least, most), CV, range(TENANTS)).draw(SEED)
    fixed, shares, limits = name_of(teams[0]), dict[str, float](), Limits(SERVED.queue_texts, SERVED.queue_mb * 10**6)
    for way, own in {FULL: (), fixed: teams[:1], ONE: teams[-1:], ADAPTIVE: teams}.items():
        say(f"a burst of {len(load)} texts, {way}")
        took_ns = batch_ns([one for one in timings[0] if (one == FULL) != bool(own)])
        times = one_stage(lambda lengths, places, took_ns=took_ns: took_ns(int(lengths.sum())))
        machine = Machine(times, Capacity(room, room, SERVED.slots // 2), 0, ANSWERING_NS, NOISE)
        scheduler = Scheduler([policy(SERVED.policy)], limits, SERVED.admission, answering_ns=ANSWERING_NS)
        outcome = simulate_one(scheduler, machine, load, SEED, own)
        shares[way] = float(outcome.on_time.mean())
        yield Row(f"{at}/in_time/{way}", shares[way])
        yield Row(f"{at}/passes/{way}", sum(outcome.batches) / tokens / max(1, int(outcome.answered.sum())))
    target = 1.5 if len(teams) > 1 else None  # a single student is both
    yield Row(f"{at}/adaptive_over_fixed", shares[ADAPTIVE] / shares[fixed] if shares[fixed] else None, least=target)
