"""Models that compute nothing start without torch, which takes seconds and more than a hundred megabytes."""

import subprocess
import sys

from tests.support.wait import PATIENCE

SCRIPT = """
import sys, types
from pathlib import Path
sys.modules["triton_python_backend_utils"] = types.ModuleType("triton_python_backend_utils")
import backends.hplm_alias.model, backends.hplm_lookup.model, backends.hplm_upper.model
from hplm.lookup.lookup import Lookup
from hplm.lookup.views import Views
views = Views(Path(sys.argv[1]), None, lambda table: table.index)
tenant = views.view.snapshot.tenants[0]
assert Lookup(views).resolve(views.view, tenant, ["ba be"]).tokens
sys.exit("torch" in sys.modules)
"""


def test_models_that_compute_nothing_and_a_lookup_do_without_torch(toy):
    folder = toy.repository / "toy" / "1"
    assert subprocess.run([sys.executable, "-c", SCRIPT, str(folder)], timeout=PATIENCE).returncode == 0
