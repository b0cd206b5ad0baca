"""The demo's domains: the packages that they read, and the topic of each part.

Every package named here comes with the project's own dependencies and extras, so that the demo downloads no text.
Some modules exist only in some Python versions. Missing modules are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from demo.docstrings import STANDARD_LIBRARY, Source


@dataclass(frozen=True)
class Domain:
    """`areas`: the sources of each part. Its name, as in the packages' documentation, is a label of the `-area` tenants."""

    name: str
    areas: Mapping[str, tuple[Source, ...]]
    further: tuple[Source, ...] = ()  # only for a large corpus, not for tasks

    @property
    def packages(self) -> tuple[str, ...]:
        return tuple(sorted({source.package for sources in self.areas.values() for source in sources}))

    @property
    def package_names(self) -> frozenset[str]:
        """The words that reveal the package of a text. Each part of "google.protobuf" does."""
        return frozenset(part for package in self.packages for part in package.split("."))


def _domain(name: str, areas: Mapping[str, Mapping[str, str]], further: str) -> Domain:
    """`areas`: the packages of each area, and of each package the modules, or all of them. `further`: whole packages."""
    sources = {
        area: tuple(Source(package, tuple(modules.split())) for package, modules in packages.items())
        for area, packages in areas.items()
    }
    return Domain(name, sources, tuple(map(Source, further.split())))


CHAPTERS = {
    "concurrency": "asyncio multiprocessing threading concurrent queue sched subprocess signal selectors contextvars asyncore "
    "asynchat _threading_local _weakrefset",
    "files": "pathlib os shutil tempfile tarfile zipfile zipapp gzip bz2 lzma _compression glob fnmatch posixpath "
    "ntpath genericpath filecmp fileinput _pyio io shelve dbm sqlite3 pickle pickletools copy",
    "language": "ast dis inspect importlib typing types tokenize symtable enum dataclasses functools abc pkgutil runpy "
    "code codeop compileall collections contextlib weakref _collections_abc modulefinder pyclbr platform",
    "mail": "email mailbox mimetypes base64 quopri imaplib poplib smtplib smtpd nntplib",
    "network": "http urllib socket socketserver ssl ftplib xmlrpc wsgiref ipaddress webbrowser telnetlib cgi uuid netrc",
    "numbers": "decimal _pydecimal fractions statistics random numbers datetime _pydatetime calendar zoneinfo heapq "
    "bisect _strptime _pylong colorsys turtle",
    "testing": "unittest doctest pdb bdb trace profile cProfile pstats logging warnings traceback timeit pydoc",
    "text": "xml html json csv configparser tomllib plistlib string textwrap difflib re codecs gettext locale shlex "
    "reprlib pprint argparse optparse getopt stringprep _markupbase",
}
STDLIB = _domain(
    "stdlib",
    {area: {STANDARD_LIBRARY: modules} for area, modules in CHAPTERS.items()},
    f"{STANDARD_LIBRARY} _pytest hypothesis packaging pip pluggy pygments setuptools",
)
MATHS = _domain(
    "maths",
    {
        "arrays": {"numpy": "core _core lib ma matrixlib fft"},
        "functions": {"sympy": "functions", "mpmath": "calculus libmp ctx*"},
        "geometry": {"sympy": "geometry vector diffgeom"},
        "graphs": {"networkx": "algorithms classes generators"},
        "groups": {"sympy": "combinatorics liealgebras crypto ntheory"},
        "matrices": {"sympy": "matrices polys/matrices tensor", "numpy": "linalg", "mpmath": "matrices"},
        "physics": {"sympy": "physics/mechanics physics/optics physics/quantum physics/vector"},
        "polynomials": {"sympy": "polys/*", "numpy": "polynomial"},
    },
    "matplotlib mpmath networkx numpy scipy sklearn sympy",
)
LEARNING = _domain(
    "learning",
    {
        "compiling": {"torch": "fx"},
        "distributing": {"torch": "distributed/checkpoint distributed/elastic distributed/fsdp"},
        "generation": {"transformers": "generation cache_utils models/*/generation_*"},
        "images": {"transformers": "image_* models/*/image_processing_*"},
        "layers": {"torch": "nn distributions"},
        "quantizing": {"torch": "ao/quantization ao/nn", "transformers": "quantizers"},
        "tokens": {"transformers": "tokenization_* models/*/tokenization_*", "tokenizers": ""},
        "training": {"torch": "optim utils/data autograd amp", "transformers": "trainer* training_args* optimization data"},
    },
    "huggingface_hub safetensors sklearn tokenizers torch transformers",
)
WEB = _domain(
    "web",
    {
        "aiohttp": {"aiohttp": "", "yarl": "", "multidict": ""},
        "click": {"click": "", "typer": "[a-z]*"},
        "gevent": {"gevent": "", "geventhttpclient": ""},
        "grpc": {"grpc": ""},
        "httpx": {"httpx2": "", "httpcore2": "", "anyio": ""},
        "huggingface_hub": {"huggingface_hub": ""},
        "protobuf": {"google.protobuf": ""},
        "urllib3": {"urllib3": ""},
    },
    "aiohttp anyio click flask fsspec gevent geventhttpclient google.protobuf grpc httpcore2 httpx2 huggingface_hub jinja2 "
    "locust multidict pydantic requests rich tritonclient typer urllib3 werkzeug yarl",
)

DOMAINS = (STDLIB, MATHS, LEARNING, WEB)
