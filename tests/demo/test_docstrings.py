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


def test_a_file_of_another_language_version_defines_nothing(tmp_path: Path) -> None:
    path = tmp_path / "old.py"
    path.write_text("print 'two'")
    assert read_definitions("bookshop", "old.py", path) == []
