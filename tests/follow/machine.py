"""A machine that follows: a copy of a state, driven step by step, and readers that are played."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from hplm.adapters.bank import Bank
from hplm.follow.copy import Copy
from hplm.follow.follower import Following
from hplm.follow.source import Source
from hplm.tenants.manager import Manager
from hplm.tenants.snapshot import LIVE, Snapshot
from hplm.tenants.state import EXPORTED_BANKS, State
from testing.reference import Reference
from tests.places import TEXT
from tests.support.wait import eventually


class Machine:
    """Followers of one copy, one after the other."""

    def __init__(self, repository: Path, state: Path, url: str, token: str = "", name: str = "one") -> None:
        self.folder = repository / "toy/1"
        self.root = state
        self.state = State(state / "toy")
        self.url = url
        self.token = token
        self.name = name
        self.said: list[str] = []

    def opened(self) -> Following:
        copy = Copy(self.folder, self.root, lambda: Source(self.url, self.token), self.name, self.said.append)
        return Following(copy)

    @contextmanager
    def following(self) -> Iterator[Following]:
        """Ends without a word to the source, as a killed follower does."""
        following = self.opened()
        try:
            yield following
        finally:
            following.copy.close()

    def follow(self) -> None:
        """Follows until all is here."""
        with self.following() as following:
            until_whole(following)

    def served(self) -> Snapshot:
        generation = self.state.current()
        return self.state.load(generation) if generation else Snapshot.load(self.folder / "tenants.json")

    def answer(self, tenant: str):
        return Reference.open(self.folder, self.root).forward(TEXT, tenant)


def step(following: Following) -> None:
    """Looks at once, however long ago the last look was."""
    following._look_at = following._report_at = 0.0
    following.step()


def until_whole(following: Following) -> None:
    def whole():
        step(following)
        return following.copy.is_whole

    eventually(whole)


def same(source: tuple[Path, Path], machine: Machine) -> bool:
    """Whether a copy has the tables, the tenants and the bytes of the source's records."""
    repository, state = source
    wanted, found = Manager.open(repository, state).current(), machine.served()
    assert found.branches == wanted.branches and found.export == wanted.export
    assert [anywhere(tenant) for tenant in found.tenants] == [anywhere(tenant) for tenant in wanted.tenants]
    for ours, theirs in zip(found.tenants, wanted.tenants, strict=True):
        for mine, its in zip(ours.records(), theirs.records(), strict=True):
            assert content(machine.folder, machine.state, mine) == content(machine.folder, State(state / "toy"), its)
    for branch in wanted.branches:
        folder = State(state / "toy").tables / branch.folder
        for file in folder.iterdir() if folder.is_dir() else ():
            assert file.read_bytes() == (machine.state.tables / branch.folder / file.name).read_bytes()
    return True


def anywhere(tenant):
    return tenant.moved({record: replace(record, bank="", index=0) for record in tenant.records()})


def content(folder: Path, state: State, record) -> bytes:
    live = record.bank.startswith(LIVE)
    bank = Bank(state.bank(record.bank) if live else folder / EXPORTED_BANKS / record.bank)
    flat = bank.layout.empty()
    bank.read(record, flat)
    return flat.view(dtype=torch.uint8).numpy().tobytes()
