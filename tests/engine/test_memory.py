"""Large answers and the memory that they share with the server process."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from hplm.engine import memory
from hplm.engine.memory import SPARE, SharedMemory
from hplm.errors import OutOfCapacity
from tests.support.message import mentioning
from tests.support.wait import PATIENCE, Hold

MB = 1 << 20


@pytest.fixture
def shared(monkeypatch):
    """Lets a test set the number of free bytes of shared memory, which is 0 at first."""
    left = SimpleNamespace(bytes=0)
    monkeypatch.setattr(memory.os, "statvfs", lambda _: SimpleNamespace(f_bavail=left.bytes, f_frsize=1))
    return left


def test_an_answer_without_enough_shared_memory_is_an_error(shared):
    room = SharedMemory()
    with pytest.raises(OutOfCapacity, match=mentioning("26 MB", "/dev/shm", 0, "--shm-size")), room.taken(25 * MB):
        pytest.fail("it was sent")


def test_memory_of_one_large_answer_is_used_for_the_next(shared):
    room, shared.bytes = SharedMemory(), 25 * MB + SPARE
    with room.taken(25 * MB):
        shared.bytes -= 25 * MB
    with room.taken(25 * MB):
        pass
    with pytest.raises(OutOfCapacity), room.taken(26 * MB):
        pytest.fail("it was sent")


def test_large_answers_are_sent_one_at_a_time(shared):
    """Memory that one answer is about to take still looks free to another."""
    room, shared.bytes, hold = SharedMemory(), 25 * MB + SPARE, Hold()
    inside, most, lock = 0, 0, threading.Lock()

    def send():
        nonlocal inside, most
        with room.taken(20 * MB):
            with lock:
                inside, most = inside + 1, max(most, inside + 1)
            hold.pass_through()
            with lock:
                inside -= 1

    with ThreadPoolExecutor(4) as others, hold:
        sent = [others.submit(send) for _ in range(4)]
        for _ in sent:
            hold.until_reached()
            hold.let_one_go()
        for one in sent:
            one.result(PATIENCE)
    assert most == 1
