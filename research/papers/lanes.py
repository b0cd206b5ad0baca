"""`python -m research.papers lanes`: Student Parallelism's Table 4, and what Eq. 6 brings, simulated. No GPU was used.

Texts come to a node of four devices. A batch goes to all students at once, and each student computes it on a device, its lane.
A lane computes several students side by side, each as fast as alone (the paper's MPS); others wait for a place.

The server's scheduler keeps the waiting texts and chooses batches. The loop around it is not that of `hplm.simulate`, whose
server has one engine: its batches end in the order in which they began, and none is on several devices at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from heapq import heappop, heappush, heapreplace

import numpy as np

from bench.rows import Positive, Row, Rows, benchmark
from hplm.arrays import Array
from hplm.scheduling.columns import NEVER
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import policy
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.selection import Batch, Capacity
from hplm.simulate.arrivals import Arrivals, Lengths, SimulatedText, Stream

# The paper states:
DEVICES, GROUPS = 4, 16  # of a node (B.2); batches that it computes at once (Table 5: M = 4G)
STUDENTS = 3  # of most tenants after pruning (4.3.1)
BIN, ELEMENT, LONGEST = 8, 4, 128  # tokens of a bin, texts of a batch from the buffer, tokens of a text (B.4.2)
QUEUED = 10  # texts of a batch from the waiting queue, nearly (Table 5)
BUDGET_MS = 10.0  # of the waiting queue and the batch (4.1.3)
GATHER_MS = 0.2  # to add what several students have computed (3.3.1)
LAYER_MS = (21.1 - 11.6) / 12  # Table 2: BERT-large has twelve layers more than BERT-base; both pad to the longest
BESIDE_MS = 11.6 - 12 * LAYER_MS  # what BERT-base takes beside its layers
TWO_LAYERS_MS = 2.8  # a student without padding, which is also the first row of Table 4
TABLE4 = {"2-layer students": (2.8, 3.6), "4-layer": (4.5, 5.2), "padded": (5.1, 5.3), "waiting queue": (7.5, 9.5)}
THREE = "2-layer, three students"
STATED = TABLE4 | {THREE: (3.0, 3.7)}  # mean and 95 % tail in ms; the last one is of Table 2

# These are assumed:
LENGTHS = Lengths(25, 120, 3, LONGEST)  # SST-2's sentences, about
TOKEN_MS = (BESIDE_MS + 2 * LAYER_MS - TWO_LAYERS_MS) / (LONGEST - LENGTHS.mean - (BIN - 1) / 2)
RATE = 2000.0  # texts a second, Poisson: some QUEUED of them come in the time that a batch leaves of the budget
RATES = (2000.0, 4000.0, 6000.0, 8000.0)
SEED = 1

Lane = Callable[[int, int, int, int], int]  # of a member, the batch's number, the number of members, and that of lanes


def rotating(member: int, batch: int, members: int, lanes: int) -> int:
    """Returns the lane of a member by Eq. 6. The paper's group j is here the batch j: groups take batches in turn."""
    return (member + batch * members) % lanes


def fixed(member: int, batch: int, members: int, lanes: int) -> int:
    """Returns a lane that is the same for every batch."""
    return member % lanes


@benchmark(seconds=0.05, rates=RATES[:1])
def lanes(*, seconds: Positive = 5.0, rates: tuple[Positive, ...] = RATES) -> Rows:
    """Simulates each row of Table 4, and three students under several loads with lanes by Eq. 6 and with fixed ones.

    The times of layers and tokens are from the paper's Table 2, so the mean of the first row is no finding.

    :param seconds: of texts in each simulation
    :param rates: texts a second, of the comparison of lanes
    """
    load = load_of(RATE, seconds)
    padded = replace(load, tokens=np.full(len(load), LONGEST))
    rows = {
        "2-layer students": (Node(2), load),
        "4-layer": (Node(4), load),
        "padded": (Node(4), padded),
        "waiting queue": (Node(4, QUEUED, BUDGET_MS - batch_ms(4, LONGEST)), padded),
        THREE: (Node(2, students=STUDENTS), load),
    }
    means = {}
    for name, (node, texts) in rows.items():
        latency_ms, _ = node.run(texts)
        mean, tail = STATED[name]
        means[name] = float(latency_ms.mean())
        yield Row(f"table/{name}/mean_ms", means[name], "ms")
        yield Row(f"table/{name}/mean_ms_stated", mean, "ms")
        yield Row(f"table/{name}/tail_ms", float(np.percentile(latency_ms, 95)), "ms")
        yield Row(f"table/{name}/tail_ms_stated", tail, "ms")
    rising = [means[name] for name in TABLE4]
    yield Row("table/means_rise_as_in_the_paper", float(rising == sorted(set(rising))), least=1)
    for rate in rates:
        load, mean_ms = load_of(rate, seconds), dict[str, float]()
        for name, lane in {"Eq. 6": rotating, "fixed": fixed}.items():
            latency_ms, busy_ms = Node(2, students=STUDENTS, lane=lane).run(load)
            mean_ms[name] = float(latency_ms.mean())
            yield Row(f"lanes/{rate:g}/{name}/mean_ms", mean_ms[name])
            yield Row(f"lanes/{rate:g}/{name}/busiest_over_mean", float(busy_ms.max() / busy_ms.mean()))
        yield Row(f"lanes/{rate:g}/fixed over Eq. 6/times_as_long", mean_ms["fixed"] / mean_ms["Eq. 6"])


