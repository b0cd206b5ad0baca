"""Runs jobs: each step is a command as a child process, and the same command goes on after any kill.

Checks, and as many jobs as are allowed, have a thread each. A pass each minute mends what a kill may have left.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hplm.errors import HplmError
from hplm.registry.store import Away, Busy
from hplm.server import process_group
from hplm.threads import repeat
from hplm_openai.errors import Refused
from manager.children import PROGRESS, Child, Manner
from manager.jobs import DATA_FILES, Jobs
from manager.models import Models
from manager.records import DAY, Job, Records
from manager.rights import Rights
from manager.uploads import Uploads
from manager.work import Work

log = logging.getLogger(__name__)
LOOK_SECONDS = 0.1
KILL_SECONDS = 10.0  # after SIGTERM
MINUTE = 60.0
MOST_DEATHS = 3  # by signals, without a further exam
SPARE_BYTES = 50_000_000  # a disk with less is full
LOCK_SECONDS = 5.0
CANCEL_SECONDS = 30.0  # that a request waits for the end


class Stopped(Exception):
    """The manager ends; the job goes on with the next one."""


class Cancelled(Exception):
    """The owner wants the job to end."""


class Later(Exception):
    """The step cannot be done now. The same command goes on after a while."""

    def __init__(self, seconds: float, why: str) -> None:
        super().__init__(why)
        self.seconds = seconds


class Failed(Exception):
    """The job has failed for a reason that its owner can read."""

    def __init__(self, message: str, code: str = "job_failed", param: str | None = None) -> None:
        super().__init__(message)
        self.error = {"code": code, "message": message, "param": param}


class Running:
    def __init__(
        self, records: Records, rights: Rights, uploads: Uploads, models: Models, jobs: Jobs, manner: Manner, at_once: int = 1
    ) -> None:
        self._records, self._rights, self._uploads, self._models, self._jobs = records, rights, uploads, models, jobs
        self._manner, self._at_once = manner, at_once
        self._ending = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Takes up what the process before has left, and begins."""
        self._uploads.remove_unknown()
        self._records.put_back()
        self._threads = [repeat(self._check_next, "checks"), repeat(self._mend, "mending")]
        self._threads += [repeat(self._build_next, "jobs") for _ in range(self._at_once)]

    def stop(self) -> None:
        """Ends all children. Their jobs go on with the next start."""
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def cancel(self, owner: str, id: str, who: str) -> Job:
        """Ends a job, unless it has begun to change what is served. Returns it when it has ended, or after a while."""
        with self._records.together():
            job = self._jobs.found(owner, id)
            if job.ended or job.step == "publish":
                reason = f"has ended ({job.status})" if job.ended else "is being published"
                raise Refused(409, f"the job {id!r} {reason}: delete or roll back its model instead", param="id")
            self._records.note(who, owner, "job cancel", job=id)
            self._records.change(Job, id, cancelled=int(time.time()))
            if not job.step:
                self._end(job, "cancelled", "The job has been cancelled")
        until = time.monotonic() + CANCEL_SECONDS
        while not (job := self._jobs.found(owner, id)).ended and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        return job

    def _check_next(self) -> bool:
        return self._next("validating_files", "check", self._check)

    def _build_next(self) -> bool:
        return self._next("queued", "build", self._build)

    def _next(self, status: str, step: str, do: Callable[[Job], None]) -> bool:
        """Does the next job that waits, or waits a moment. Returns whether to go on."""
        if (job := self._records.take(status, step, time.time())) is None:
            return not self._ending.wait(LOOK_SECONDS)
        try:
            do(job)
        except Stopped:
            return False
        except Cancelled:
            self._end(job, "cancelled", "The job has been cancelled")
        except Failed as failure:
            self._end(job, "failed", str(failure), failure.error)
        except Later as later:
            self._put_back(job, later.seconds, str(later))
        except (Away, Busy, OSError) as error:
            self._put_back(job, MINUTE, str(error))
        except Exception:
            log.exception("the job %s failed", job.id)
            said = "the manager failed: its log says where"
            self._end(job, "failed", said, {"code": "internal", "message": said, "param": None})
        return not self._ending.is_set()

    def _check(self, job: Job) -> None:
        work = self._jobs.work(job)
        self._records.tell(job.id, "validating", f"Validating {work.what}")
        self._count_lines(work)
        work.begin()
        found = dict[str, Any]()
        if words := work.checking():
            child = self._run(job, words)
            found = child.result() or {}
            if faults := [work.readable(fault) for fault in work.faults(found)]:
                for number, fault in enumerate(faults):
                    self._records.tell(job.id, f"fault {number}", fault, "error")
                raise Failed("; ".join(faults[:3]), *work.fault)
            if child.code or not found:
                raise self._failed(work, child)
        checked = work.checked(found)
        for number, warning in enumerate(checked.warnings):
            self._records.tell(job.id, f"warning {number}", work.readable(warning), "warn")
        if checked.labels > (most := self._rights.limit(job.owner, "labels")):
            raise Failed(f"there are {checked.labels:,} labels, and {most:,} are your limit", *work.fault)
        with self._records.together():
            if self._current(job).cancelled:  # since its command has ended
                raise Cancelled
            self._records.tell(job.id, "validated", f"Files validated, moving job to queued state: {checked.said}")
            self._change(job, status="queued", step="", task=checked.task, tries=0)

    def _count_lines(self, work: Work) -> None:
        most = self._rights.limit(work.job.owner, "lines")
        for name, path in work.data.items():
            if path.suffix == ".parquet":
                continue
            with path.open("rb") as file:
                lines = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
            if lines > most:
                raise Failed(f"'{name}' has {lines:,} lines, and {most:,} are your limit", "invalid_training_file", name)

    def _build(self, job: Job) -> None:
        """Builds and publishes. What is done already is done once: the records and the store say it."""
        newest = (self._jobs.work(job).versions() or [0])[-1]
        if job.version_before is None:
            job = self._change(job, version_before=newest)
        work = self._jobs.work(job)
        if job.version is None:
            self._records.tell(job.id, "started", "Fine-tuning job started")
            if newest == job.version_before:  # else a kill came between the version and its row
                newest = self._built(work)
            job = self._change(job, version=newest, tries=0)
        version = job.version or 0
        if job.served_as is None:
            name, why = work.chosen_name(version)
            job = self._change(job, served_as=name)
            more = "; promote it, or ask it beside the other" * (name != job.tenant)
            self._records.tell(job.id, "name", f"Version {version} is served as {name}: {why}{more}")
        with self._records.together():
            if self._current(job).cancelled:
                raise Cancelled
            job = self._change(job, step="publish")
        name = job.served_as or job.tenant
        if words := work.publishing(version, name):
            child = self._run(job, words)
            if child.code:
                raise self._failed(work, child)
        work.published(version, name)
        self._end(job, "succeeded", f"The job has successfully completed: {work.ended(name)}")

    def _built(self, work: Work) -> int:
        job = work.job
        with self._held(work) as is_free:
            if not is_free:
                raise Later(LOCK_SECONDS, "another process builds a version of this model")
        work.begin()
        child = self._run(job, work.building(self._manner.device))
        found = child.result()
        if child.code or found is None:
            raise self._failed(work, child)
        for number, (level, said) in enumerate(work.built(found)):
            self._records.tell(job.id, f"built {number}", work.readable(said), level)
        return int(found["version"])

    def _run(self, job: Job, words: list[object]) -> Child:
        """Runs a step's command to its end. Ends it if the job is cancelled, or the manager ends."""
        folder = self._jobs.work(job).folder
        more = {"seconds": self._seconds_left(job), "is_awaited": job.step != "build", "who": job.wishes["who"]}
        manner = replace(self._manner, **more)
        child, asked_at, told = Child(words, folder, manner), 0.0, 0
        try:
            while not child.look():
                if self._ending.is_set() or (job.step != "publish" and self._current(job).cancelled):
                    if not asked_at:
                        asked_at = time.monotonic()
                        child.ask_to_end()
                    elif time.monotonic() - asked_at > KILL_SECONDS:
                        child.ask_to_end(signal.SIGKILL)
                told = self._tell_exams(job, folder / PROGRESS, told)
                time.sleep(LOOK_SECONDS)
        finally:
            child.ask_to_end(signal.SIGKILL)  # if something was raised here
        self._tell_exams(job, folder / PROGRESS, told)
        self._change(job, seconds=self._current(job).seconds + child.seconds)
        if child.code and self._ending.is_set():
            raise Stopped
        if child.code and asked_at:
            raise Cancelled
        if child.code == -signal.SIGXCPU:
            raise Failed("your jobs have computed for all of your minutes in 24 hours: try again later, or less data", "limit")
        if child.code and child.code < 0:
            self._died(job, child.code)
        return child

    def _seconds_left(self, job: Job) -> int:
        """Returns the processor time that is left to an owner's jobs today. To publish always has some."""
        most = 60 * self._rights.limit(job.owner, "minutes_a_day")
        return 1 + max(60 * (job.step == "publish"), round(most - self._records.seconds_since(job.owner, time.time() - DAY)))

    def _died(self, job: Job, code: int) -> None:
        """Raises after a death of a step by a signal: it is tried again, a few times without a further exam.

        The reader of Parquet may abort at a damaged file.
        """
        files = self._jobs.work(job).data.values()
        if code == -signal.SIGABRT and any(file.suffix == ".parquet" for file in files):
            raise Failed("a Parquet file is damaged: write it again, or as JSON lines", "invalid_training_file", DATA_FILES[0])
        exams = sum(event.mark.startswith("exam ") for event in self._records.events(job.id))
        tries = 1 if exams > job.exams else self._current(job).tries + 1
        self._change(job, tries=tries, exams=exams)
        why = process_group.reason(code)
        if tries >= MOST_DEATHS:
            raise Failed(f"it was ended by {why} {tries} times, perhaps for want of memory or time: try less data", "killed")
        raise Later(1.0, f"the step was ended by {why}")

    def _failed(self, work: Work, child: Child) -> Exception:
        """Returns what becomes of a job whose command has refused: it waits if the disk is full or the registry away."""
        sentence, base = work.readable(child.sentence()), work.base
        with suppress(FileNotFoundError):
            if shutil.disk_usage(base.store).free < SPARE_BYTES:
                return Later(MINUTE, sentence)
        try:
            base.manager.registry.pointer()
        except (HplmError, OSError):
            return Later(MINUTE, sentence)
        return Failed(sentence)

    def _put_back(self, job: Job, seconds: float, why: str) -> None:
        status = "validating_files" if job.status == "validating_files" else "queued"
        with self._records.together():
            if self._current(job).cancelled:
                return self._end(job, "cancelled", "The job has been cancelled")
            self._change(job, status=status, step="", again=time.time() + seconds)
            said = f"It goes on in {seconds:g} s: {self._jobs.work(job).readable(why)}"
            self._records.tell(job.id, f"later {int(time.time())}", said, "warn")

    def _end(self, job: Job, status: str, message: str, error: dict[str, Any] | None = None) -> None:
        work = self._jobs.work(self._current(job))
        if status != "succeeded":
            self._remove_remains(work)
        work.end()
        with self._records.together():
            self._change(job, status=status, step="", finished=int(time.time()), error=error)
            self._records.tell(job.id, "ended", message, "error" if status == "failed" else "info")

    def _change(self, job: Job, **changed: Any) -> Job:
        self._records.change(Job, job.id, **changed)
        return self._current(job)

    def _current(self, job: Job) -> Job:
        found = self._records.get(Job, job.id)
        assert found is not None, "jobs are not removed"
        return found

    def _tell_exams(self, job: Job, path: Path, begin: int) -> int:
        """Tells the exams of whole lines behind `begin`. Returns where they end."""
        if job.step != "build" or not path.exists() or path.stat().st_size <= begin:
            return begin
        with path.open("rb") as file:
            file.seek(begin)
            whole = file.read().rpartition(b"\n")[0]
        for line in whole.splitlines():
            try:
                found = json.loads(line)
            except ValueError:  # a full disk has cut a line, and the next one follows it
                continue
            if "exam" in found:
                number, score = found.pop("exam"), found["score"]
                said = f"Exam {number}: step {found['step']}, training loss {found['learned']:.3f}, dev score {score:.3f}"
                self._records.tell(job.id, f"exam {number}", said, **found)
        return begin + len(whole) + bool(whole)

    @contextmanager
    def _held(self, work: Work) -> Iterator[bool]:
        """Holds the folder in which the builder works, as it does itself. Yields False if somebody else holds it."""
        try:
            handle = os.open(work.held(), os.O_RDONLY)
        except FileNotFoundError:
            yield True
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield True
        except BlockingIOError:
            yield False
        finally:
            os.close(handle)

    def _remove_remains(self, work: Work) -> None:
        """Removes what a job has made that ended before its version: it would be in the way of a deletion."""
        if work.job.version is None and work.job.version_before is not None:
            with self._held(work) as is_free:
                for path in work.remains() if is_free else ():
                    shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def _mend(self) -> bool:
        try:
            self._uploads.sweep()
            self._models.mend()
            self._records.back_up(time.time())
        except (HplmError, OSError, sqlite3.OperationalError) as error:  # the last: a full disk
            log.warning("keys, files and the copy of the records are looked at again in a minute: %s", error)
        return not self._ending.wait(MINUTE)
