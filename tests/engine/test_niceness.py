"""Batches give way to what is short, as far as the system lets them."""

from hplm.engine.niceness import lower_priority
from testing.toy import WORDS
from tests.engine.asker import Asker


def test_who_gives_way_already_is_not_brought_forward(monkeypatch):
    given = []
    monkeypatch.setattr("os.getpriority", lambda *_: 10)
    monkeypatch.setattr("os.setpriority", lambda *call: given.append(call[-1]))
    lower_priority()
    assert given == [10]


def test_a_system_that_lets_nobody_give_way_costs_no_answer(toy, monkeypatch, caplog):
    def denied(*_):
        raise PermissionError(13, "not permitted here")

    monkeypatch.setattr("os.setpriority", denied)
    asker = Asker(toy.folder)
    assert asker.wait(asker.ask("acme", [WORDS[0]]))[0].labels
    assert "not permitted here" in caplog.text
    asker.close()
