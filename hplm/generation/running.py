"""The sequences that run, and the plan of a step: which tokens of which of them are computed next."""

from __future__ import annotations

import logging
from bisect import insort
from collections import Counter
from collections.abc import Callable, Hashable, Set
from collections.abc import Sequence as Many
from dataclasses import dataclass
from math import inf

import numpy as np

from hplm.errors import InvalidInput
from hplm.generation.attention import Chunk
from hplm.generation.cache import Cache, Room, Space, room_in
from hplm.generation.request import Sequence
from hplm.scheduling.sharing import fair_share
from hplm.scheduling.waiting import Capacity

log = logging.getLogger(__name__)
FINISHED = 16  # sequences that are remembered


@dataclass(frozen=True)
class Finished:
    """The tokens of a finished sequence and the room of their keys and values, for another one that begins alike."""

    key: Hashable  # of its source
    ids: list[int]
    room: Room


@dataclass(frozen=True)
class Planned:
    """The next tokens of a sequence."""

    sequence: Sequence
    count: int
    completes: bool  # a next token is chosen after it

    @property
    def chunk(self) -> Chunk:
        assert self.sequence.room is not None  # it runs
        return Chunk(self.sequence.room, self.sequence.computed, self.count)


def halves(planned: list[Planned]) -> tuple[list[Planned], ...]:
    """Returns two smaller steps instead of one: of half the sequences each or, of a single one, of half its tokens."""
    middle = len(planned) // 2
    if middle:
        return planned[:middle], planned[middle:]
    if planned[0].count < 2:
        return ()
    one, first = planned[0], planned[0].count // 2
    return [Planned(one.sequence, first, False)], [Planned(one.sequence, one.count - first, one.completes)]


def age(sequence: Sequence) -> tuple[int, int]:
    """Returns what sequences are sorted by, the oldest first: in the order of receipt, because clients may forge arrivals."""
    return sequence.request.number, sequence.choice


