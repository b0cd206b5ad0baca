"""`.gguf` files of llamas, written as llama.cpp's converter writes them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from hplm.errors import InvalidInput
from hplm.model.checkpoint import load_checkpoint, split
from hplm.model.gguf_files import SAMPLE
from hplm.model.windows import Window
from testing.random_store import byte_tokenizer_json
from tests.model.decoders import END, HIDDEN, LAYERS, POSITIONS, START, VOCABULARY, drawn, llama, tied_llama, tokens
from tests.model.test_decoders import upper_logits, windows_of
from tests.support.message import mentioning

gguf = pytest.importorskip("gguf")
WHOLE = {"lower": 0, "window": Window(1)}


def permuted(weight, heads):
    """Puts the rows that are rotated together side by side, as the converter does."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def written(model, path, architecture="llama", pre="gpt-2", kind="gpt2", tensors=lambda name: True, **more):
    config, state = model.config, {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    known = json.loads(byte_tokenizer_json(VOCABULARY))
    letters = sorted(known["model"]["vocab"], key=known["model"]["vocab"].get)
    special = [token["content"] for token in known["added_tokens"]][:-1]
    writer.add_token_list([*letters, *special, "he"])
    writer.add_token_types([1] * len(letters) + [3] * len(special) + [1])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(START)
    writer.add_eos_token_id(END)
    writer.add_chat_template("{{ messages }}")
    for name, value in more.items():
        writer.add_string(name.replace("__", "."), value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in state.items():
        own = names.get_name(name, (".weight",))
        if part := heads.get(own.split(".")[-2]):
            weight = np.ascontiguousarray(permuted(weight, part))
        if tensors(own) and not (config.tie_word_embeddings and own == "output.weight"):
            writer.add_tensor(own, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


@pytest.mark.parametrize("make", [llama, tied_llama])
@torch.no_grad()
def test_it_is_the_model_that_was_converted(tmp_path, make):
    model, text = drawn(make()), tokens(30)
    checkpoint = load_checkpoint(written(model, tmp_path / "Tiny.gguf"), **WHOLE)
    config = checkpoint.config
    assert (config.name, config.start_id, config.end_ids, config.positions) == ("tiny", START, (END,), POSITIONS)
    assert config.chat_template == "{{ messages }}"
    lower, upper = split(checkpoint)
    found = upper_logits(upper, lower(windows_of(text, 1))[:, 0])
    assert torch.allclose(found, model(torch.tensor([text])).logits[0], atol=1e-4)


def test_its_tokenizer_reads_texts_and_special_tokens(tmp_path):
    checkpoint = load_checkpoint(written(drawn(llama()), tmp_path / "m.gguf", pre="smollm"), **WHOLE)
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
    assert tokenizer.decode(tokenizer.encode(SAMPLE).ids) == SAMPLE
    assert tokenizer.encode(f"a<|{START}|>").ids[1] == START
    assert tokenizer.encode("he").ids == [VOCABULARY - 1]


@pytest.mark.parametrize(
    "options, named",
    [
        ({"architecture": "gpt2"}, "'gpt2'"),
        ({"kind": "llama"}, "'llama'"),
        ({"pre": "deepseek"}, "'deepseek'"),
        ({"llama__rope__scaling__type": "yarn"}, "'yarn'"),
        ({"tensors": lambda name: name != "blk.1.ffn_up.weight"}, "blk.1.ffn_up.weight"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path, options, named):
    path = tmp_path / "m.gguf"
    with pytest.raises(InvalidInput, match=mentioning(path, named)):
        load_checkpoint(written(drawn(llama()), path, **options), **WHOLE)


def test_a_broken_file_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    whole = Path(written(drawn(llama()), path)).read_bytes()
    for content in (b"", b"GGUF", b"PK\3\4" + whole[4:], whole[:200], whole[: len(whole) // 2], None):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(InvalidInput, match=mentioning(path)):
            load_checkpoint(str(path), **WHOLE)
