"""Tiny decoders of each family with random weights, saved as Hugging Face saves them."""

from __future__ import annotations

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from testing.random_store import byte_tokenizer_json

VOCABULARY = 264
START, END, UNREAD = 256, 257, 258  # ids of special tokens
LAYERS, HIDDEN, POSITIONS = 4, 32, 128
NEAR = 64  # tokens that a mistral's layers see
IDS = {"bos_token_id": START, "eos_token_id": END, "pad_token_id": UNREAD, "vocab_size": VOCABULARY}


SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 48}
SIZES |= {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "max_position_embeddings": POSITIONS, **IDS}


def llama(**changes):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | changes)))


def mistral(**changes):
    return transformers.MistralForCausalLM(transformers.MistralConfig(**(SIZES | {"sliding_window": NEAR} | changes)))


def qwen2(**changes):
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    sizes["vocab_size"] += 1  # its tokenizer adds <|endoftext|>
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**(sizes | changes)))


def qwen3(**changes):
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**(SIZES | changes)))


def gemma(**changes):
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**(SIZES | changes)))


def gpt2(**changes):
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=HIDDEN, n_layer=LAYERS, n_head=4, n_positions=POSITIONS, **IDS, **changes)
    )


def opt(**changes):
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "ffn_dim": 48}
    sizes |= {"word_embed_proj_dim": HIDDEN}
    return transformers.OPTForCausalLM(transformers.OPTConfig(max_position_embeddings=POSITIONS, **(sizes | changes), **IDS))


def tied_llama():
    return llama(tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 100_000.0})


MADE = {
    "llama": llama,
    "tied llama": tied_llama,
    "gemma": gemma,
    "gpt2": gpt2,
    "opt": opt,
    "qwen2": lambda: qwen2(tie_word_embeddings=True),
    "qwen3": lambda: qwen3(tie_word_embeddings=False),
}


@torch.no_grad()
def drawn(model, seed=0):
    """Draws weights so large that every part of a layer matters, and that a table of 16 bits holds the words exactly."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in dict.fromkeys(model.parameters()):
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.3, generator=generator)
        else:
            parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.2, generator=generator))
        parameter.copy_(parameter.half())
    return model.eval()


def saved(model, folder, starts=False):
    """`starts`: its tokenizer puts the start id before a text."""
    model.save_pretrained(folder)
    tokenizer, start = Tokenizer.from_str(byte_tokenizer_json(VOCABULARY)), f"<|{START}|>"
    if starts:
        tokenizer.post_processor = TemplateProcessing(single=f"{start} $A", special_tokens=[(start, START)])
    tokenizer.save(str(folder / "made.json"))
    names = {"bos_token": f"<|{START}|>", "eos_token": f"<|{END}|>", "pad_token": f"<|{UNREAD}|>"}
    transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "made.json"), **names).save_pretrained(folder)
    return str(folder)


def tokens(count, seed=0):
    """Returns a start id and `count` tokens of text."""
    generator = torch.Generator().manual_seed(seed)
    return [START, *torch.randint(0, 256, (count,), generator=generator).tolist()]
