"""The compute thread lowers its priority, if the system allows it."""

from hplm.engine.niceness import lower_priority
from testing.toy import WORDS
from tests.engine.asker import Asker


def test_a_lower_priority_is_never_raised(monkeypatch):
    given = []
    monkeypatch.setattr("os.getpriority", lambda *_: 10)
    monkeypatch.setattr("os.setpriority", lambda *call: given.append(call[-1]))
    lower_priority()
    assert given == [10]


def test_a_system_that_forbids_a_lower_priority_still_answers(toy, monkeypatch, caplog):
    def denied(*_):
        raise PermissionError(13, "not permitted here")

    monkeypatch.setattr("os.setpriority", denied)
    asker = Asker(toy.folder)
    assert asker.wait(asker.ask("acme", [WORDS[0]]))[0].labels
    assert "not permitted here" in caplog.text
    asker.close()
