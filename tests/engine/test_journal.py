"""The journal has a line for each request and each batch, and contains no text."""

import json
import time

import pytest

from hplm.engine.instruments import Instruments
from hplm.errors import InvalidInput
from testing.toy import WORDS
from tests.engine.asker import Asker
from tests.support.message import mentioning


def test_a_request_can_be_followed_from_its_arrival_to_its_answer(toy, tmp_path):
    file = tmp_path / "journal.jsonl"
    asker = Asker(toy.folder, journal=str(file))
    text = " ".join(WORDS[:5])
    numbers = [asker.ask("acme", [text, text]), asker.ask("beta", [text], deadline_ns=time.monotonic_ns() + 10**11)]
    for number in numbers:
        asker.wait(number)
    late = asker.ask("city", [text], deadline_ns=1, arrival_ns=time.monotonic_ns() - 10**10)
    asker.wait(late)
    asker.close()
    entries = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    requests = {entry["request"]: entry for entry in entries if "request" in entry}
    batches = {entry["batch"]: entry for entry in entries if "stages" in entry}
    assert {entry["backbone"] for entry in entries} == {"toy"}
    assert [requests[f"request {i}"]["outcome"] for i in (*numbers, late)] == ["answered", "on_time", "deadline"]
    behind = time.time() - time.monotonic()
    assert all(one["wall"] - one["arrived"] == pytest.approx(behind, abs=1) for one in requests.values())
    for i in numbers:
        one = requests[f"request {i}"]
        stages = batches[one["batch"]]["stages"]
        assert one["arrived"] <= one["received"] <= one["taken"] <= one["started"] <= stages["compute"][0]
        assert stages["compute"][0] <= stages["compute"][1]
        assert stages["compute"][1] <= one["computed"] <= one["answered"]
    first, never = requests["request 0"], requests[f"request {late}"]
    assert (first["tenant"], first["texts"], first["tokens"]) == ("acme", 2, 14)
    assert never["started"] == never["batch"] == 0 and first["rung"] == 1
    assert sum(batch["texts"] for batch in batches.values()) == 3
    assert text not in file.read_text("utf-8")


@pytest.mark.parametrize("before, after", [("", ""), ('{"batch": 1}\n', ""), ('{"batch": 1}\n{"requ', "\n")])
def test_a_journal_goes_on_with_a_line_of_its_own_after_a_killed_server(tmp_path, before, after):
    file = tmp_path / "journal.jsonl"
    file.write_text(before)
    Instruments(str(file), "toy").close()
    assert file.read_text() == before + after


def test_a_journal_that_cannot_be_written_is_named(toy, tmp_path):
    with pytest.raises(InvalidInput, match=mentioning("'journal'", tmp_path / "no/where")):
        Asker(toy.folder, journal=str(tmp_path / "no/where"))


def test_a_full_disk_ends_the_journal_but_no_answer(toy, caplog):
    asker = Asker(toy.folder, journal="/dev/full")
    for number in [asker.ask("acme", [WORDS[i]]) for i in range(3)]:
        assert asker.wait(number)[0].labels
    asker.close()
    assert sum("No space left" in record.message for record in caplog.records) == 1
