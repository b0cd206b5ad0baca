"""`kill -9` of the manager, and of its workers, at random moments: what was acknowledged is there, and is made once.

`HPLM_TEST_KILLS=30 HPLM_TEST_REAL=1` kills as often, and real commands: each build takes seconds, so that takes some minutes.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import openai
import pytest

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.server import process_group
from hplm.server.ports import free_ports
from hplm.tenants.manager import Manager
from manager.records import WAITING, Records
from manager.rights import COMMAND_LINE, Rights
from testing.random_store import random_store, random_tenants
from testing.toy import CONFIG, WORDS
from tests.support.wait import PATIENCE, eventually

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("HPLM_TEST_KILLS", "4"))
IS_REAL = bool(os.environ.get("HPLM_TEST_REAL"))
MOST_WAITING = 2  # real jobs
ROOT = Path(__file__).parents[2]


def started(folder, port):
    with (folder / "log").open("ab") as log:
        command = [sys.executable, "-m", "tests.manager.killed_manager", str(folder), str(port)]
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)


def worker_of(pid):
    """Returns the child of a process; None: it has none."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if process_group.facts(int(path.name))[1] == str(pid):
                return int(path.name)
        except (OSError, IndexError, ValueError):
            continue
    return None


def waiting(client, jobs):
    """Returns how many of the jobs have not ended."""
    return sum(client.fine_tuning.jobs.retrieve(job).status in WAITING for job in [*jobs])


def one_more(found):
    before = len(found)
    eventually(lambda: len(found) > before)


def prepare(folder):
    """Makes a store, and its registry, which real commands need."""
    store = random_store(folder / "store", CONFIG, random_tenants(1, rank=4, labels=2))
    export(store, folder / "repository", ServingOptions(dtype="fp32"))
    Manager.open(folder / "repository", folder / "state", CONFIG.name).registry.begin()


def labelled(number, rng):
    """Returns one of two files."""
    rows = [{"text": " ".join(random.Random(i).choices(WORDS, k=6)), "label": "xy"[i % 2]} for i in range(60 + number % 2)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def unread(number, rng):
    """Returns a small file or a large one, which the fake commands do not read."""
    return f"text {number}\n".encode() * rng.choice([1, 20_000])


def test_whatever_is_killed_acknowledged_work_is_done_once(tmp_path):
    rng, port = random.Random(5), free_ports(1)[0]
    if IS_REAL:
        prepare(tmp_path)
    records = Records(tmp_path / "manager/records.db")
    rights = Rights(records, tmp_path / "manager")
    secret, _ = rights.add_owner("acme", COMMAND_LINE)
    rights.set_limits("acme", {"jobs_a_day": 100_000, "tenants": 100_000}, COMMAND_LINE)
    records.close()
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=secret, max_retries=0, timeout=PATIENCE)
    files, jobs, is_over = {}, {}, threading.Event()

    def work():
        """An owner who uploads and trains again and again, and tries what was not acknowledged."""
        number = 0
        while not is_over.is_set():
            number += 1
            content = (labelled if IS_REAL else unread)(number, rng)
            try:
                while IS_REAL and waiting(client, jobs) >= MOST_WAITING:
                    time.sleep(0.1)
                file = client.files.create(file=("a.jsonl", content), purpose="fine-tune").id
                files[file] = content
                wishes = {"model": "toy", "training_file": file, "suffix": f"m{number}", "hyperparameters": {"n_epochs": 2}}
                jobs[client.fine_tuning.jobs.create(**wishes).id] = f"acme.m{number}"
            except openai.APIConnectionError:
                time.sleep(0.05)
            time.sleep(rng.random() * 0.2)

    manager, owner = started(tmp_path, port), threading.Thread(target=work)
    owner.start()
    try:
        for kill in range(KILLS):
            one_more(jobs)
            time.sleep(rng.random() * (6.0 if IS_REAL else 0.5))
            if kill % 4 == 3 and (worker := worker_of(manager.pid)) is not None:
                os.kill(worker, signal.SIGKILL)
                continue
            manager.kill()
            manager.wait()
            manager = started(tmp_path, port)
        one_more(jobs)
        is_over.set()
        owner.join()
        eventually(lambda: not waiting(client, jobs))
        made = defaultdict(set)
        for job, model in jobs.items():
            found = client.fine_tuning.jobs.retrieve(job)
            assert (found.status, found.fine_tuned_model) == ("succeeded", model), found
            assert [path.name for path in (tmp_path / "store/tenants" / model).iterdir()] == ["1"], "a version was made twice"
            made[files[found.training_file]] |= {
                path.read_bytes() for path in (tmp_path / "store/tenants" / model).glob("1/*.safetensors")
            }
        assert not IS_REAL or [len(records) for records in made.values()] == [1, 1], "a killed training has made other bytes"
        for file, content in files.items():
            assert client.files.content(file).read() == content
        known = {one.id for one in client.files.list()}
        assert {path.stem for path in (tmp_path / "manager/files").glob("*/*")} == known >= files.keys()
    finally:
        is_over.set()
        owner.join()
        manager.kill()
        manager.wait()
