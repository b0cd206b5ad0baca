"""Commands reach a running cluster through its socket."""

import socket
import threading

import pytest

from hplm.cluster.control import SOCKET, Listener, ask
from hplm.errors import HplmError


def roll(say):
    say("replica-1 is stopped")
    say("replica-1 is back")
    return {"rolled": ["replica-1"]}


def refuse(say):
    raise HplmError("pool 'all' has a single replica")


@pytest.fixture
def folder(tmp_path):
    """A folder in which a cluster answers two questions."""
    listener, ending = Listener(tmp_path), threading.Event()

    def answer():
        while not ending.is_set():
            listener.serve({"roll": roll, "refuse": refuse}, 0.05)

    thread = threading.Thread(target=answer)
    thread.start()
    yield tmp_path
    ending.set()
    thread.join()
    listener.close()


def test_what_it_says_its_answers_and_its_errors_arrive(folder):
    said = []
    assert ask(folder, "roll", said.append) == {"rolled": ["replica-1"]}
    assert said == ["replica-1 is stopped", "replica-1 is back"]
    for question, named in (("refuse", "a single replica"), ("dance", "'dance'")):
        with pytest.raises(HplmError, match=named):
            ask(folder, question, print)


def test_a_question_of_one_who_has_gone_harms_nobody(folder):
    for question in (b"roll\n", b""):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(folder / SOCKET))
            connection.sendall(question)
    assert ask(folder, "roll", lambda _: None) == {"rolled": ["replica-1"]}


def test_no_cluster_and_too_deep_a_folder_are_errors_and_the_socket_of_a_killed_one_is_replaced(tmp_path):
    with pytest.raises(HplmError, match="`hplm cluster up`"):
        ask(tmp_path, "status", print)
    with pytest.raises(HplmError, match="too long for a socket"):
        Listener(tmp_path / ("x" * 100))
    (tmp_path / SOCKET).touch()
    Listener(tmp_path).close()
    assert not (tmp_path / SOCKET).exists()
