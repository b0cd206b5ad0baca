"""`./run demo`: from a pretrained BERT and the docstrings on this machine to answers from a real Triton."""

from __future__ import annotations

import argparse
import gc
import shutil
import sys
import time
from contextlib import ExitStack
from dataclasses import astuple
from pathlib import Path

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from demo import generating
from demo.building import BACKBONE, SIZES, Size, build_demo_root, build_demo_tenant, fingerprint, minilm, named, say
from demo.data import MANIFEST, stored_demo_data
from demo.serving import QUESTIONS, Score, add_live, draw, evaluate, first_answer, is_ours, live_server
from hplm.engine.engine import resolve_device
from hplm.errors import HplmError
from hplm.server import TritonServer
from hplm_client.errors import HplmClientError

TEST = 300  # texts of each tenant


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="./run demo", description="Build, serve and ask eight hPLMs over four domains.")
    parser.add_argument("--folder", type=Path, default=Path(".hplm/demo"), help="data and store (default: %(default)s)")
    parser.add_argument("--repository", type=Path, default=Path("model_repository"), help="default: %(default)s")
    parser.add_argument("--model", help="Hugging Face name or folder of another BERT than MiniLM, or decoder than SmolLM2")
    parser.add_argument(
        "--size", choices=SIZES, default="small", help="of tables and training data; large is more accurate (default: small)"
    )
    parser.add_argument("--generate", action="store_true", help="build tenants of a decoder instead, which rewrite sentences")
    args, start = parser.parse_args(argv), time.monotonic()
    try:
        if args.generate:
            _generate(args.model, args.folder, args.repository, start)
            return 0
        scores, picture = _run(args.model or str(minilm()), SIZES[args.size], args.folder, args.repository, start)
    except (HplmError, HplmClientError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    title = f"{'tenant':<18}{'task':<10}{'labels':>6}{'accuracy':>10}{'majority':>10}{'HTTP p50':>12}{'gRPC p50':>12}"
    print(f"\n{title}\n{'-' * len(title)}")
    for score in scores:
        of = f"{score.tenant.id:<18}{score.tenant.task:<10}{len(score.tenant.labels):>6}{score.accuracy:>10.3f}"
        print(f"{of}{score.tenant.majority_share:>10.3f}{score.http_ms:>9.1f} ms{score.grpc_ms:>9.1f} ms")
    print(f"""
Done in {(time.monotonic() - start) / 60:.1f} minutes.

See what happened:  {picture}
Keep the server:    ./run serve --repository {args.repository}
Ask it:             ./run hplm infer --tenant {scores[0].tenant.id} "Return the current working directory."
Who is there:       ./run hplm tenant list --repository {args.repository}
Build your own:     docs/guide.md
Let others build:   ./run hplm manager, with its console at http://127.0.0.1:9000: docs/manager.md
""")
    return 0


def _generate(model: str | None, demos: Path, repository: Path, start: float) -> None:
    written = generating.run(model, demos, repository)
    title = f"{'tenant':<12}{'ROUGE-L':>10}{'without adapter':>18}"
    print(f"\n{title}\n{'-' * len(title)}")
    for one in written:
        print(f"{one.tenant.id:<12}{one.own.main:>10.3f}{one.plain.main:>18.3f}")
    print(f"""
Done in {(time.monotonic() - start) / 60:.1f} minutes.

Keep the server:    ./run serve --repository {repository}
Ask it:             ./run hplm generate --tenant {generating.PLAIN} --chat "What is a docstring?" --stream --max-tokens 60
Build your own:     docs/decoders.md
""")


def _run(model: str, size: Size, demos: Path, repository: Path, start: float) -> tuple[list[Score], Path]:
    """Serves the first tenant as soon as it is built, and adds the others while it is served."""
    device = resolve_device("auto")
    folder = demos / fingerprint(named(model), *astuple(size), further=False)
    live = folder / "live"
    if not (folder / "data" / MANIFEST).exists():
        say("reading docstrings of the Python packages on this machine: texts of four domains, with labels of eight tenants")
    gc.disable()  # syntax trees have no cycles, and the search for them takes a third of the time
    data = stored_demo_data(folder / "data", {"train": size.train, "dev": size.dev, "test": TEST})
    gc.enable()
    replace = is_ours(repository / BACKBONE / "1", {tenant.id for tenant in data.tenants})
    store = build_demo_root(folder / "store", model, [domain.corpus for domain in data.domains], size, device)
    with ExitStack() as stack:
        server: TritonServer | None = None
        domains = {domain.name: domain for domain in data.domains}
        for tenant in data.tenants:
            build_demo_tenant(store, domains[tenant.domain], tenant, size, device)
            if server is None:
                say(f"starting Triton with tenant {tenant.id}")
                server = stack.enter_context(live_server(store, live))
                print(f"\n{first_answer(tenant, server.http_url)}", flush=True)
                print(f"\nFirst answer after {(time.monotonic() - start) / 60:.1f} minutes.", flush=True)
            else:
                add_live(store, live, tenant)
                print(f"\n{first_answer(tenant, server.http_url)}", flush=True)
        assert server is not None  # the demo has domains and tenants
        say(f"asking each of {len(data.tenants)} tenants {QUESTIONS} questions of its test texts, one at a time")
        scores = evaluate(data.tenants, server.http_url, server.grpc_url)
    say(f"exporting all tenants to {repository}")
    export(store, repository, ServingOptions(), replace)
    shutil.rmtree(live)
    draw(scores, store, picture := demos / f"{size.name}.svg")
    return scores, picture


if __name__ == "__main__":
    sys.exit(main())
