"""What a command says beside its result: lines on stderr, above the progress bars."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tqdm import tqdm


def say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()


def say_costs(what: str, seconds: float, size: str, folder: Path) -> None:
    """Says how long a step takes, and its room on the disk of a folder. `size`: in GB."""
    free = shutil.disk_usage(folder).free
    say(f"{what}: takes about {duration(seconds)}, and {size} GB on the disk, which has {free / 1e9:,.2f} GB free")


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 6000 else f"{seconds / 3600:.1f} hours"
