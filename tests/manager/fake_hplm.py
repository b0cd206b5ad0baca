"""Stands for `hplm` where a test is about the manager: does what the training data say, without torch. An import is real,
but for its plan, which looks for weights. A domain does what its corpus says.

`compute` computes for ever. `slow` goes on until somebody creates a file `go` in the store. `die` kills itself once, and
`die always` each time. The reader of `abort` aborts. `wrong` has faults, and `refuse` cannot be built. `same` makes no second
version. A whole version lies in the store under its name.
"""

import json
import os
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path


def main() -> int:
    words = sys.argv[1:]
    given = {name: value for name, value in pairwise(words) if name.startswith("--")}
    command, store = words[0], Path(given.get("--store") or Path(given["--state"]).parent)
    with (store / "commands").open("a") as file:
        file.write(json.dumps(words) + "\n")
    with (store / "idle").open("a") as file:
        file.write(f"{command}: {os.sched_getscheduler(0) == os.SCHED_IDLE}\n")
    if command == "tenant" or (command == "domain" and "--corpus" not in given):
        print(json.dumps({"generation": 1}))
        return 0
    if command == "import" and "--plan" in words:
        fits = (Path(given["--from"]) / "model.safetensors").exists()
        found = {"task": "classify", "labels": 3} if fits else f"{given['--from']} has no weights"
        print(json.dumps({"fit": {}, "refused": {}} | {"fit" if fits else "refused": {given["--id"]: found}}))
        return int(not fits)
    if command == "import":
        os.execv(sys.executable, [sys.executable, "-m", "hplm.cli.main", *words])
    is_domain = "domain" in words[:2]
    data = Path(given["--corpus" if is_domain else "--train"])
    says = data.read_text("utf-8")
    if "abort" in says:
        os.abort()
    if command == "check":
        faults = [f"{data}:1: no label"] if "wrong" in says else []
        facts = {"texts": says.count("\n"), "label_counts": {"x": 1, "y": 1}}
        print(json.dumps({"task": "classify", "faults": faults, "warnings": ["few texts"], "training": facts, "dev": facts}))
        return int(bool(faults))
    versions = store / "plot" / given["--name"] if is_domain else store / "tenants" / given["--id"]
    version = max([0, *(int(path.name) for path in versions.glob("*") if path.name.isdecimal())]) + 1
    working = store / "building" / (f"{versions.name}-{version}" if is_domain else f"tenants/{versions.name}")
    if "same" in says and versions.exists():
        print(json.dumps({"version": 1, "warnings": []}))
        return 0
    working.mkdir(parents=True, exist_ok=True)
    exam = {"exam": 0, "step": 5, "score": 0.5, "learned": 1.0, "loss": 1.0}
    with open(os.environ["HPLM_PROGRESS"], "a") as file:
        lines = json.dumps(exam), json.dumps({"what": "training", "done": 5, "of": 9})
        file.write("\n".join(['{"cut' + lines[0], *lines, ""]))  # the first line was cut by a full disk
    if "refuse" in says:
        print(f"hplm build: {data} cannot be learned: take other texts", file=sys.stderr)
        return 1
    if "die" in says and ("always" in says or not (working / "died").exists()):
        (working / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while "compute" in says:
        pass
    while "slow" in says and not (store / "go").exists():
        time.sleep(0.01)
    report = {"dev": {"metric": "accuracy", "accuracy": 0.5, "rows": 9, "texts": 9}, "warnings": []}
    (made := versions / f"{version}.writing").mkdir(parents=True, exist_ok=True)
    if is_domain:
        report = {**json.loads((store / "plot/root/1/meta.json").read_text()), "domain": versions.name, "version": version}
    (made / ("meta.json" if is_domain else "report.json")).write_text(json.dumps(report))
    made.rename(versions / str(version))
    for path in working.iterdir():
        path.unlink()
    working.rmdir()
    print(json.dumps({"version": version, "warnings": [], "ngrams": 9, "tokens": 99, "mb": 0.1, "behind": ["acme"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
