"""What large answers find of the memory that they share with the server process."""

import threading
from types import SimpleNamespace

import pytest

from hplm.engine import memory
from hplm.engine.memory import SPARE, SharedMemory
from hplm.errors import Broken
from tests.naming import naming

MB = 1 << 20


@pytest.fixture
def shared(monkeypatch):
    """So many bytes are free; what a process once had stays its own."""
    left = SimpleNamespace(bytes=0)
    monkeypatch.setattr(memory.os, "statvfs", lambda _: SimpleNamespace(f_bavail=left.bytes, f_frsize=1))
    return left


def test_an_answer_that_finds_no_room_is_refused_and_not_lost(shared):
    room = SharedMemory()
    with room.taken(1000):  # small ones fit into what the process has
        pass
    with pytest.raises(Broken, match=naming("26 MB", "/dev/shm", 0, "--shm-size")), room.taken(25 * MB):
        pytest.fail("it was sent")


def test_what_has_held_one_large_answer_holds_the_next(shared):
    room, shared.bytes = SharedMemory(), 25 * MB + SPARE
    with room.taken(25 * MB):
        shared.bytes -= 25 * MB
    with room.taken(25 * MB):
        pass
    with pytest.raises(Broken), room.taken(26 * MB):
        pytest.fail("it was sent")


def test_large_answers_are_sent_one_at_a_time(shared):
    """What one is about to take looks free to the other."""
    room, shared.bytes, sent = SharedMemory(), 25 * MB + SPARE, threading.Event()

    def send():
        with room.taken(20 * MB):
            sent.set()

    other = threading.Thread(target=send)
    with room.taken(25 * MB):
        other.start()
        assert not sent.wait(0.05)
    other.join(60)
    assert sent.is_set()


def test_what_was_refused_has_taken_nothing(shared):
    room = SharedMemory()
    for _ in range(2):
        with pytest.raises(Broken), room.taken(30 * MB):
            pytest.fail("it was sent")
    shared.bytes = 30 * MB + SPARE
    with room.taken(30 * MB):
        pass
