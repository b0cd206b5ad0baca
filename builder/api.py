"""Builds a store from Python: the functions of the commands, with their options. Each prints what its command prints.

They return what `--json` prints; `import_` also the exit status, which is 3 if a folder was refused. Paths are `Path`s, and a
wrong input raises `HplmError`.
"""

from builder.cli.build import Table, Training, Vectors, domain, root, tenant
from builder.cli.evaluate import evaluate
from builder.cli.import_ import OneFolder, import_
from builder.importing.options import Matching
from builder.tasks.columns import Columns

__all__ = [
    "Columns",
    "Matching",
    "OneFolder",
    "Table",
    "Training",
    "Vectors",
    "domain",
    "evaluate",
    "import_",
    "root",
    "tenant",
]
