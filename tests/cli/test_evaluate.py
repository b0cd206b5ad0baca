"""`hplm evaluate`: a tenant's score on this machine, as served, and beside baselines trained on the same data."""

import json

import pytest

from builder.store.store import Store
from hplm.cli.main import main
from tests.cli.test_whole_way import material  # noqa: F401
from tests.support.message import mentions
from tests.support.servers import serving

pytestmark = pytest.mark.slow

RIVALS = {
    *("dedicated", "dedicated-lower", "dedicated-upper", "shared", "adapter", "plot"),
    *("distil", "tiny-half", "tiny-third"),
}
KEYS = {"tenant", "metric", "hplm", "int8", "served"} | RIVALS


def run(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def built(material, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("built")
    store, corpus = folder / "store", material / "corpus.txt"
    commands = [
        ["build", "root", "--model", material / "bert", "--name", "tiny", "--corpus", corpus, "--minutes", 0.02],
        *(
            ["build", "tenant", "--id", task, "--task", task, "--train", material / f"{task}.train.jsonl", "--rank", 4]
            for task in ("classify", "tag")
        ),
    ]
    for command in commands:
        assert main([*map(str, command), "--store", str(store)]) == 0
    # In 32 bits, as `evaluate` computes, so that no text near the decision boundary changes its label on another machine.
    assert main(["export", "--store", str(store), "--repository", str(folder / "repository"), "--dtype", "fp32"]) == 0
    return folder


def test_baselines_learn_from_the_same_data(built, material, capsys, tmp_path):  # noqa: F811
    arguments = ["evaluate", "--store", built / "store", "--id", "classify", "--test", material / "classify.dev.jsonl"]
    found = run(capsys, *arguments, "--against", "dedicated,shared,adapter,plot", "--picture", tmp_path / "confusion.png")
    assert found.keys() == KEYS | {"scores"} and found["metric"] == "accuracy" and found["served"] is None
    assert all(0 <= found[name] <= 1 for name in ("hplm", "dedicated", "shared", "adapter", "plot"))
    assert found["dedicated-lower"] is None
    assert found["scores"]["dedicated"]["accuracy"] == found["dedicated"] and found["scores"]["hplm"]["rows"] == 60
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")
    alone = run(capsys, *arguments)
    assert alone["hplm"] == found["hplm"] and alone["dedicated"] is None


def test_eight_bits_score_beside_32(built, material, capsys):  # noqa: F811
    arguments = ["evaluate", "--store", built / "store", "--id", "tag", "--test", material / "tag.dev.jsonl"]
    assert run(capsys, *arguments)["int8"] is None
    found = run(capsys, *arguments, "--int8")
    assert found["scores"]["int8"]["rows"] == found["scores"]["hplm"]["rows"]
    assert found["int8"] == pytest.approx(found["hplm"], abs=0.05)


def test_served_answers_have_the_same_score(built, material, capsys):  # noqa: F811
    with serving(built / "repository") as server:
        for tenant in ("classify", "tag"):
            test = material / f"{tenant}.dev.jsonl"
            command = ["evaluate", "--store", built / "store", "--id", tenant, "--test", test]
            for url in (["--url", server.http_url], ["--url", server.grpc_url, "--protocol", "grpc"]):
                found = run(capsys, *command, *url)
                assert found["served"] == pytest.approx(found["hplm"], abs=1e-3)
        assert main([*map(str, command), "--url", server.http_url]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines[-2:]] == ["hplm", "served"]
        train = material / "tag.train.jsonl"
        again = ["build", "tenant", "--id", "tag", "--task", "tag", "--train", train, "--epochs", "1"]
        run(capsys, *again, "--store", built / "store")
        assert main([*map(str, command), "--url", server.http_url]) == 1
        assert mentions(capsys.readouterr().err, "'tag'", 1, 2, "hplm tenant update")


@pytest.mark.parametrize(
    "changes, named",
    [
        (["--against", "bigger"], ["--against", "'bigger'", "dedicated"]),
        (["--against", "plot", "--train", "gone.jsonl"], ["gone.jsonl", "'classify'", "--train"]),
        (["--url", "127.0.0.1:1"], ["127.0.0.1:1"]),
        (["--protocol", "grpc", "--ca-file", "door.pem"], ["--protocol", "--ca-file", "--url"]),
        (["--train", "gone.jsonl"], ["--train", "--against"]),
        (["--test", "gone.jsonl", "--picture", "out.txt"], ["--picture", "out.txt", ".png", ".svg", ".pdf"]),
    ],
)
def test_impossible_comparisons_are_named(built, material, capsys, changes, named):  # noqa: F811
    command = ["evaluate", "--store", built / "store", "--id", "classify", "--test", material / "classify.dev.jsonl"]
    assert main([*map(str, command), *changes]) == 1
    assert mentions(capsys.readouterr().err, *named)


def test_baselines_refuse_other_data_than_the_tenants(built, material, capsys, tmp_path):  # noqa: F811
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"text": "w", "label": label}) + "\n" for label in ("up", "down") * 20))
    command = ["evaluate", "--store", built / "store", "--id", "classify", "--test", material / "classify.dev.jsonl"]
    assert main([*map(str, command), "--against", "shared", "--train", str(other)]) == 1
    assert mentions(capsys.readouterr().err, other, "'classify'", "--train")
    assert Store(built / "store").tenants()[0].version == 1
