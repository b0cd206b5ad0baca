"""`python -m research.papers`: the papers' own figures, and a server's journal as a timeline."""

from __future__ import annotations

import sys
from functools import partial

from bench import start
from research.options import ended
from research.papers import __path__ as folders

main = partial(ended, "papers", partial(start, "python -m research.papers", "research.papers", folders))

if __name__ == "__main__":
    sys.exit(main())
