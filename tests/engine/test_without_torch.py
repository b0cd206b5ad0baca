"""Models that compute nothing start without torch, which takes seconds and more than a hundred megabytes."""

import subprocess
import sys

import pytest

STARTS = """
import sys, types
sys.modules["triton_python_backend_utils"] = types.ModuleType("triton_python_backend_utils")
import backends.{model}.model
sys.exit("torch" in sys.modules)
"""


@pytest.mark.parametrize("model", ["hplm_lookup", "hplm_upper", "hplm_alias"])
def test_it_does_without_torch(model):
    assert subprocess.run([sys.executable, "-c", STARTS.format(model=model)], timeout=120).returncode == 0


def test_a_lookup_does_without_torch(toy):
    looks_up = """
import sys
from pathlib import Path
from hplm.engine.lookup import Lookup
from hplm.engine.views import Views
views = Views(Path(sys.argv[1]), None, lambda table: table.index)
tenant = views.view.snapshot.tenants[0]
assert Lookup(views).resolve(views.view, tenant, ["ba be"]).tokens
sys.exit("torch" in sys.modules)
"""
    folder = toy.repository / "toy" / "1"
    assert subprocess.run([sys.executable, "-c", looks_up, str(folder)], timeout=120).returncode == 0
