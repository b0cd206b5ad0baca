"""Says which texts may lose their places in a full line, in whatever order the steps come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TypeVar

T = TypeVar("T")
Size = tuple[int, int]  # a request's items, and their bytes or work


def check_displaced(waiting: Sequence[T], new: T, gone: Sequence[T], bounds: Size, size: Callable[[T], Size], tenant) -> None:
    """Checks which requests of a line, oldest first, left for a new one. `gone`: only the new one, if it was refused."""
    wanted = share([*of(waiting, new, tenant), new], bounds, size)
    if list(gone) == [new]:
        for one in reversed(waiting):  # even if all larger tenants shrank to its share, there would be no room
            if share(of(waiting, one, tenant), bounds, size) > wanted:
                waiting = [other for other in waiting if other is not one]
        assert is_full([*waiting, new], bounds, size), "a request was refused though a larger tenant had room to give"
        return
    left = [one for one in waiting if not any(one is other for other in gone)]
    assert len(left) + len(gone) == len(waiting), "what leaves did not wait, or leaves twice"
    assert not is_full([*left, new], bounds, size), "the line has more than its bounds"
    last = []  # of each tenant that loses: the oldest request that it loses
    for one in waiting:
        if one in gone and not any(tenant(one) == tenant(other) for other in last):
            last.append(one)
    for one in last:
        own = of(left, one, tenant)
        assert of(waiting, one, tenant)[: len(own)] == own, "not the newest requests of a tenant left"
        before = share([*own, one], bounds, size)
        assert before > wanted, "a tenant lost a place to one that holds no less"
        assert all(share(of(left, other, tenant), bounds, size) <= before for other in left), "not the largest tenant lost"
    assert not last or any(is_full([*left, one, new], bounds, size) for one in last), "more left than had to"


def of(requests: Sequence[T], one: T, tenant) -> list[T]:
    return [other for other in requests if tenant(other) == tenant(one)]


def share(requests: Sequence[T], bounds: Size, size: Callable[[T], Size]) -> Fraction:
    return max(Fraction(sum(size(one)[at] for one in requests), bounds[at]) for at in (0, 1))


def is_full(requests: Sequence[T], bounds: Size, size: Callable[[T], Size]) -> bool:
    return any(sum(size(one)[at] for one in requests) > bounds[at] for at in (0, 1))
