import subprocess
import sys

import pytest
from transformers import AutoModel, AutoTokenizer

from bench.infinity import InfinityBench
from bench.measuring import infinity
from bench.measuring.infinity import _serving, make_environment, save_whole
from hplm.errors import HplmError, InvalidInput
from testing.random_store import MINILM, words
from tests.support.message import mentioning


@pytest.mark.slow
def test_the_whole_model_is_one_that_transformers_loads(tmp_path):
    folder = save_whole(tmp_path / "minilm")
    model, tokenizer = AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.num_hidden_layers == MINILM.lower_layers + MINILM.upper_layers
    assert len(tokenizer(" ".join(words(MINILM.vocabulary)[:5]))["input_ids"]) == 7
    assert tokenizer.pad_token_id == 0


def test_a_failed_installation_names_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(infinity.subprocess, "run", lambda command, **given: subprocess.CompletedProcess(command, 1))
    with pytest.raises(HplmError, match=mentioning(tmp_path / "venv")):
        make_environment(tmp_path / "venv")


def test_a_server_that_ends_while_it_starts_is_named(tmp_path):
    failing = tmp_path / "python"
    failing.write_text(f"#!{sys.executable}\nraise SystemExit(3)\n")
    failing.chmod(0o755)
    with pytest.raises(HplmError, match=mentioning(3)), _serving(failing, tmp_path, "float32"):
        pass


def test_options_are_checked():
    with pytest.raises(InvalidInput, match=mentioning("--tokens")):
        InfinityBench(tokens=2)
