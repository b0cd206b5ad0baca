from __future__ import annotations

from pathlib import Path

import pytest

from demo.docstrings import Definition, Source, read_definitions
from hplm.errors import HplmError
from tests.support.message import mentioning

MODULE = '''"""What this module is for."""
raise RuntimeError("reading a source file must not run it")

if True:
    def conditional(): "Behind a condition."

class Shelf(Base):
    """Holds books."""

    def __init__(self, width, *, depth=1): ...

    @property
    def width(self):
        """How wide it is."""
        return self._width

    @functools.lru_cache(maxsize=8)
    def find(self, title, /, *rest, exact=False, **options):
        """Look for a book."""
        def inner():
            yield 1
        for book in self.books:
            if book.title == title:
                return book

    def burn(self):
        """Only raises."""
        raise NotImplementedError

    async def read(self):
        """Reads aloud, page by page."""
        with self.open():
            while True:
                yield self.page()

    def close(self):
        """Ends without a value."""
        return None
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "bookshop"
    for name in ("shelf.py", "tests/test_shelf.py", "till/coins.py", "till/__init__.py", "__init__.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(MODULE)
    return folder


@pytest.fixture
def definitions(package: Path) -> dict[str, Definition]:
    return {one.qualified_name: one for one in read_definitions("bookshop", "shelf.py", package / "shelf.py")}


def test_a_source_lists_its_files_in_order_and_without_tests(package: Path) -> None:
    assert [name for name, _ in Source("bookshop").files()] == [
        "__init__.py",
        "shelf.py",
        "till/__init__.py",
        "till/coins.py",
    ]
    assert [name for name, _ in Source("bookshop", ("shelf", "till")).files()] == [
        "shelf.py",
        "till/__init__.py",
        "till/coins.py",
    ]
    assert Source("bookshop.till").files() == [
        ("__init__.py", package / "till/__init__.py"),
        ("coins.py", package / "till/coins.py"),
    ]


def test_a_missing_package_is_named() -> None:
    with pytest.raises(HplmError, match=mentioning("'no_such_package_of_ours'", "pip install")):
        Source("no_such_package_of_ours").files()


def test_every_kind_of_definition_is_found_in_order(definitions: dict[str, Definition]) -> None:
    assert [(one.qualified_name, one.kind) for one in definitions.values()] == [
        ("", "module"),
        ("conditional", "function"),
        ("Shelf", "class"),
        ("Shelf.__init__", "method"),
        ("Shelf.width", "method"),
        ("Shelf.find", "method"),
        ("Shelf.burn", "method"),
        ("Shelf.read", "method"),
        ("Shelf.close", "method"),
    ]
    assert definitions[""].docstring == "What this module is for."
    assert definitions["Shelf.__init__"].docstring == ""
    assert definitions["Shelf.find"].name == "find"


def test_parameters_are_those_of_the_signature_without_self(definitions: dict[str, Definition]) -> None:
    assert definitions["Shelf.find"].parameters == ("title", "rest", "exact", "options")
    assert definitions["Shelf"].parameters == ("width", "depth")


def test_decorators_are_named_without_their_arguments(definitions: dict[str, Definition]) -> None:
    assert definitions["Shelf.width"].decorators == ("property",)
    assert definitions["Shelf.find"].decorators == ("functools.lru_cache",)


def test_a_return_in_an_inner_function_does_not_count(definitions: dict[str, Definition]) -> None:
    find, read, close = (definitions[f"Shelf.{name}"] for name in ("find", "read", "close"))
    assert (find.returns_value, find.is_generator, find.is_async) == (True, False, False)
    assert (read.returns_value, read.is_generator, read.is_async) == (False, True, True)
    assert not close.returns_value


def test_a_function_that_only_raises_is_a_stub(definitions: dict[str, Definition]) -> None:
    assert {name for name, one in definitions.items() if one.is_stub} == {"conditional", "Shelf.__init__", "Shelf.burn"}


def test_a_file_of_another_language_version_defines_nothing(tmp_path: Path) -> None:
    path = tmp_path / "old.py"
    path.write_text("print 'two'")
    assert read_definitions("bookshop", "old.py", path) == []
