"""Decoders of Hugging Face, split into two stacks, and `.gguf` files as llama.cpp's converter writes them."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from hplm.errors import InvalidInput
from hplm.model.attention import SinkAttention
from hplm.model.checkpoint import load_checkpoint, split
from hplm.model.config import BackboneConfig
from hplm.model.gguf_files import SAMPLE
from hplm.model.windows import Window
from testing.random_store import byte_tokenizer_json
from tests.model.decoders import (
    END,
    LAYERS,
    MADE,
    NEAR,
    POSITIONS,
    SIZES,
    START,
    VOCABULARY,
    drawn,
    gemma,
    gpt2,
    llama,
    mistral,
    opt,
    saved,
    tokens,
)
from tests.support.message import mentioning

LOWER = 2


@pytest.mark.parametrize("make", [*MADE.values(), mistral, lambda: llama(attention_bias=True)])
@torch.no_grad()
def test_a_window_is_computed_as_a_text_behind_the_start_id(tmp_path, make):
    """With what the upper stack adds at its position, it is the hidden state of the last token of that short text."""
    model = drawn(make())
    lower, upper = split(load_checkpoint(saved(model, tmp_path / "Tiny"), lower=LOWER, window=Window(3)))
    windows = torch.tensor([[0, 0, 5], [0, 7, 8], [4, 5, 6], [0, 0, START + 1], [0, START + 1, 8], [START + 1, 5, 6]])
    vectors = lower(windows)
    assert vectors.shape == (len(windows), 1, upper.config.hidden)
    for window, vector in zip(windows.tolist(), vectors, strict=True):
        text = [token - 1 for token in window if token]
        text = text if text[0] == START else [START, *text]
        expected = model(torch.tensor([text]), output_hidden_states=True).hidden_states[LOWER][0, -1]
        assert torch.allclose(upper.enter(vector, torch.tensor([len(text) - 1]))[0], expected, atol=1e-4)


def without_a_start_id(folder):
    path = saved(llama(), folder)
    for name, entry in (("config.json", "bos_token_id"), ("tokenizer_config.json", "bos_token")):
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), entry: None}), "utf-8")
    return path


def with_fewer_words(folder):
    model = llama()
    model.resize_token_embeddings(VOCABULARY - 4)
    return saved(model, folder)


def other(name):
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SIZES))


SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
UNSPLIT = [({"lower": lower, "upper": upper}, [LAYERS, lower]) for lower, upper in ((-1, 2), (LAYERS, None), (3, 3))]


@pytest.mark.parametrize(
    "make, options, named",
    [
        (lambda to: saved(llama(rope_parameters=SCALED), to), {}, ["'linear'"]),
        (lambda to: saved(gemma(use_bidirectional_attention=True), to), {}, ["attention to later tokens"]),
        (lambda to: saved(other("Gemma2"), to), {}, ["'gemma2'", "norms behind", "qwen3"]),
        (lambda to: saved(other("Phi3"), to), {}, ["'phi3'", "one matrix", "llama"]),
        (lambda to: saved(gpt2(scale_attn_by_inverse_layer_idx=True), to), {}, ["attention scaled by layer"]),
        (lambda to: saved(opt(do_layer_norm_before=False), to), {}, ["norms behind"]),
        (lambda to: saved(opt(word_embed_proj_dim=16), to), {}, ["words of another width"]),
        (lambda to: saved(transformers.LlamaModel(llama().config), to), {}, ["lm_head.weight"]),
        (without_a_start_id, {}, ["bos_token_id"]),
        (with_fewer_words, {}, [VOCABULARY - 4, VOCABULARY - 1]),
        *((lambda to: saved(llama(), to), *unsplit) for unsplit in UNSPLIT),
        (lambda to: saved(llama(), to), {"window": Window(2)}, ["--lower 0", 2]),
    ],
)
def test_what_cannot_be_computed_or_split_is_refused(tmp_path, make, options, named):
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        load_checkpoint(make(tmp_path / "m"), **({"lower": 0, "window": Window(1)} | options))


def test_texts_are_no_longer_than_what_layers_see(tmp_path):
    assert load_checkpoint(saved(mistral(), tmp_path / "m"), lower=LOWER).config.positions == NEAR
    assert load_checkpoint(saved(mistral(sliding_window=None), tmp_path / "all"), lower=LOWER).config.positions == POSITIONS


WHOLE = {"lower": 0, "window": Window(1)}


def permuted(weight, heads):
    """Puts the rows that are rotated together side by side, as the converter does."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def written(model, path, architecture="llama", pre="gpt-2", kind="gpt2", tensors=lambda name: True, begins=None, **more):
    config, state = model.config, {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    writer, head = gguf.GGUFWriter(path, architecture), getattr(config, "head_dim", config.hidden_size // 4)
    sizes = {
        "context_length": POSITIONS, "embedding_length": config.hidden_size, "block_count": LAYERS,
        "feed_forward_length": config.intermediate_size, "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads, "key_length": head, "rope_dimension_count": head,
        "layer_norm_rms_eps": config.rms_norm_eps, "rope_freq_base": config.rope_parameters["rope_theta"],
        "tokenizer_model": kind, "tokenizer_pre": pre, "bos_token_id": START, "eos_token_id": END,
        "chat_template": "{{ messages }}",
    }  # fmt: skip
    for name, value in sizes.items():
        getattr(writer, f"add_{name}")(value)
    known = json.loads(byte_tokenizer_json(VOCABULARY))
    letters = sorted(known["model"]["vocab"], key=known["model"]["vocab"].get)
    special = [token["content"] for token in known["added_tokens"]][:-1]
    more_tokens = ["more"] * (config.vocab_size - VOCABULARY)
    writer.add_token_list([*letters, *special, "he", *more_tokens])
    writer.add_token_types([1] * len(letters) + [3] * len(special) + [1] + [3] * len(more_tokens))
    writer.add_token_merges(["h e"])
    if begins is not None:
        writer.add_add_bos_token(begins)
    for name, value in more.items():
        writer.add_string(name.replace("__", "."), value)
    names = gguf.get_tensor_name_map(
        getattr(gguf.MODEL_ARCH, "LLAMA" if architecture == "gpt2" else architecture.upper()), LAYERS
    )
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, weight in state.items():
        own = names.get_name(name.removesuffix(".bias"), (".weight",)) + ".bias" * name.endswith(".bias")
        if (part := heads.get(own.split(".")[-2])) and architecture == "llama":
            weight = np.ascontiguousarray(permuted(weight, part))
        if tensors(own) and not (config.tie_word_embeddings and own == "output.weight"):
            writer.add_tensor(own, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


CONVERTED = [("llama", "gpt-2"), ("tied llama", "gpt-2"), ("qwen2", "qwen2"), ("qwen3", "qwen2")]


@pytest.mark.parametrize("family, pre", CONVERTED)
@torch.no_grad()
def test_it_is_the_model_that_was_converted(tmp_path, family, pre):
    model, text = drawn(MADE[family]()), tokens(30)
    checkpoint = load_checkpoint(written(model, tmp_path / "Tiny.gguf", family.split()[-1], pre), **WHOLE)
    config = checkpoint.config
    assert (config.name, config.start_id, config.end_ids, config.positions) == ("tiny", START, (END,), POSITIONS)
    assert config.chat_template == "{{ messages }}"
    config.save(path := tmp_path / "backbone.json")
    assert BackboneConfig.load(path) == config
    assert ("head_norms" in path.read_text("utf-8")) == (family == "qwen3")  # others' file is that of 0.1.0
    lower, upper = split(checkpoint)
    sums, attend = lower(torch.tensor(text)[:, None] + 1)[:, 0], SinkAttention([len(text) - 1], config.heads)
    found = upper.logits(upper(sums, torch.arange(len(text)), None, attend))
    assert torch.allclose(found, model(torch.tensor([text])).logits[0], atol=1e-4)


@pytest.mark.parametrize("pre", ["smollm", "qwen2"])
def test_its_tokenizer_reads_texts_and_special_tokens(tmp_path, pre):
    checkpoint = load_checkpoint(written(drawn(llama()), tmp_path / "m.gguf", pre=pre), **WHOLE)
    tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
    decomposed = "a\N{COMBINING ACUTE ACCENT}"
    assert (tokenizer.encode(decomposed).ids == tokenizer.encode("\N{LATIN SMALL LETTER A WITH ACUTE}").ids) == (pre == "qwen2")
    assert tokenizer.decode(tokenizer.encode(SAMPLE).ids) == SAMPLE
    assert tokenizer.encode(f"a<|{START}|>").ids[1] == START
    assert tokenizer.encode("he").ids == [VOCABULARY - 1]


@pytest.mark.parametrize(
    ("options", "starts"), [({}, False), ({"pre": "llama-bpe"}, True), ({"begins": True}, True), ({"begins": False}, False)]
)
def test_the_file_says_whether_the_start_id_begins_a_text_or_its_kind_does(tmp_path, options, starts):
    assert load_checkpoint(written(drawn(llama()), tmp_path / "m.gguf", **options), **WHOLE).config.starts == starts


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


@torch.no_grad()
def test_weights_that_are_not_finite_are_refused(tmp_path):
    """Of one in the form of transformers: tests/builder/importing/test_checkpoint.py."""
    (model := drawn(llama())).model.norm.weight[0] = torch.nan
    with pytest.raises(InvalidInput, match=mentioning("m.gguf", "not finite", "final_norm.weight")):
        load_checkpoint(written(model, tmp_path / "m.gguf"), **WHOLE)


def test_a_broken_file_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    whole = Path(written(drawn(llama()), path)).read_bytes()
    for content in (b"", b"GGUF", b"PK\3\4" + whole[4:], whole[:200], whole[: len(whole) // 2], None):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(InvalidInput, match=mentioning(path)):
            load_checkpoint(str(path), **WHOLE)