class Running:
    """The loop's thread owns it, and the cache. The oldest sequence always gets on: others are put back for it if need be."""

    def __init__(self, cache: Cache, seats: int, step_tokens: int, finished: int = FINISHED) -> None:
        """`seats`: the most sequences that run together. `step_tokens`: the most tokens of a step.

        `finished`: the most finished sequences that are remembered.
        """
        if not 0 < seats <= step_tokens:
            raise InvalidInput(f"{seats} sequences do not fit in a step of {step_tokens} tokens: give 1 to {step_tokens}")
        self.cache = cache
        self.seats = seats
        self.step_tokens = step_tokens
        self.sequences: list[Sequence] = []  # the oldest first
        self.returning: list[Sequence] = []  # that were put back, and start before any other
        self.further: list[Sequence] = []  # further answers to requests, which wait as others of their tenants do
        self.put_back = 0  # how often a sequence was
        self._most_finished = finished
        self._turns: list[int | None] = []  # tenants that run alone, and None for all others; the last step's is the last
        self._finished: list[Finished] = []  # the oldest first; their room is given back as soon as it is needed

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
        return _free(self.cache.space, self._finished)

    def capacity(self, share: float) -> Capacity:
        """Returns what may start now. Tokens are those that sequences are expected to have in the end."""
        seats = 0 if self.returning else self.seats - len(self.sequences)
        return Capacity(self.spare(share), seats, seats)

    def levels(self, share: float) -> Counter[int]:
        """Returns the part that each tenant has of the sequences or of the cache, the larger one, in whole sequences."""
        counts: Counter[int] = Counter()
        places: Counter[int] = Counter()
        for sequence in self.sequences:
            counts[sequence.tenant] += 1
            places[sequence.tenant] += self.places(sequence, share)
        return counts | Counter({tenant: own * self.seats // self.cache.space.tokens for tenant, own in places.items()})

    def start(self, sequence: Sequence, share: float) -> bool:
        """Gives the sequence room. Returns False if there is none, or if those that run need the rest.

        `share`: the part of `max_tokens` that an answer usually has.
        """
        if len(self.sequences) >= self.seats:
            return False
        forgotten = self._forgotten_for(sequence, share)
        if forgotten is None:
            return False
        for _ in range(forgotten):
            self._forget()
        like, alike = self._alike(sequence, self._finished)
        own = self.cache.take(len(sequence.ids) + 1, like, alike)
        assert own is not None  # it was tried
        if like is not None:
            try:
                self.cache.copy(like, own, alike)
            except BaseException:
                self.cache.give_back(own)
                raise
        sequence.room, sequence.computed = own, alike
        insort(self.sequences, sequence, key=age)
        return True

    def _forgotten_for(self, sequence: Sequence, share: float) -> int | None:
        """Returns how many remembered sequences must be forgotten before this one starts, or None if it cannot start.

        This is tried on a copy: nothing may be forgotten for a sequence that does not start, because it is tried in each step.
        """
        space, remembered = self.cache.space.copy(), [*self._finished]
        while (own := room_in(space, len(sequence.ids) + 1, *self._alike(sequence, remembered))) is None:
            if not remembered:
                return None
            space.give_back(remembered.pop(0).room)
        spare = _free(space, remembered) - self._expected(share)
        if self.sequences and spare < self.places(sequence, share) - own.size:
            return None
        return len(self._finished) - len(remembered)

    def places(self, sequence: Sequence, share: float) -> int:
        """Returns the places that a sequence is expected to need in the end."""
        return self.cache.space.size_for(sequence.in_the_end(share))

    def spare(self, share: float) -> int:
        """Returns the free places that no running sequence is expected to need."""
        return self.free - self._expected(share)

    def _expected(self, share: float) -> int:
        """Returns the places that running sequences are expected to need beside those that they have."""
        sizes = [(self.places(sequence, share), sequence.room) for sequence in self.sequences]
        return sum(size - room.size for size, room in sizes if room is not None)

    @staticmethod
    def start_from(waiting: list[Sequence], sequence: Sequence, start: Callable[[Sequence], bool]) -> bool:
        """Starts a sequence that waits here, unless `start` refuses it."""
        waiting.remove(sequence)  # first: `start` may end others that wait
        if start(sequence):
            return True
        insort(waiting, sequence, key=age)
        return False

    def plan(self, most: int, alone: Set[int] = frozenset()) -> tuple[list[Planned], list[Sequence]]:
        """Returns the next step, of `most` tokens, and the sequences that were put back for it.

        A sequence that has only its last token left goes first. `alone`: tenants whose sequences share no step with others.
        """
        in_step = self._in_turn(alone) if alone else self.sequences
        counts = {sequence: 1 for sequence in in_step if sequence.uncomputed == 1}
        counts |= self._pieces(in_step, max(most - len(counts), 0))
        back: list[Sequence] = []
        for sequence in list(in_step):
            while sequence.room is not None and not self._has_room(sequence, counts[sequence]):
                back.append(self._put_back(sequence))
        planned = [(sequence, count) for sequence in self.sequences if (count := counts.get(sequence))]
        return [Planned(sequence, count, count == sequence.uncomputed) for sequence, count in planned], back

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
    def _pieces(sequences: Many[Sequence], left: int) -> dict[Sequence, int]:
        """Divides so many tokens of a step among prompts: a fair share for each tenant, the oldest of its sequences first."""
        reading = [sequence for sequence in sequences if sequence.uncomputed > 1]
        counts, wanted = dict.fromkeys(reading, 0), Counter[int]()
        for sequence in reading:
            wanted[sequence.tenant] += sequence.uncomputed
        for share in (fair_share(np.array(list(wanted.values())), left), inf):  # then the oldest take what rounding leaves
            had: Counter[int] = Counter()
            for sequence in reading:
                more = int(min(sequence.uncomputed - counts[sequence], share - had[sequence.tenant], left))
                counts[sequence] += more
                had[sequence.tenant] += more
                left -= more
        return counts

    def end(self, sequence: Sequence) -> None:
        """Frees what the sequence has. What it has computed is remembered, unless it has failed."""
        if sequence.room is None:
            (self.returning if sequence in self.returning else self.further).remove(sequence)
            return
        self.sequences.remove(sequence)
        own, sequence.room = sequence.room, None
        if sequence.finish is None or not sequence.computed:
            self.cache.give_back(own)
        else:
            self._finished.append(Finished(sequence.request.source.key, sequence.ids[: sequence.computed], own))
            if len(self._finished) > self._most_finished:
                self._forget()

    def _has_room(self, sequence: Sequence, count: int) -> bool:
        """Makes room for so many more tokens. Returns False if there is none. Then the sequence may have lost what it had."""
        own = sequence.room
        assert own is not None
        if own.size >= sequence.computed + count:
            return True
        try:
            while (grown := self.cache.grow(own, sequence.computed + count, sequence.computed)) is None:
                if not self._forget():
                    return False
        except Exception:
            log.exception("a sequence could not be moved: its tokens are computed again")
            grown = None
        sequence.room = grown
        return grown is not None

    def _forget(self) -> bool:
        """Gives back the room of the oldest finished sequence. Returns False if none is remembered."""
        if not self._finished:
            return False
        self.cache.give_back(self._finished.pop(0).room)
        return True

    def _put_back(self, growing: Sequence) -> Sequence:
        """Takes the room of the youngest sequence for one that grows, unless that has lost its own: then it is put back itself.

        All its tokens are computed again later.
        """
        back = growing if growing.room is None else self.sequences[-1]
        self.sequences.remove(back)
        if back.room is not None:
            self.cache.give_back(back.room)
        back.room, back.computed = None, 0
        insort(self.returning, back, key=age)
        self.put_back += 1
        return back

    def _alike(self, sequence: Sequence, remembered: list[Finished]) -> tuple[Room | None, int]:
        """Returns the room of a sequence of the same tenant version that begins alike, and how many computed tokens are alike.

        The last token of `sequence` is computed in any case: its logits are needed.
        """
        room, alike = None, 0
        key, last = sequence.request.source.key, len(sequence.ids) - 1
        computed = [(other.request.source.key, other.ids, other.computed, other.room) for other in self.sequences]
        computed += [(other.key, other.ids, len(other.ids), other.room) for other in remembered]
        for its, ids, count, its_room in computed:
            if its == key and min(count, last) > alike:
                shared = _shared(sequence.ids, ids, min(count, last))
                if shared > alike:
                    room, alike = its_room, shared
        return room, alike


def _free(space: Space, remembered: list[Finished]) -> int:
    """Returns the places that are free, or would be if nothing was remembered."""
    return space.free + space.freed_by([finished.room for finished in remembered])


def _shared(one: list[int], other: list[int], most: int) -> int:
    """Returns how many tokens both begin with."""
    if one[:most] == other[:most]:
        return most
    return next(place for place in range(most) if one[place] != other[place])
