"""The sequences that run, and the plan of a step: which tokens of which of them are computed next."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Hashable, Set
from collections.abc import Sequence as Many
from dataclasses import dataclass
from math import inf

import numpy as np

from hplm.errors import InvalidInput
from hplm.generation.cache import Blocks, Cache
from hplm.generation.request import Sequence
from hplm.scheduling.cost import FIRST, CostModel
from hplm.scheduling.fairness import fair_share
from hplm.scheduling.selection import Capacity

FINISHED = 16  # sequences that are remembered
LEARNING = 0.1  # rate of the running mean of `share`
SLOWER = 3  # so many times as long may a step take because of prompts, if sequences grow beside them
LEAST_CHUNK = 16  # tokens of prompts in such a step, in any case: prompts must get on


@dataclass(frozen=True)
class FinishedSequence:
    """The tokens of a finished sequence and the blocks of their keys and values, for another one that begins alike."""

    key: Hashable  # of its tenant, as pinned
    ids: list[int]
    blocks: Blocks


@dataclass(frozen=True)
class Planned:
    """The next tokens of a sequence."""

    sequence: Sequence
    count: int

    @property
    def completes(self) -> bool:
        """Whether a next token is chosen after it."""
        return self.count == self.sequence.uncomputed

    def tokens(self, before: int) -> list[int]:
        """Returns its tokens, and so many before them."""
        computed = self.sequence.computed
        return self.sequence.ids[max(0, computed - before) : computed + self.count]


def halves(planned: list[Planned]) -> tuple[list[Planned], ...]:
    """Returns two smaller steps instead of one: of half the sequences each or, of a single one, of half its tokens."""
    middle = len(planned) // 2
    if middle:
        return planned[:middle], planned[middle:]
    if planned[0].count < 2:
        return ()
    one, first = planned[0], planned[0].count // 2
    return [Planned(one.sequence, first)], [Planned(one.sequence, one.count - first)]


def age(sequence: Sequence) -> tuple[int, int]:
    """Returns what sequences are sorted by, the oldest first: in the order of receipt, because clients may forge arrivals."""
    return sequence.request.number, sequence.choice


class RunningSequences:
    """The loop's thread owns it, and the cache. The oldest sequence always gets on: others are put back for it if need be."""

    def __init__(self, cache: Cache, max_sequences: int, step_tokens: int, finished: int = FINISHED) -> None:
        """`max_sequences`: the most sequences that run together. `step_tokens`: the most tokens of a step.

        `finished`: the most finished sequences that are remembered.
        """
        if not 0 < max_sequences <= step_tokens:
            raise InvalidInput(
                f"{max_sequences} sequences do not fit in a step of {step_tokens} tokens: give 1 to {step_tokens}"
            )
        self.cache = cache
        self.max_sequences = max_sequences
        self.step_tokens = step_tokens
        self.share = 1.0  # of `max_tokens` that answers have, a running mean
        self.sequences: list[Sequence] = []  # the oldest first
        self.returning: list[Sequence] = []  # that were put back, and start before any other
        self.further: list[Sequence] = []  # further answers to requests, which wait as others of their tenants do
        self.put_back = 0  # how often a sequence was
        self._most_finished = finished
        self._turns: list[int | None] = []  # tenants that run alone, and None for all others; the last step's is the last
        self._finished: list[FinishedSequence] = []  # the oldest first; their blocks are given back as soon as they are needed

    def __len__(self) -> int:
        return len(self.all)

    @property
    def all(self) -> list[Sequence]:
        """Returns those that run or wait here."""
        return [*self.sequences, *self.returning, *self.further]

    @property
    def uncomputed(self) -> int:
        """The tokens of prompts that are still to be computed."""
        return sum(sequence.uncomputed for sequence in self.sequences if sequence.uncomputed > 1)

    @property
    def free(self) -> int:
        """The places that sequences may take, with those of remembered ones."""
        return self.cache.free + self.cache.freed_by([finished.blocks for finished in self._finished])

    @property
    def capacity(self) -> Capacity:
        """Returns what may start now. Tokens are those that sequences are expected to have in the end."""
        room = 0 if self.returning else self.max_sequences - len(self.sequences)
        return Capacity(self.spare, room, room)

    def tenant_shares(self) -> Counter[int]:
        """Returns the part that each tenant has of the sequences or of the cache, the larger one, in whole sequences."""
        counts: Counter[int] = Counter()
        places: Counter[int] = Counter()
        for sequence in self.sequences:
            counts[sequence.tenant] += 1
            places[sequence.tenant] += self.places(sequence)
        return counts | Counter({tenant: own * self.max_sequences // self.cache.tokens for tenant, own in places.items()})

    def start(self, sequence: Sequence) -> bool:
        """Gives the sequence blocks. Returns False if there are none, or if those that run need the rest."""
        if len(self.sequences) >= self.max_sequences:
            return False
        forgotten = self._forgotten_for(sequence)
        if forgotten is None:
            return False
        for _ in range(forgotten):
            self._forget()
        like, alike = self._alike(sequence, self._finished)
        own = self.cache.take(len(sequence.ids) + 1, like, alike)
        assert own is not None  # there are enough
        try:
            self.cache.copy(like, own, alike)
        except BaseException:
            self.cache.give_back(own)
            raise
        sequence.blocks, sequence.computed = own, alike
        insort(self.sequences, sequence, key=age)
        return True

    def _forgotten_for(self, sequence: Sequence) -> int | None:
        """Returns how many remembered sequences must be forgotten before this one starts, or None if it cannot start.

        Nothing may be forgotten for a sequence that does not start, because it is tried in each step.
        """
        cache, needed = self.cache, self.cache.size_for(len(sequence.ids) + 1)
        running = {block for other in self.sequences for block in other.blocks or ()}
        for forgotten in range(len(self._finished) + 1):
            shared = cache.shared(*self._alike(sequence, self._finished[forgotten:]))
            free = cache.free + cache.freed_by([finished.blocks for finished in self._finished[:forgotten]])
            if needed - cache.size_of(shared) <= free:
                spare = self.spare + cache.block * len(running.intersection(shared))
                return forgotten if not self.sequences or spare >= self.places(sequence) else None
        return None

    def places(self, sequence: Sequence) -> int:
        """Returns the places that a sequence is expected to need in the end."""
        return self.cache.size_for(sequence.in_the_end(self.share))

    @property
    def spare(self) -> int:
        """The free places that no running sequence is expected to need."""
        return self.free - sum(self.places(one) - self.cache.size_of(one.blocks or ()) for one in self.sequences)

    @staticmethod
    def start_from(waiting: list[Sequence], sequence: Sequence, start: Callable[[Sequence], bool]) -> bool:
        """Starts a sequence that waits here, unless `start` refuses it."""
        waiting.remove(sequence)  # first: `start` may end others that wait
        if start(sequence):
            return True
        insort(waiting, sequence, key=age)
        return False

    def learn(self, generated: int, most: int) -> None:
        """Learns from an answer that has ended how many of its `max_tokens` it has."""
        if most:
            self.share += LEARNING * (generated / most - self.share)

    def most_tokens(self, cost: CostModel) -> int:
        """Returns how many tokens a step may have, so that pieces of prompts do not hold up sequences that grow."""
        growing = sum(one.uncomputed == 1 for one in self.sequences)
        if not 0 < growing < len(self.sequences) or cost.observed < FIRST:
            return self.step_tokens
        more = (SLOWER - 1) * cost.predict(growing, growing) / max(float(cost.terms[1]), 1e-9)
        return int(min(self.step_tokens, growing + max(more, LEAST_CHUNK)))

    def plan(self, most: int, alone: Set[int] = frozenset()) -> tuple[list[Planned], list[Sequence]]:
        """Returns the next step, of `most` tokens, and the sequences that were put back for it.

        A sequence that has only its last token left goes first. `alone`: tenants whose sequences share no step with others.
        """
        in_step = self._in_turn(alone) if alone else self.sequences
        counts = {sequence: 1 for sequence in in_step if sequence.uncomputed == 1}
        counts |= self._pieces(in_step, max(most - len(counts), 0))
        back: list[Sequence] = []
        for sequence in list(in_step):
            while sequence.blocks is not None and not self._has_room(sequence, counts[sequence]):
                back.append(self._put_back())
        return [Planned(sequence, count) for sequence in self.sequences if (count := counts.get(sequence))], back

    def _in_turn(self, alone: Set[int]) -> list[Sequence]:
        """Returns the sequences of one tenant that runs alone, or those of all others: whose last step is the longest ago."""
        groups: dict[int | None, list[Sequence]] = {}
        for sequence in self.sequences:
            groups.setdefault(sequence.tenant if sequence.tenant in alone else None, []).append(sequence)
        if not groups:
            return []
        turn = min(groups, key=lambda group: self._turns.index(group) if group in self._turns else -1)
        self._turns = [*(group for group in self._turns if group in groups and group != turn), turn]
        return groups[turn]

    @staticmethod
    def _pieces(sequences: Many[Sequence], tokens: int) -> dict[Sequence, int]:
        """Divides so many tokens of a step among prompts: a fair share for each tenant, the oldest of its sequences first."""
        reading = [sequence for sequence in sequences if sequence.uncomputed > 1]
        counts, wanted = dict.fromkeys(reading, 0), Counter[int]()
        for sequence in reading:
            wanted[sequence.tenant] += sequence.uncomputed
        for share in (fair_share(np.array(list(wanted.values())), tokens), inf):  # then the oldest take what rounding leaves
            had: Counter[int] = Counter()
            for sequence in reading:
                more = int(min(sequence.uncomputed - counts[sequence], share - had[sequence.tenant], tokens))
                counts[sequence] += more
                had[sequence.tenant] += more
                tokens -= more
        return counts

    def end(self, sequence: Sequence) -> None:
        """Frees what the sequence has. What it has computed is remembered, unless it has failed."""
        if sequence.blocks is None:
            (self.returning if sequence in self.returning else self.further).remove(sequence)
            return
        self.sequences.remove(sequence)
        own, sequence.blocks = sequence.blocks, None
        if sequence.finish is None or not sequence.computed:
            self.cache.give_back(own)
        else:
            self._finished.append(FinishedSequence(sequence.request.tenant.key, sequence.ids[: sequence.computed], own))
            if len(self._finished) > self._most_finished:
                self._forget()

    def _has_room(self, sequence: Sequence, count: int) -> bool:
        """Gives a running sequence blocks for so many more tokens. Returns False if there are none."""
        assert sequence.blocks is not None  # it runs
        while (grown := self.cache.grow(sequence.blocks, sequence.computed + count)) is None:
            if not self._forget():
                return False
        sequence.blocks = grown
        return True

    def _forget(self) -> bool:
        """Gives back the blocks of the oldest finished sequence. Returns False if none is remembered."""
        if not self._finished:
            return False
        self.cache.give_back(self._finished.pop(0).blocks)
        return True

    def _put_back(self) -> Sequence:
        """Takes the blocks of the youngest sequence. All its tokens are computed again later."""
        back = self.sequences.pop()
        assert back.blocks is not None  # it runs
        self.cache.give_back(back.blocks)
        back.blocks, back.computed = None, 0
        insort(self.returning, back, key=age)
        self.put_back += 1
        return back

    def _alike(self, sequence: Sequence, remembered: list[FinishedSequence]) -> tuple[Blocks, int]:
        """Returns the blocks of a sequence of the same tenant version that begins alike, and how many of its tokens do.

        The last token of `sequence` is computed in any case, and all of a prompt to score: their logits are needed.
        """
        blocks: Blocks = ()
        alike, key, last = 0, sequence.request.tenant.key, sequence.skipped
        computed = [(other.request.tenant.key, other.ids, other.computed, other.blocks or ()) for other in self.sequences]
        computed += [(other.key, other.ids, len(other.ids), other.blocks) for other in remembered]
        for its, ids, count, its_blocks in computed:
            if its == key and min(count, last) > alike:
                shared = _shared(sequence.ids, ids, min(count, last))
                if shared > alike:
                    blocks, alike = its_blocks, shared
        return blocks, alike


def _shared(one: list[int], other: list[int], most: int) -> int:
    """Returns how many tokens both begin with."""
    if one[:most] == other[:most]:
        return most
    return next(place for place in range(most) if one[place] != other[place])
