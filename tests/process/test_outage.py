"""Where an engine is started again, and when it is given up. The clock is played: every time is given."""

from hplm.process.channel import Apart
from hplm.process.worker import PATIENCE_SECONDS, STEADY_SECONDS, Outage, Worker
from tests.support.wait import PATIENCE


def test_an_engine_starts_although_a_cleaner_has_removed_the_folder_of_its_server(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    worker = Worker("keyword", Apart(frozenset(), frozenset()))  # any module that needs nothing
    worker.start()
    try:
        assert worker.wait(PATIENCE) == 0
    finally:
        worker.end()
        worker.forget()


def test_an_engine_that_works_for_a_moment_after_each_start_is_given_up():
    outage, now = Outage.of_first(0.0, 1.0), 1.0
    while now < 1.0 + PATIENCE_SECONDS:
        outage = outage.ended(now + 2).resumed(now + 10)
        now += 10
        assert not outage.is_given_up(now)
    now += 2
    outage = outage.ended(now)
    assert outage.is_given_up(now)
    outage = outage.resumed(now + 8)  # whoever asks may meet it in such a moment only
    assert outage.is_given_up(now + 9)
    assert not outage.is_given_up(now + 9 + STEADY_SECONDS)


def test_an_end_after_a_steady_time_begins_another_outage():
    outage = Outage.of_first(0.0, 1.0)
    for turn in range(1, 50):
        ended = turn * 2 * STEADY_SECONDS
        outage = outage.ended(ended).resumed(ended + 5)
        assert not outage.is_given_up(ended + 6)


def test_an_engine_that_does_not_come_back_is_given_up_when_its_model_had_the_time_to_load_again():
    loading = 4 * PATIENCE_SECONDS
    outage = Outage.of_first(0.0, loading).ended(5000.0)
    assert not outage.is_given_up(5000.0 + 1.5 * loading)
    assert not outage.resumed(5000.0 + 1.5 * loading).is_given_up(6000.0 + 1.5 * loading)
    assert outage.is_given_up(5001.0 + 2 * loading)
