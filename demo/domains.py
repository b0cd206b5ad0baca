"""The demo's domains: the packages that they read, and the topic of each part.

Every package named here comes with the project's own dependencies and extras, so that the demo downloads no text.
Some modules exist only in some Python versions. Missing modules are skipped.
"""

from __future__ import annotations

from dataclasses import dataclass

from demo.docstrings import STANDARD_LIBRARY, Source


@dataclass(frozen=True)
class Area:
    """A part of a domain. Its name, as in the documentation of the packages, is a label of the `-area` tenants."""

    name: str
    sources: tuple[Source, ...]


@dataclass(frozen=True)
class Domain:
    name: str
    areas: tuple[Area, ...]
    further: tuple[Source, ...] = ()  # only for a large corpus, not for tasks

    @property
    def packages(self) -> tuple[str, ...]:
        return tuple(sorted({source.package for area in self.areas for source in area.sources}))

    @property
    def further_packages(self) -> tuple[str, ...]:
        return tuple(sorted({source.package for source in self.further}))

    @property
    def package_names(self) -> frozenset[str]:
        """The words that reveal the package of a text. Each part of "google.protobuf" does."""
        return frozenset(part for package in self.packages for part in package.split("."))


def _source(package: str, parts: str = "") -> Source:
    return Source(package, tuple(parts.split()))


def _sources(packages: str) -> tuple[Source, ...]:
    return tuple(map(_source, packages.split()))


def _chapter(name: str, modules: str) -> Area:
    return Area(name, (_source(STANDARD_LIBRARY, modules),))


STDLIB = Domain(
    "stdlib",
    (
        _chapter(
            "concurrency",
            "asyncio multiprocessing threading concurrent queue sched subprocess signal selectors contextvars asyncore "
            "asynchat _threading_local _weakrefset",
        ),
        _chapter(
            "files",
            "pathlib os shutil tempfile tarfile zipfile zipapp gzip bz2 lzma _compression glob fnmatch posixpath "
            "ntpath genericpath filecmp fileinput _pyio io shelve dbm sqlite3 pickle pickletools copy",
        ),
        _chapter(
            "language",
            "ast dis inspect importlib typing types tokenize symtable enum dataclasses functools abc pkgutil runpy "
            "code codeop compileall collections contextlib weakref _collections_abc modulefinder pyclbr platform",
        ),
        _chapter("mail", "email mailbox mimetypes base64 quopri imaplib poplib smtplib smtpd nntplib"),
        _chapter(
            "network",
            "http urllib socket socketserver ssl ftplib xmlrpc wsgiref ipaddress webbrowser telnetlib cgi uuid netrc",
        ),
        _chapter(
            "numbers",
            "decimal _pydecimal fractions statistics random numbers datetime _pydatetime calendar zoneinfo heapq "
            "bisect _strptime _pylong colorsys turtle",
        ),
        _chapter(
            "testing",
            "unittest doctest pdb bdb trace profile cProfile pstats logging warnings traceback timeit pydoc",
        ),
        _chapter(
            "text",
            "xml html json csv configparser tomllib plistlib string textwrap difflib re codecs gettext locale shlex "
            "reprlib pprint argparse optparse getopt stringprep _markupbase",
        ),
    ),
    (_source(STANDARD_LIBRARY), *_sources("_pytest hypothesis packaging pip pluggy pygments setuptools")),
)

MATHS = Domain(
    "maths",
    (
        Area("arrays", (_source("numpy", "core _core lib ma matrixlib fft"),)),
        Area("functions", (_source("sympy", "functions"), _source("mpmath", "calculus libmp ctx*"))),
        Area("geometry", (_source("sympy", "geometry vector diffgeom"),)),
        Area("graphs", (_source("networkx", "algorithms classes generators"),)),
        Area("groups", (_source("sympy", "combinatorics liealgebras crypto ntheory"),)),
        Area(
            "matrices",
            (
                _source("sympy", "matrices polys/matrices tensor"),
                _source("numpy", "linalg"),
                _source("mpmath", "matrices"),
            ),
        ),
        Area("physics", (_source("sympy", "physics/mechanics physics/optics physics/quantum physics/vector"),)),
        Area("polynomials", (_source("sympy", "polys/*"), _source("numpy", "polynomial"))),
    ),
    _sources("matplotlib mpmath networkx numpy scipy sklearn sympy"),
)

LEARNING = Domain(
    "learning",
    (
        Area("compiling", (_source("torch", "fx"),)),
        Area("distributing", (_source("torch", "distributed/checkpoint distributed/elastic distributed/fsdp"),)),
        Area("generation", (_source("transformers", "generation cache_utils models/*/generation_*"),)),
        Area("images", (_source("transformers", "image_* models/*/image_processing_*"),)),
        Area("layers", (_source("torch", "nn distributions"),)),
        Area("quantizing", (_source("torch", "ao/quantization ao/nn"), _source("transformers", "quantizers"))),
        Area("tokens", (_source("transformers", "tokenization_* models/*/tokenization_*"), _source("tokenizers"))),
        Area(
            "training",
            (
                _source("torch", "optim utils/data autograd amp"),
                _source("transformers", "trainer* training_args* optimization data"),
            ),
        ),
    ),
    _sources("huggingface_hub safetensors sklearn tokenizers torch transformers"),
)

WEB = Domain(
    "web",
    (
        Area("aiohttp", (_source("aiohttp"), _source("yarl"), _source("multidict"))),
        Area("click", (_source("click"), _source("typer", "[a-z]*"))),
        Area("gevent", (_source("gevent"), _source("geventhttpclient"))),
        Area("grpc", (_source("grpc"),)),
        Area("httpx", (_source("httpx2"), _source("httpcore2"), _source("anyio"))),
        Area("huggingface_hub", (_source("huggingface_hub"),)),
        Area("protobuf", (_source("google.protobuf"),)),
        Area("urllib3", (_source("urllib3"),)),
    ),
    _sources(
        "aiohttp anyio click flask fsspec gevent geventhttpclient google.protobuf grpc httpcore2 httpx2 huggingface_hub jinja2 "
        "locust multidict pydantic requests rich tritonclient typer urllib3 werkzeug yarl"
    ),
)

DOMAINS = (STDLIB, MATHS, LEARNING, WEB)
