"""Tasks for a decoder: docstrings rewritten as docstrings. What is to be written stands in the sources too."""

from __future__ import annotations

import re

from demo.documents import SHORTEST, Docstring
from demo.tasks import DefinedNames, DemoTask, Rewritten

SENTENCES = re.compile(r"(?<=[.!?])\s+(?=[A-Z`'\"])")
LONGEST_SENTENCE, LONGEST_BODY = 25, 60  # words


def summary(document: Docstring, names: DefinedNames) -> Rewritten | None:
    """Asks for the first sentence, from those behind it."""
    first, *others = SENTENCES.split(document.description)
    body = " ".join(others).split()[:LONGEST_BODY]
    return _rewritten(f"{' '.join(body)}\n\nIn one sentence:", first) if len(body) >= 2 * SHORTEST else None


def signature(document: Docstring, names: DefinedNames) -> Rewritten | None:
    """Asks for the first sentence of a function, from its name and parameters."""
    own = document.definition
    if own.kind not in ("function", "method") or own.name.startswith("_"):
        return None
    return _rewritten(
        f"def {own.name}({', '.join(own.parameters)}):\n\nIn one sentence:", SENTENCES.split(document.description)[0]
    )


def mood(document: Docstring, names: DefinedNames) -> Rewritten | None:
    """Asks for "Return it." where it says "Returns it.", and the other way round."""
    first = SENTENCES.split(document.description)[0]
    verb, _, rest = first.partition(" ")
    other = {"Return": "Returns", "Returns": "Return"}.get(verb)
    return _rewritten(f"{first}\n\nIn the other form:", f"{other} {rest}") if other else None


def _rewritten(text: str, sentence: str) -> Rewritten | None:
    words = sentence.split()
    return Rewritten(text, f" {' '.join(words)}") if 4 <= len(words) <= LONGEST_SENTENCE and sentence.endswith(".") else None


REWRITING = (
    DemoTask("summary", "stdlib", "generate", "what do these sentences say in one?", summary),
    DemoTask("signature", "learning", "generate", "what does a function with this name do?", signature),
    DemoTask("mood", "maths", "generate", "how is it said in the other form of the verb?", mood),
)