def load_of(rate: float, seconds: float) -> Arrivals:
    return Stream(rate, seconds, LENGTHS, (0.0, 0.0)).draw(SEED)


def batch_ms(layers: int, tokens: int, students: int = 1) -> float:
    """Returns the time of a batch that is padded to so many tokens, on free lanes.

    It does not depend on the number of texts, as in Eq. 7 while they do not fill a device.
    """
    return BESIDE_MS - TOKEN_MS * (LONGEST - tokens) + LAYER_MS * layers + GATHER_MS * (students > 1)


@dataclass(frozen=True)
class Node:
    layers: int
    texts: int = ELEMENT  # of a batch
    window_ms: float = 0.0  # that the oldest text waits for a full batch; 0: no text waits while the node has room for a batch
    students: int = 1
    lane: Lane = rotating

    def run(self, load: Arrivals) -> tuple[Array, Array]:
        """Returns the latency of each text, and how long each lane computed, in ms."""
        scheduler: Scheduler[SimulatedText] = Scheduler(policy(f"length_aware:bin={BIN}"), Limits(10**7, 10**12))
        capacity = Capacity(self.texts * LONGEST, self.texts, self.texts, GROUPS)
        places = -(-GROUPS * self.students // DEVICES)  # of a lane: what Eq. 6 gives each device
        free_ns, busy_ms = [[0] * places for _ in range(DEVICES)], np.zeros(DEVICES)
        arrival_ns, answered_ns = [*load.at_ns.tolist(), NEVER], np.zeros(len(load), np.int64)
        computing: list[tuple[int, int, Batch[SimulatedText]]] = []  # ends, numbers and batches
        now = arrived = taken = number = 0
        while now < NEVER:
            while computing and computing[0][0] <= now:
                scheduler.finished(heappop(computing)[2], now)
            while arrival_ns[arrived] <= now:
                scheduler.offer([load.text(arrived)], now)
                arrived += 1
            while (due_ns := self._due_ns(arrival_ns, taken, arrived)) <= now and (batch := scheduler.choose(capacity, now)):
                scheduler.started(batch, now)
                longest = -(-max(text.tokens for text in batch.texts) // BIN) * BIN
                took_ms, ends_ns = batch_ms(self.layers, longest, self.students), now
                for member in range(self.students):
                    lane = self.lane(member, number, self.students, DEVICES)
                    end_ns = max(now, free_ns[lane][0]) + int(took_ms * 1e6)
                    heapreplace(free_ns[lane], end_ns)
                    busy_ms[lane] += took_ms
                    ends_ns = max(ends_ns, end_ns)  # the answer needs all members
                heappush(computing, (ends_ns, number, batch))
                answered_ns[[text.number for text in batch.texts]] = ends_ns
                number, taken = number + 1, taken + len(batch.texts)
            now = min(arrival_ns[arrived], computing[0][0] if computing else NEVER, due_ns if due_ns > now else NEVER)
        return (answered_ns - load.at_ns) / 1e6, busy_ms

    def _due_ns(self, arrival_ns: list[int], taken: int, arrived: int) -> int:
        """Returns when a batch may leave, if a group is idle. Of a waiting queue the oldest texts leave first."""
        if taken == arrived:
            return NEVER
        return arrival_ns[taken] + int(self.window_ms * 1e6) if arrived - taken < self.texts else 0
