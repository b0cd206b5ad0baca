"""The recipes of docs/extending.md. Their code is read from the page and run unchanged."""

import __future__

import importlib
import inspect
import json
import random
import re
import sys
import textwrap
from pathlib import Path

import pytest

import bench
import testing.reference
from builder.evaluation.evaluation import evaluate_tenant
from builder.store.store import TenantVersion
from builder.tasks import tasks as training_tasks
from hplm.adapters import layout
from hplm.cli.main import main
from hplm.engine.packing import read_packing
from hplm.errors import InvalidInput
from hplm.tasks import tasks
from testing.random_store import random_store
from testing.toy import CONFIG, DOMAINS, TENANTS, random_text
from tests.builder.training.small_tenants import made
from tests.engine.asker import Asker
from tests.scheduling.test_plugins import installed  # noqa: F401
from tests.support.answers import Comparison
from tests.support.device import DEVICE
from tests.support.learning import by_one_step
from tests.support.packages import installed_package
from tests.tasks import exported

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
STEP = re.compile(r"(?:At the end of|In) `([\w/]+)\.py`(?:, before `(.+?)`)?:\n\n```python\n(.*?)```", re.DOTALL)


def section(heading):
    return re.search(rf"\n## {heading}\n(.*?)(?=\n## |\Z)", PAGE.read_text("utf-8"), re.DOTALL)[1]


@pytest.fixture
def follow():
    """Makes a recipe's changes in the modules that it names, until the test ends."""
    names = [vars(module) for module in (layout, tasks, training_tasks, testing.reference)]
    registries = [value for own in names for value in own.values() if isinstance(value, dict)]
    before = [(own, dict(own)) for own in (*names, *registries)]

    def follow(heading):
        steps = STEP.findall(section(heading))
        for name, line, code in steps:
            if not line:
                _run(importlib.import_module(name.replace("/", ".")), code)
        for name in {name for name, line, _ in steps if line}:
            module = importlib.import_module(name.replace("/", "."))
            source = inspect.getsource(module)
            for line, code in [(line, code) for own, line, code in steps if own == name and line]:
                found = re.findall(rf"^( *){re.escape(line)}\n", source, re.MULTILINE)
                assert len(found) == 1, f"{name}.py has {line!r} {len(found)} times"
                source = source.replace(f"{found[0]}{line}\n", f"{textwrap.indent(code, found[0])}{found[0]}{line}\n")
            _run(module, source)

    yield follow
    for own, content in before:
        for name in own.keys() - content.keys():
            del own[name]
        own.update(content)


def _run(module, code):
    """Runs code as if it were in the module's file, where annotations are not evaluated."""
    exec(compile(code, module.__file__, "exec", __future__.annotations.compiler_flag, dont_inherit=True), vars(module))


def assert_served(asker, reference, tenants):
    rng, comparison = random.Random(1), Comparison()
    asked = [(tenant, text := random_text(rng, 20), asker.ask(tenant, [text])) for tenant in tenants for _ in range(4)]
    for tenant, text, number in asked:
        (rows,) = asker.wait(number)
        comparison.add(tenant, rows.logits, reference.forward(text, tenant).numpy())
    comparison.assert_equal("fp32")
    asker.close()


def build_tenant(store, train, *options):
    places = ["--store", str(store.folder), "--train", str(train), "--id", "new", "--domain", "bio"]
    with by_one_step():
        return main(["build", "tenant", *places, "--epochs", "1", "--device", "cpu", *options])


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("policy", "packing"), [("longest_first:at_most=30", "packed"), ("in_rows:row_tokens=40", "concat")])
def test_a_policy(toy, reference, policy, packing):
    assert_served(Asker(toy.folder, policy=policy, packing=packing), reference, [tenant.id for tenant in TENANTS])


def test_a_packing(toy, reference, tmp_path):
    with pytest.raises(InvalidInput, match="'chunks'"):
        read_packing("chunks", None)
    code, points = re.findall(r"```(?:python|toml)\n(.*?)```", section("A packing"), re.DOTALL)
    points = points.replace("project.entry-points.", "").replace('"', "")
    with installed_package(tmp_path, points, chunks=code):
        assert read_packing("chunks:texts=3", None).texts == 3
        assert_served(Asker(toy.folder, packing="chunks:texts=3"), reference, [tenant.id for tenant in TENANTS])


def test_an_adapter_kind(follow, tmp_path):
    follow("An adapter kind")
    wide = TenantVersion("wide", 1, "law", 1, "tag", ["O", "A"], 3, "parallel", ("query", "value", "ffn_in", "ffn_out"), "gelu")
    store = random_store(tmp_path / "store", CONFIG, [wide, *TENANTS], DOMAINS, spread=0.3)
    options = ["--task", "classify", "--adapter", "parallel", "--rank", "4"]
    assert build_tenant(store, made(tmp_path, "classify", 60, 1), *options) == 0
    assert store.tenant("new").adapter_layout(CONFIG).places == ("ffn_out",)
    folder = exported(store, tmp_path / "repository") / "toy/1"
    assert_served(Asker(folder), testing.reference.Reference.open(folder), ["new", "wide", "acme", "flux"])


def test_a_task(follow, tmp_path, capsys):
    store, train = random_store(tmp_path / "store", CONFIG, TENANTS, DOMAINS, spread=0.3), made(tmp_path, "classify", 60, 1)
    assert build_tenant(store, train, "--task", "rank") == 2
    follow("A task")
    capsys.readouterr()
    assert build_tenant(store, train, "--task", "rank", "--json") == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["task"] == "rank" and 1 / 2 <= told["dev"]["reciprocal_rank"] <= 1
    scores = evaluate_tenant(store, "new", made(tmp_path, "classify", 60, 2), DEVICE).scores
    assert scores.rows == 60 and 1 / 2 <= scores.main <= 1

    folder = exported(store, tmp_path / "repository") / "toy/1"
    asker, reference, rng = Asker(folder), testing.reference.Reference.open(folder), random.Random(2)
    texts = [random_text(rng, 20) for _ in range(10)]
    orders = [rows.labels for rows in asker.wait(asker.ask("new", texts))]
    assert orders == [reference.answer(text, "new").labels for text in texts]
    assert all(sorted(labels) == ["left", "right"] for labels in orders)
    assert_served(asker, reference, ["new", "acme", "dune"])


def test_a_benchmark(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", section("A benchmark"), re.DOTALL)
    (tmp_path / "addition.py").write_text(code)
    monkeypatch.setattr(bench, "__path__", [*bench.__path__, str(tmp_path)])
    try:
        assert main(["bench", "addition", "--numbers", "5", "--quick", "--json"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["left"] == 0
        assert main(["bench", "addition", "--numbers", "0"]) == 1
        assert "--numbers" in capsys.readouterr().err
    finally:
        sys.modules.pop("bench.addition", None)
        vars(bench).pop("addition", None)
