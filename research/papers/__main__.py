"""`python -m research.papers`: the papers' own figures, and a server's journal as a timeline."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench import start
from research.options import ended
from research.papers import __path__ as folders


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    return ended("papers", lambda: start("python -m research.papers", "research.papers", folders, words))


if __name__ == "__main__":
    sys.exit(main())
