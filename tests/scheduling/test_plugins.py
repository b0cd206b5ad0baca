import re
from pathlib import Path

import numpy as np
import pytest

from hplm.errors import HplmError, InvalidInput
from hplm.scheduling.columns import Columns
from hplm.scheduling.cost import CostModel
from hplm.scheduling.limits import Limits
from hplm.scheduling.policy import policy
from hplm.scheduling.scheduler import Scheduler
from hplm.scheduling.selection import OUTSIDE, Capacity, Places, Selection
from hplm.simulate.arrivals import SimulatedText
from tests.support.message import mentioning
from tests.support.packages import installed_package

DOCS = Path(__file__).parents[2] / "docs" / "scheduling.md"
MODULES = ("longest_first", "in_rows")


def _example(name):
    """Returns the file with this name from the documentation."""
    return re.search(rf"`{re.escape(name)}`:\n\n```\w+\n(.*?)```", DOCS.read_text(), re.DOTALL).group(1)


@pytest.fixture
def installed(tmp_path):
    """The documentation's example package."""
    (points,) = re.findall(r'entry-points."hplm.policies"\]\n(.*?)\n\n', _example("pyproject.toml"), re.DOTALL)
    points = f"[hplm.policies]\n{points}\nabsent = nowhere:Policy\nfcfs = nowhere:Policy\n".replace('"', "")
    with installed_package(tmp_path, points, **{module: _example(f"{module}.py") for module in MODULES}):
        yield


def test_a_policy_of_another_package_is_chosen_by_name_and_takes_options(installed):
    columns = Columns([SimulatedText(tokens=tokens, arrival_ns=0) for tokens in (10, 40, 20, 30)])
    batch = columns.remove(policy("longest_first:at_most=30").select(columns, 0, Capacity(60, 9, 9), CostModel()))
    assert [text.tokens for text in batch] == [30, 20, 10]


def test_a_broken_package_is_named_and_our_policies_are_not_replaced(installed):
    with pytest.raises(HplmError, match=mentioning("'absent'", "`nowhere`")):
        policy("absent")
    assert type(policy("fcfs")).__name__ == "FirstComeFirstServed"
    with pytest.raises(InvalidInput, match="longest_first"):
        policy("unknown")


CHOICES = [[0, 0], [7], [-1], [0.0, 1.0], [True, False, True], [], [[0], [1]]]
ROWS = [[0], [0, 1, -2], [0.0, 1.0, 2.0], [[0, 1, 2]], [True, False, True]]
FORBIDDEN = {
    **{str(chosen): lambda chosen=chosen: np.array(chosen) for chosen in CHOICES},
    "None": lambda: None,
    "no numbers": lambda: np.array("no numbers", int),
    **{f"row {row}": lambda row=row: Selection(np.arange(3), Places(np.array(row))) for row in ROWS},
    **{f"slot {row}": lambda row=row: Selection(np.arange(3), Places(np.arange(3), np.array(row))) for row in ROWS},
}


@pytest.mark.parametrize("chosen", FORBIDDEN.values(), ids=FORBIDDEN)
def test_a_forbidden_choice_of_a_policy_loses_no_text(chosen, caplog):
    class Unsound:
        def select(self, columns, start_ns, capacity, cost):
            return chosen()

    scheduler = Scheduler(Unsound(), Limits(100, 10**6))
    texts = [SimulatedText(tokens=10, arrival_ns=number) for number in range(3)]
    scheduler.offer(texts, 0)
    batch = scheduler.choose(Capacity(100, 100, 100), 0)
    assert batch.texts == texts and batch.places is None  # in order of arrival
    assert [record.exc_info is not None for record in caplog.records] == [True] and not len(scheduler)


def test_a_policy_of_another_package_hands_rows_over(installed):
    scheduler = Scheduler(policy("in_rows:row_tokens=30"), Limits(100, 10**6))
    scheduler.offer([SimulatedText(tokens=tokens, arrival_ns=0) for tokens in (10, 40, 25, 20)], 0)
    batch = scheduler.choose(Capacity(100, 9, 9), 0)
    assert [text.tokens for text in batch.texts] == [10, 40, 25, 20]
    assert batch.places.row.tolist() == [0, OUTSIDE, 1, 0] and batch.places.slot is None
