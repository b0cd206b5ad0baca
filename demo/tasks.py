"""The demo's tenants: the question of each about a docstring. The answers are read from the code."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from demo.docstrings import Definition
from demo.documents import LONGEST, SHORTEST, Docstring, bare

LEAST_TAGGED = 0.08  # share of the words of a paragraph
LONGEST_TAGGED = 40  # words; a tagged text has an answer for each word
# In a sentence, these words and parameters of the same name look alike.
EVERYDAY = re.compile("a|an|and|as|at|by|for|from|if|in|is|it|name|new|not|of|on|or|other|the|this|to|type|value|with")
KIND_WORDS = ("class", "Class", "function", "Function", "method", "Method")
NOTHING = re.compile(r"(?!)")
BUILTIN_TYPES = {"bool", "bytes", "dict", "float", "int", "list", "None", "str", "tuple"}
MARKED = re.compile(r"[`*(\[]")
CODE_NAME = re.compile(r"[A-Za-z]\w*(_\w|[a-z][A-Z])\w*")  # at least two words in snake case or camel case


@dataclass(frozen=True)
class Classified:
    text: str
    label: str

    @property
    def labels(self) -> tuple[str, ...]:
        return (self.label,)


@dataclass(frozen=True)
class Tagged:
    tokens: tuple[str, ...]
    tags: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.tokens)

    @property
    def labels(self) -> tuple[str, ...]:
        return self.tags


@dataclass(frozen=True)
class Rewritten:
    text: str
    target: str

    @property
    def labels(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True)
class Pair:
    text: str
    positive: str

    @property
    def labels(self) -> tuple[str, ...]:
        return ()


Example = Classified | Tagged | Rewritten | Pair


@dataclass(frozen=True)
class DefinedNames:
    """The names that the sources of a domain define."""

    packages: frozenset[str]
    classes: set[str] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)

    def add(self, definition: Definition) -> None:
        if definition.kind == "class":
            self.classes.add(definition.name)
        elif CODE_NAME.fullmatch(definition.name):
            self.functions.add(definition.name)


@dataclass(frozen=True)
class DemoTask:
    """A question about documents. `example` returns a document with its answer, or None if the question makes no sense."""

    tenant: str
    domain: str
    task: str
    question: str
    example: Callable[[Docstring, DefinedNames], Example | None]


def area(document: Docstring, names: DefinedNames) -> Classified | None:
    told = {*names.packages, document.definition.module.split("/")[0].removesuffix(".py")}
    return _classified(document.text, _any_of(tuple(sorted(told)), re.IGNORECASE), document.area)


def kind(document: Docstring, names: DefinedNames) -> Classified | None:
    definition = document.definition
    if definition.kind == "module" or definition.is_property:
        return None
    return _classified(document.description, _any_of((definition.name, *KIND_WORDS)), definition.kind)


def returns(document: Docstring, names: DefinedNames) -> Classified | None:
    definition = document.definition
    if definition.returns_value is None or definition.is_property or definition.name.startswith("__"):
        return None
    return _classified(document.description, NOTHING, "value" if definition.returns_value else "nothing")


def parameters(document: Docstring, names: DefinedNames) -> Tagged | None:
    return _tagged(document, lambda word: "O")


def code_names(document: Docstring, names: DefinedNames) -> Tagged | None:
    def tag(word: str) -> str:
        name = bare(word).rpartition(".")[2]
        if name in BUILTIN_TYPES or (name in names.classes and (CODE_NAME.fullmatch(name) or MARKED.match(word))):
            return "TYPE"
        return "FUNCTION" if name in names.functions else "O"

    return _tagged(document, tag)


def _classified(text: str, tells: re.Pattern[str], label: str) -> Classified | None:
    """Returns the text without words that reveal the label, or None if too few words remain."""
    kept = [word for word in text.split() if not tells.search(word)][:LONGEST]
    return Classified(" ".join(kept), label) if len(kept) >= SHORTEST else None


@lru_cache(maxsize=4096)
def _any_of(names: tuple[str, ...], flags: int = 0) -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b", flags)


def _tagged(document: Docstring, tag: Callable[[str], str]) -> Tagged | None:
    """Returns the paragraphs with enough tagged words, without the markup that would reveal code.

    The function's own parameters have the tag PARAM, and other words that of `tag`.
    """
    own = document.definition.parameters

    def tag_of(word: str) -> str:
        is_own = bare(word) in own and (not EVERYDAY.fullmatch(bare(word)) or MARKED.search(word))
        return "PARAM" if is_own else tag(word)

    pairs: list[tuple[str, str]] = []
    for paragraph in document.paragraphs:
        tagged = [(bare(word), tag_of(word)) for word in paragraph.split() if bare(word)]
        if sum(found != "O" for _, found in tagged) >= LEAST_TAGGED * len(tagged):
            pairs += tagged
    tokens = tuple(word for word, _ in pairs[:LONGEST_TAGGED])
    tags = tuple(found for _, found in pairs[:LONGEST_TAGGED])
    return Tagged(tokens, tags) if len(tokens) >= SHORTEST and set(tags) != {"O"} else None


TASKS = (
    DemoTask("stdlib-area", "stdlib", "classify", "which chapter of the standard library is it from?", area),
    DemoTask("stdlib-returns", "stdlib", "classify", "does the function return something?", returns),
    DemoTask("maths-area", "maths", "classify", "which field of mathematics is it about?", area),
    DemoTask("maths-parameters", "maths", "tag", "which words are parameters of the function?", parameters),
    DemoTask("learning-area", "learning", "classify", "which part of machine learning is it about?", area),
    DemoTask("learning-names", "learning", "tag", "which words name classes, functions or parameters?", code_names),
    DemoTask("web-library", "web", "classify", "which library is it from?", area),
    DemoTask("web-kind", "web", "classify", "does it describe a class, a function or a method?", kind),
)
