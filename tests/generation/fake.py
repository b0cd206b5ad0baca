"""A decoder whose logits depend on the tenant and all tokens, and a machine that reads these out of the cache."""

from __future__ import annotations

import zlib
from types import SimpleNamespace

import numpy as np
import torch

from hplm.errors import Broken, Internal, OutOfCapacity
from hplm.generation.cache import places_of, table_of
from hplm.generation.request import PinnedTenant
from hplm.generation.staging import Staged

VOCABULARY, START, END = 40, 1, 2
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"  # torch's words on a CPU
STAYS = "CUDA error: device-side assert triggered"
UNEXPECTED = ("a copy failed", "staging failed")
NOTHING = torch.empty(0)


class Fake:
    """A model whose logits depend on the tenant, its version and all tokens. `Machine` reads them out of the cache."""

    config = SimpleNamespace(positions=512, upper_layers=1, key_width=1, start_id=START, end_ids=(END,))

    def __init__(self, tenants=4):
        self.pinned = [self._pinned(uid, 1) for uid in range(tenants)]

    @staticmethod
    def _pinned(uid, version):
        return PinnedTenant(f"tenant-{uid}", uid, version, SimpleNamespace(links=((None, uid // 2),)))  # pyright: ignore

    def change(self, tenant):
        self.pinned[tenant] = self._pinned(tenant, self.pinned[tenant].version + 1)

    def machine(self, world, cache, max_sequences):
        machine = Machine(world, cache, max_sequences)
        return machine, machine

    def all_logits(self, ids, source):
        marks = np.array([mark(source, place, id) for place, id in enumerate(ids)])
        return torch.stack([logits_of(marks[: count + 1]) for count in range(len(ids))])


def mark(source, place, id) -> float:
    """Returns the number that stands in the cache for a token."""
    return float(hash((source.key, place, id)) % 2**40)


def logits_of(marks):
    return 2 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(zlib.crc32(marks.tobytes())))


class Machine:
    """Stages and computes for a `Fake`. It meets the world's next fault, and tells whom it hit."""

    def __init__(self, world, cache, max_sequences):
        self.held, self.busy = set(), False
        self._world, self._cache, self._max_sequences = world, cache, max_sequences
        cache.meets = self._meets

    def hold(self, sequence):
        assert sequence not in self.held
        if self._meets("adapter", [sequence], Broken):
            raise Broken("an adapter is broken")
        self.held.add(sequence)

    def release(self, sequence):
        assert not self.busy, "the device still reads it"
        self.held.discard(sequence)

    def stage(self, planned, broken):
        sequences = [one.sequence for one in planned]
        assert len(planned) <= self._max_sequences and sum(one.count for one in planned) <= self._world.step_tokens
        assert len({*sequences}) == len(planned) and self.held.issuperset(sequences)
        if self._meets("stage", sequences, Internal):
            raise ValueError(UNEXPECTED[1])
        if self._meets("rows", sequences[:1], Broken):
            broken(sequences[0], Broken("a row is broken"))
            planned = [one for one in planned if one.sequence.blocks is not None]
        return Staged(planned[::-1], NOTHING, NOTHING, None, [], [], NOTHING) if planned else None  # pyright: ignore

    def run(self, step):
        self.busy, sequences = True, [one.sequence for one in step.planned]
        tokens = sum(one.count for one in step.planned)
        self._world.prompt_tokens += sum(one.count for one in step.planned if one.count > 1)
        if tokens > 1 and (self._world.fault == "no memory" or self._meets("memory")):
            raise RuntimeError(NO_MEMORY)
        if self._meets("no memory", sequences, OutOfCapacity):
            raise RuntimeError(NO_MEMORY)
        if self._meets("device", sequences, Internal):
            raise RuntimeError(STAYS)
        keys, logits = self._cache.layer(0)[0][:, 0].numpy(), []
        for one in step.planned:
            own, end = one.sequence, one.sequence.computed + one.count
            at = places_of(table_of([own.blocks]), self._cache.block, np.array([0]), np.array([end]))
            keys[at[own.computed :]] = [mark(own.request.tenant, i, own.ids[i]) for i in range(own.computed, end)]
            if one.completes:
                logits.append(logits_of(keys[at]))
        if logits and self._meets("nan", [next(one.sequence for one in step.planned if one.completes)], Broken):
            logits[0] = logits[0] * torch.nan
        if logits and tokens > 1 and self._meets("choosing"):
            return Refusing()
        return torch.stack(logits) if logits else NOTHING

    def wait(self):
        self.busy = False

    def _meets(self, fault, sequences=(), error=Internal) -> bool:
        if self._world.fault != fault:
            return False
        self._world.fault = None
        self._world.met.append(fault)
        for sequence in sequences:
            self._world.hit[sequence.request].add(error)
        return True


class Refusing:
    """Logits for which there is no memory when tokens are chosen."""

    def __getitem__(self, row):
        raise RuntimeError(NO_MEMORY)

    __getattr__ = __getitem__
