"""The calls from Python are those of the guide, and do what the commands do."""

import re
from pathlib import Path

from builder.store.store import Store
from tests.builder.checkpoints import SIZES, save_base, save_tokenizer
from tests.builder.importing.stores import texts, tuned
from tests.builder.stores import some_lines
from tests.builder.training.small_tenants import made
from tests.builder.training.test_files import as_csv

GUIDE = Path(__file__).parents[2] / "docs/guide.md"


def test_the_example_of_the_guide_builds_a_store(tmp_path, monkeypatch, one_step, with_bars, capsys):
    (example,) = re.findall(r"```python\n(from pathlib .*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    save_base(Path("model"))
    save_tokenizer(Path("model"), SIZES["vocab_size"])
    Path("corpus.txt").write_text("\n".join(some_lines(30, 0)))
    Path("maths.txt").write_text("\n".join(some_lines(3000, 1)))
    for number, name in enumerate(("train", "test")):
        as_csv(made(tmp_path, "classify", 60, number)).rename(f"{name}.csv")
    tuned(Path("checkpoints") / "luna")
    texts(tmp_path)
    given = {}
    exec(example, given)
    store = Store(Path("store"))
    assert {*store.domains()} == {("maths", 1), ("root", 1)} and {*store.tenant_ids()} == {"acme", "luna"}
    assert given["scores"]["metric"] == "accuracy" and 0 <= given["scores"]["hplm"] <= 1
    said = capsys.readouterr()
    assert "it explains" in said.out and f"reading {tmp_path}/model" in said.err
