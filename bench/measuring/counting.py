"""Measures the speed and the peak memory of counting n-grams, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from builder.tables.corpus import Corpus
from builder.tables.counting import count_ngrams
from hplm.errors import HplmError
from hplm.model.windows import Window
from hplm.plot.keys import KeySpace


def count_apart(corpus: Path, space: KeySpace, folder: Path) -> dict[str, float]:
    numbers = [str(space.vocabulary), str(space.window.n)]
    command = [sys.executable, "-m", "bench.measuring.counting", str(corpus), *numbers, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=3600)
    if done.returncode:
        raise HplmError(f"the process that counts n-grams ended with code {done.returncode}: see its messages above")
    return json.loads(done.stdout)


def measure_counting(corpus: Corpus, space: KeySpace, folder: Path) -> dict[str, float]:
    start = time.perf_counter()
    count_ngrams(corpus, space, folder)
    taken = time.perf_counter() - start
    return {"count_tokens_per_s": round(corpus.tokens / taken), "count_peak_mb": round(_peak_bytes() / 1e6, 1)}


def _peak_bytes() -> int:
    """Returns this program's peak memory. `getrusage` would include the memory of the process that started it."""
    status = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) * 1024


if __name__ == "__main__":
    corpus, vocabulary, window, folder = sys.argv[1:]
    space = KeySpace(int(vocabulary), Window(int(window)))
    print(json.dumps(measure_counting(Corpus(Path(corpus)), space, Path(folder))))
