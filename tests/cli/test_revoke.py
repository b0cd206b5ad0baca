"""`hplm tenant key revoke --wait --servers` ends as soon as the named servers refuse the key, by what their metrics say."""

import time

import pytest

from hplm.tenants import taken
from tests.cli.commands import refused, run
from tests.support.fakes import SmallServer, answer
from tests.support.message import mentions

pytestmark = pytest.mark.slow


def metrics(generation):
    """A server whose metrics say what `generation` returns."""
    own, other = '{backbone="toy",model="x"}', '{backbone="other"} 99'
    name = "hplm_registry_generation"
    return SmallServer(lambda *_: answer(body=f"# HELP\n{name}{other}\n{name}{own} {generation()}\n".encode()))


def test_it_ends_when_all_of_them_have_taken_the_change_and_names_those_that_have_not(live, capsys, monkeypatch):
    (_, places), (kept, gone) = live, [live.manager.add_key("tenant-0")[1].id for _ in range(2)]
    monkeypatch.setattr(taken, "LOOK_SECONDS", 0.01)
    looks, began = [], live.manager.current().generation

    def late():
        looks.append(live.manager.current().generation)
        return began if len(looks) < 4 else f"{looks[-1]:.1f}"

    with metrics(late) as first, metrics(lambda: live.manager.current().generation) as second:
        one, two = first.url, second.url
        words = ["tenant", "key", "revoke", "tenant-0", "--key", gone, *places]
        for wrong in (["--servers", one], ["--wait", "--servers", "nowhere"]):
            assert mentions(refused(capsys, *words, *wrong), "--servers") and live.manager.current().generation == began
        said = run(capsys, *words, "--wait", "--servers", one, two)
        assert said["behind"] == [] and len(looks) == 4 and said["dead_at"] > time.time()
        assert taken.wait_until_taken([one], "nobody", 1, until=0) == [one]
    assert taken.wait_until_taken([one, two], "toy", 1, until=0) == [one, two]  # they are gone
    assert [key.id for key in live.manager.current().find("tenant-0").keys] == [kept]
