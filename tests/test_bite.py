"""The entries of the bite list (`tests/bite`) fit today's tree."""

import subprocess
from pathlib import Path

from tests.bite.__main__ import PYTHON, make_python
from tests.bite.faults import FAULTS, Edit, Fault

ROOT = Path(__file__).resolve().parents[1]


def test_each_fault_applies_exactly_once_and_its_rooms_have_tests():
    assert [said for fault in FAULTS if (said := fault.stale(ROOT))] == []
    assert all(fault.rooms for fault in FAULTS)


def test_every_process_of_a_copys_tests_imports_the_copy_and_triton_those_ignore_the_environment(tmp_path):
    for name in ("backends", "clients/hplm_client"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__init__.py").touch()
    make_python(tmp_path)
    script = "import backends, hplm_client, numpy, pytest; print(backends.__file__, hplm_client.__file__)"
    found = subprocess.check_output([tmp_path / PYTHON, "-I", "-c", script], cwd="/", text=True).split()
    assert found == [str(tmp_path / name / "__init__.py") for name in ("backends", "clients/hplm_client")]


def test_the_files_of_tests_that_import_what_is_edited_run_first(tmp_path):
    lines = {"a": "from hplm.room.part import x", "b": "from hplm.room import other, part", "c": "from hplm.room import parts"}
    (tmp_path / "tests/room").mkdir(parents=True)
    for name, line in lines.items():
        (tmp_path / f"tests/room/test_{name}.py").write_text(line)
    fault = Fault("one", "room", ("room",), "", (Edit("hplm/room/part.py", "", ""),))
    assert fault.likeliest(tmp_path) == ["tests/room/test_a.py", "tests/room/test_b.py"]
