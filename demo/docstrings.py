"""Reads docstrings from source files, with facts about the code that they describe. Files are parsed, never imported."""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path

from hplm.errors import HplmError

STANDARD_LIBRARY = "stdlib"
# Skipped: tests, which do not document an interface, and packages in the standard library's folder.
SKIPPED_FOLDERS = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "testing", "tests"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """Source files of one package. `under` names modules and folders of it (patterns); empty: all."""

    package: str
    under: tuple[str, ...] = ()

    def files(self) -> list[tuple[str, Path]]:
        """Returns the name of each file relative to the package, and its path, in the same order on every machine."""
        root = package_folder(self.package)
        patterns = [pattern for part in self.under for pattern in (f"{part}.py", f"{part}/**/*.py")] or ["**/*.py"]
        found = {path.relative_to(root): path for pattern in patterns for path in root.glob(pattern)}
        kept = {name: path for name, path in found.items() if not SKIPPED_FOLDERS.intersection(name.parts[:-1])}
        return sorted((name.as_posix(), path) for name, path in kept.items())


@dataclass(frozen=True)
class Definition:
    """The facts about a module, class, function or method that its source contains."""

    package: str
    module: str  # the file, relative to the package: "asyncio/tasks.py"
    qualified_name: str  # within the module; empty for the module itself
    kind: str  # "module", "class", "function" or "method"
    docstring: str  # empty: none
    parameters: tuple[str, ...] = ()  # a class has those of its __init__; never self or cls
    is_property: bool = False
    returns_value: bool | None = None  # None: not known of generators, and of stubs, which subclasses implement

    @property
    def name(self) -> str:
        return self.qualified_name.rpartition(".")[2]


def package_folder(package: str) -> Path:
    if package == STANDARD_LIBRARY:
        return Path(sysconfig.get_path("stdlib"))
    top, *inner = package.split(".")
    spec = PathFinder.find_spec(top)
    for location in (spec.submodule_search_locations or ()) if spec else ():
        folder = Path(location, *inner)
        if folder.is_dir():
            return folder
    raise HplmError(
        f"package '{package}', whose docstrings the demo reads, is not installed here: "
        f"run `pip install -c constraints.txt '.[build,client,embedded,demo]'`"
    )


def read_definitions(package: str, module: str, path: Path) -> list[Definition]:
    """Returns all definitions of a file, in its order. There are none if this Python cannot parse the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escape sequences in strings of other packages
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # templates, and packages that carry files for other Pythons
        return []
    whole = Definition(package, module, "", "module", ast.get_docstring(tree) or "")
    return [whole, *_definitions_in(tree.body, whole)]


def _definitions_in(body: Iterable[ast.stmt], outer: Definition) -> Iterator[Definition]:
    for node in body:
        if isinstance(node, ast.ClassDef | Function):
            found = _definition(node, outer)
            yield found
            if isinstance(node, ast.ClassDef):
                yield from _definitions_in(node.body, found)
        elif isinstance(node, ast.If | ast.Try):  # definitions that depend on a version or a platform
            handlers = [item for handler in getattr(node, "handlers", ()) for item in handler.body]
            yield from _definitions_in([*node.body, *handlers, *node.orelse], outer)


def _definition(node: ast.ClassDef | Function, outer: Definition) -> Definition:
    name, docstring = f"{outer.qualified_name}.{node.name}".lstrip("."), ast.get_docstring(node) or ""
    found = Definition(outer.package, outer.module, name, "class", docstring)
    if isinstance(node, ast.ClassDef):
        inits = (item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__")
        return replace(found, parameters=next(map(_parameters, inits), ()))
    return replace(
        found,
        kind="function" if outer.kind == "module" else "method",
        parameters=_parameters(node),
        is_property=any(isinstance(item, ast.Name) and item.id == "property" for item in node.decorator_list),
        returns_value=_returns_value(node),
    )


def _returns_value(function: Function) -> bool | None:
    statements = list(_statements(function.body))
    plain = [item for item in function.body if not isinstance(item, ast.Pass | ast.Raise)]
    is_stub = all(isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) for item in plain)
    if is_stub or any(isinstance(getattr(item, "value", None), ast.Yield | ast.YieldFrom) for item in statements):
        return None
    values = (item.value for item in statements if isinstance(item, ast.Return))
    return any(not (value is None or (isinstance(value, ast.Constant) and value.value is None)) for value in values)


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yields a body's statements at every depth, without those of functions and classes inside it.

    It skips expressions, because visiting them would take longer than parsing.
    """
    for node in body:
        yield node
        if not isinstance(node, ast.ClassDef | Function):
            for field in ("body", "orelse", "finalbody", "handlers", "cases"):
                yield from _statements(getattr(node, field, ()))


def _parameters(function: Function) -> tuple[str, ...]:
    listed = function.args
    every = [*listed.posonlyargs, *listed.args, listed.vararg, *listed.kwonlyargs, listed.kwarg]
    return tuple(item.arg for item in every if item is not None and item.arg not in {"self", "cls"})
