"""Records keep what was written when a process is killed, and give jobs in a fair order."""

import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from dataclasses import replace

import pytest

from hplm.errors import InvalidInput
from manager.records import DAY, Event, File, Job, Owner, Records

NOW = 1_000_000.0


@pytest.fixture
def records(tmp_path):
    records = Records(tmp_path / "records.db")
    for name in ("acme", "beta"):
        records.add(Owner(name, int(NOW), {}))
    yield records
    records.close()


def job(number, owner="acme", tenant=None, **more):
    base = Job(f"job-{number}", owner, int(NOW), tenant or f"{owner}.t{number}", "toy", None, "file-1", None, {"seed": 1})
    return replace(base, **{"status": "queued", **more})


def taken(records, status="queued", step="build"):
    found = records.take(status, step, NOW)
    return found and found.id


def test_rows_come_back_as_they_were(records, tmp_path):
    made = job(1, error={"message": "no"}, wishes={"hplm": {"best": True}}, domain="law")
    file = File("file-1", "acme", "../a.jsonl", "fine-tune", ".jsonl", 5, "abc", int(NOW), 0)
    records.add(made)
    records.add(file)
    records.change(Owner, "acme", limits={"bytes": 7})
    again = Records(tmp_path / "records.db")
    assert (again.get(Job, "job-1"), again.get(File, "file-1"), again.get(Owner, "acme").limits) == (made, file, {"bytes": 7})
    again.change(Job, "job-1", error=None, version=3)
    assert (records.get(Job, "job-1").error, records.get(Job, "job-1").version) == (None, 3)
    assert (tmp_path / "records.db").stat().st_mode & 0o77 == 0


def test_what_was_written_survives_a_kill_and_a_block_that_raises_leaves_nothing(records, tmp_path):
    code = """
import os, sys
from pathlib import Path
from manager.records import Owner, Records
records = Records(Path(sys.argv[1]))
records.add(Owner("written", 1, {}))
with records.together():
    records.add(Owner("half", 1, {}))
    os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / "records.db")]).returncode == -9
    with pytest.raises(ZeroDivisionError), records.together():
        records.add(Owner("undone", 1, {}))
        with records.together():
            records.note("key-1", "acme", "nothing")
        raise ZeroDivisionError
    assert [owner.id for owner in records.owners()] == ["acme", "beta", "operators", "written"] and records.deeds() == []


def test_a_full_disk_fails_the_block_alone(records):
    (pages,) = records._base.execute("PRAGMA page_count").fetchone()
    records._base.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(sqlite3.OperationalError, match="full"), records.together():
        records.note("key-1", "acme", "nothing")
        records.note("key-1", "acme", "x" * 1_000_000)
    records._base.execute(f"PRAGMA max_page_count={2 * pages}")
    assert records.deeds() == []
    records.note("key-1", "acme", "something")
    assert [deed.action for deed in records.deeds()] == ["something"]


def test_records_of_another_format_are_refused_by_name(records, tmp_path):
    records._base.execute("PRAGMA user_version=99")
    with pytest.raises(InvalidInput, match=r"records\.db has format 99"):
        Records(tmp_path / "records.db")


def test_jobs_are_taken_by_owner_then_by_processor_time_then_by_age(records):
    """acme has sent three jobs first and used a minute today, beta an hour two days ago."""
    records.add(job(0, status="succeeded", seconds=60.0, finished=int(NOW) - 100))
    records.add(job(9, "beta", status="succeeded", seconds=3600.0, finished=int(NOW - 2 * DAY)))
    for one in (job(1), job(2, again=NOW + 60), job(3), job(4, "beta"), job(5, "beta")):
        records.add(one)
    assert [taken(records) for _ in range(5)] == ["job-4", "job-1", "job-5", "job-3", None]
    assert records.get(Job, "job-4").status == "running" and records.get(Job, "job-4").started == int(NOW)
    records.put_back()
    assert [one.status for one in records.unended()] == ["queued"] * 5 and taken(records) == "job-4"


def test_jobs_of_a_tenant_run_one_after_the_other_and_checks_beside_them(records):
    for one in (job(1, tenant="acme.t"), job(2, tenant="acme.t"), job(3, tenant="acme.t", status="validating_files")):
        records.add(one)
    assert (taken(records), taken(records)) == ("job-1", None)
    assert (taken(records, "validating_files", "check"), taken(records, "validating_files", "check")) == ("job-3", None)
    assert records.get(Job, "job-3").status == "validating_files"
    records.change(Job, "job-1", status="succeeded", step="")
    assert taken(records) == "job-2"


def test_threads_take_each_job_once(records):
    for number in range(40):
        records.add(job(number, ("acme", "beta")[number % 2]))
    found, threads = [], []
    for _ in range(4):
        threads.append(threading.Thread(target=lambda: found.extend(iter(lambda: taken(records), None))))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert len(found) == len({*found}) == 40


def test_an_event_is_told_once_and_pages_have_an_owners_rows_alone(records):
    for number, owner in enumerate(("acme", "beta", "acme", "acme")):
        records.add(job(number, owner))
    for _ in range(2):
        records.tell("job-0", "exam 1", "epoch 1", score=0.5)
    (event,) = records.events("job-0")
    assert isinstance(event, Event) and event.data == {"score": 0.5} and records.events("job-0", event.number) == []
    rows, more = records.page(Job, "acme", None, 2, True)
    assert ([row.id for row in rows], more) == (["job-3", "job-2"], True)
    rows, more = records.page(Job, "acme", "job-2", 2, True)
    assert ([row.id for row in rows], more) == (["job-0"], False)
    assert records.page(Job, "acme", "job-1", 2, True) is None, "another owner's id is as good as none"
    assert [row.id for row in records.page(Job, "acme", None, 9, False, tenant="acme.t2")[0]] == ["job-2"]


def test_a_copy_is_made_each_day_and_can_be_opened(records):
    def copied():
        with closing(Records(records.copy)) as copy:
            return [owner.id for owner in copy.owners()]

    records.back_up(0.0)
    made = records.copy.stat().st_mtime
    records.add(Owner("zeta", 1, {}))
    records.back_up(made + DAY / 2)
    assert "zeta" not in copied()
    records.back_up(made + 2 * DAY)
    assert copied() == [owner.id for owner in records.owners()] and "zeta" in copied()
    assert records.copy.stat().st_mode & 0o777 == 0o600
