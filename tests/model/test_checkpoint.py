"""Checkpoints of Hugging Face: with and without prefix, safetensors or bin, any number of layers."""

import json

import pytest
import torch
from transformers import AutoModel, BertConfig, BertForMaskedLM, BertModel, DistilBertConfig, PreTrainedTokenizerFast

from hplm.errors import InvalidInput
from hplm.model.attention import PackedAttention
from hplm.model.checkpoint import full_stack, load_checkpoint, split
from testing.random_store import tokenizer_json
from tests.support.message import mentioning


@pytest.fixture
def tokenizer(tmp_path):
    path = tmp_path / "made.json"
    path.write_text(tokenizer_json(90))
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_file=str(path), **special)


def _config(layers=5, **changes):
    return BertConfig(
        vocab_size=90, hidden_size=24, num_hidden_layers=layers, num_attention_heads=3, intermediate_size=40, **changes
    )


@pytest.mark.parametrize("kind", [BertModel, BertForMaskedLM])
@pytest.mark.parametrize("file", ["safetensors", "bin"])
def test_the_teacher_equals_transformers(tmp_path, tokenizer, kind, file):
    folder = tmp_path / "My-BERT"
    model = kind(_config()).eval()
    model.save_pretrained(folder)
    if file == "bin":
        (folder / "model.safetensors").unlink()
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    tokenizer.save_pretrained(folder)
    checkpoint = load_checkpoint(str(folder), lower=2)
    assert (checkpoint.config.name, checkpoint.config.lower_layers, checkpoint.config.upper_layers) == ("my-bert", 2, 3)
    assert (checkpoint.config.cls_id, checkpoint.config.sep_id) == (2, 3)

    stock = AutoModel.from_pretrained(folder, add_pooling_layer=False).eval()
    ids = torch.randint(5, 90, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = stock(ids, output_hidden_states=True)
        x, attend = expected.hidden_states[0][0], PackedAttention([9], 3)
        for layer in full_stack(checkpoint):
            x = layer(x, attend)
    assert torch.allclose(x, expected.last_hidden_state[0], atol=1e-5)


def test_layers_between_the_halves_are_taken_from_below(tmp_path, tokenizer):
    model = BertModel(_config(6))
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    lower, upper = split(load_checkpoint(str(tmp_path / "m"), lower=3, upper=2))
    assert len(lower.layers) == 3 and len(upper.layers) == 2
    assert torch.equal(upper.layers[0].ffn_in.weight, model.encoder.layer[3].intermediate.dense.weight)


def test_models_other_than_bert_are_refused(tmp_path, tokenizer):
    DistilBertConfig().save_pretrained(tmp_path / "m")
    with pytest.raises(InvalidInput, match="'distilbert'"):
        load_checkpoint(str(tmp_path / "m"))
    with pytest.raises(InvalidInput, match=mentioning(tmp_path / "nothing")):
        load_checkpoint(str(tmp_path / "nothing"))


def test_a_checkpoint_with_missing_tensors_is_refused(tmp_path, tokenizer):
    BertModel(_config(2)).save_pretrained(tmp_path / "m")
    _config(3).save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    with pytest.raises(InvalidInput, match=mentioning(tmp_path / "m", 16)):
        load_checkpoint(str(tmp_path / "m"))


@pytest.mark.parametrize("lower, upper", [(0, 2), (5, 1), (3, 3)])
def test_impossible_splits_are_refused(tmp_path, tokenizer, lower, upper):
    BertModel(_config(5)).save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    with pytest.raises(InvalidInput, match=mentioning(5, lower, upper)):
        load_checkpoint(str(tmp_path / "m"), lower=lower, upper=upper)


def test_relative_positions_are_refused(tmp_path, tokenizer):
    BertModel(_config()).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "position_embedding_type": "relative_key"}))
    with pytest.raises(InvalidInput, match="'relative_key'"):
        load_checkpoint(str(tmp_path))
