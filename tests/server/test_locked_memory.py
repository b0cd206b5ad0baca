"""`--hot` beyond the limit of locked memory: the model is not loaded, and the error says what to raise."""

import os

import pytest

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from hplm.errors import HplmError
from hplm.plot.table import Table
from hplm.server import TritonServer
from tests.support.message import mentioning

pytestmark = pytest.mark.slow
KILOBYTES = 16


class WithLittleLockedMemory(TritonServer):
    """A server that may lock 16 KB. Root may lock more than its limit, so root gives that right up."""

    def _command(self, folder):
        right = ["setpriv", "--inh-caps=-ipc_lock", "--bounding-set=-ipc_lock"] if os.geteuid() == 0 else []
        return [*right, "sh", "-c", f'ulimit -l {KILOBYTES}; exec "$0" "$@"', *super()._command(folder)]


def test_a_model_whose_hot_rows_do_not_fit_is_not_loaded(toy, tmp_path):
    export(toy.store, tmp_path, ServingOptions(dtype="fp32", plot_hot=1000))
    tables = [Table(path.parent) for path in tmp_path.glob("toy/1/plot/*/*/meta.json")]
    needed = sum(min(1000, table.size) * table.meta.row_bytes for table in tables)
    assert needed > KILOBYTES << 10
    named = mentioning("toy-upper", f"{needed:,}", f"{KILOBYTES << 10:,}", "ulimit -l")
    with pytest.raises(HplmError, match=named), WithLittleLockedMemory(tmp_path):
        raise AssertionError("started")
