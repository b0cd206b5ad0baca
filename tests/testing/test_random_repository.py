"""The command that writes a repository of random weights."""

from __future__ import annotations

import pytest

from hplm.cli.main import main as hplm
from hplm.tenants.directory import Directory
from testing.random_repository import main


def test_what_it_writes_is_whole_and_has_as_many_tenants(tmp_path, capsys) -> None:
    repository = tmp_path / "random"
    main(["--to", str(repository), "--tenants", "3", "--dtype", "fp32"])
    (snapshot,) = Directory(repository, None).snapshots()
    assert [tenant.id for tenant in snapshot.tenants] == ["tenant-0", "tenant-1", "tenant-2"]
    assert hplm(["verify", "--repository", str(repository)]) == 0
    assert "minilm" in capsys.readouterr().out


def test_a_folder_with_something_in_it_is_left_alone_and_no_tenants_are_refused(tmp_path) -> None:
    (tmp_path / "mine").write_text("")
    for to, tenants, named in ((tmp_path, "3", "--to"), (tmp_path / "random", "0", "--tenants 0")):
        with pytest.raises(SystemExit, match=named):
            main(["--to", str(to), "--tenants", tenants])
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]
