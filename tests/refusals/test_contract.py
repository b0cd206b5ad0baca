"""Each way in accepts the values that the tables of the documents allow, and refuses all others by their name.

Our client leaves that to the server: `clients/tests` show that each value reaches it with its kind.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import pytest

from hplm.parameters import parameters_of
from hplm.tenants.manager import Manager
from tests.refusals import ways
from tests.refusals.contract import faults, table
from tests.support.wait import Clock

SETTINGS = {row.name: replace(row, or_text=True) for row in table("generation.md", "setting")}
OPENAI = table("openai.md", "field")
TENANT, OTHER = (
    ("name of a tenant",),
    (
        *("messages", "stream options", "structure", "response format", "name of a policy", "names of outputs"),
        *("number of dimensions", "name of a prefix"),
    ),
)  # tested by example
TABLES = {  # by way: its table, and what of it
    "encoder": table("api.md", "parameter"),
    "decoder": table("generation.md", "parameter"),
    "settings": list(SETTINGS.values()),
    "settings in JSON": list(SETTINGS.values()),
    "completions": [row for row in OPENAI if row.of in ("both", "completions")],
    "chats": [row for row in OPENAI if row.of in ("both", "chats")],
    "limits": table("manager.md", "field"),
    "config.pbtxt": [replace(row, as_text=True) for row in table("scheduling.md", "parameter")],
}
CASES = [(way, row) for way, rows in TABLES.items() for row in rows if row.type not in (*TENANT, *OTHER)]


@pytest.fixture(scope="module")
def read(toy, tmp_path_factory):
    """The reader of each way: it sends a request in which one name has this value."""
    config = {**parameters_of(toy.repository / "toy-upper" / "config.pbtxt"), "deadline_ms": "0"}
    with ways.models(toy, tmp_path_factory.mktemp("contract")) as models:
        manager = Manager(models.chat, tmp_path_factory.mktemp("state"), Clock(time.time()))
        manager.registry.begin()
        yield {
            "encoder": lambda name, value: models.encode({name: value}),
            "decoder": lambda name, value: models.generate({**ways.FEW, name: value}),
            "settings": lambda name, value: models.generate({**ways.FEW, name: value}),
            "settings in JSON": lambda name, value: models.sample({**ways.FEW, name: value}),
            "completions": partial(ways.openai, models, "completions"),
            "chats": partial(ways.openai, models, "chat/completions"),
            "limits": partial(ways.limit, manager),
            "config.pbtxt": partial(ways.option, config),
        }


# null stands for the default there
NULL = ("settings", "settings in JSON", "completions", "chats")
JSON = ("completions", "chats")
TOGETHER = 8  # requests that are sent before the first answer is read; the decoder computes as many


@pytest.mark.parametrize(("way", "row"), CASES, ids=lambda one: getattr(one, "name", one))
def test_documented_values_are_accepted_and_all_others_refused_by_their_name(read, way, row):
    means, found = SETTINGS[row.setting] if row.setting else row, []
    values = means.values()
    for at in range(0, len(values), TOGETHER):
        sent = [(value, read[way](row.name, value)) for value in values[at : at + TOGETHER]]
        found += [one for value, said in sent for one in faults(row, value, means, said(), way in NULL, way in JSON)]
    if way in JSON and row.name == "stop":
        found = [one for one in found if not one.startswith('stop = "" ')]  # asks for nothing there
    assert not found, f"{way}: {len(found)} values, such as {found[0]}"
