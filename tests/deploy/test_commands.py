"""Every command that deploy/ and docs/cluster.md show exists. `test_published` runs some with the image's files."""

from hplm.cli.main import main, parsed
from tests.deploy.documented import commands_of_containers, commands_of_pages, mentioned


def test_every_command_is_whole_and_exists_with_its_options(capsys):
    of_containers = commands_of_containers()
    assert {words[0] for words in of_containers} == {"watch", "drain", "route"}
    for words in (*commands_of_pages(), *of_containers):
        parsed(words)
    for words, options in mentioned():
        assert main([*words, "--help"]) == 0, words
        text = capsys.readouterr().out
        assert not [option for option in options if option not in text], words
