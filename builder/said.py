"""What a command says beside its result: lines on stderr, above the progress bars."""

from __future__ import annotations

import sys

from tqdm import tqdm


def say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)
    sys.stderr.flush()
