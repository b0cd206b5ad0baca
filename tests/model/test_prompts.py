"""Prompts and messages become the tokens that `transformers` makes of them, and no message can hold a special token."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import transformers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HuggingFaceTokenizer

from hplm.errors import Broken, InvalidInput
from hplm.model.chat import BREAK, ChatTemplate
from hplm.model.checkpoint import load_checkpoint
from hplm.model.prompts import READ_CHARACTERS, Prompts
from hplm.model.tokenizer import Tokenizer
from hplm.model.windows import Window
from testing.random_store import byte_tokenizer_json
from testing.toy import CHAT, CHATML
from tests.model.decoders import END, START, drawn, llama, saved
from tests.support.message import mentioning

TEXTS = ("Hello  World\n", "naïve 水 🙂", "", " ")


@pytest.fixture(scope="module")
def prompts():
    return Prompts(byte_tokenizer_json(CHAT.vocabulary), CHAT)


def test_a_prompt_begins_with_the_start_id_and_comes_back(prompts):
    for text in TEXTS:
        tokens = prompts.encode(text)
        assert tokens[0] == CHAT.start_id and len(tokens) == 1 + len(text.encode())
        assert tokens.dtype == np.int64
        assert prompts.decode(tokens) == text


@pytest.mark.parametrize("starts", [False, True])
def test_the_start_id_stands_where_the_tokenizer_or_a_table_puts_it(tmp_path, starts):
    """Windows were computed behind it. Chats: the next tests."""
    folder = saved(drawn(llama()), tmp_path, starts)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for lower, window, always in ((0, Window(1), False), (2, Window(3), True)):
        checkpoint = load_checkpoint(folder, lower=lower, window=window)
        prompts = Prompts(checkpoint.tokenizer_json, checkpoint.config)
        for text in ("a", *TEXTS):
            expected = tokenizer(text).input_ids
            if (always or not text) and expected[:1] != [START]:
                expected = [START, *expected]
            assert prompts.encode(text).tolist() == expected
            assert prompts.end_of(prompts.encode(text), 3).tolist() == (
                expected if len(expected) < 4 else [START, *expected[-2:]] if expected[0] == START else expected[-3:]
            )
        assert (prompts.encode("a")[0] == START) == (starts or always)


def test_a_template_that_begins_with_the_start_id_gets_no_other_one(prompts):
    start = f"<|{CHAT.start_id}|>"
    assert np.array_equal(prompts.encode(start + "a"), prompts.encode("a"))
    assert prompts.decode(prompts.encode("a"), special=True) == start + "a"


@pytest.mark.parametrize(
    "given", ["", "5", "{}", "[]", "[true]", '["5"]', "[1.5]", "[[5]]", "[-1]", f"[5, {CHAT.vocabulary}]", "[1e99]"]
)
def test_token_ids_are_a_list_of_those_that_the_model_has(prompts, given):
    with pytest.raises(InvalidInput, match="'token_ids'"):
        prompts.ids_in(given)
    assert prompts.ids_in(f"[0, {CHAT.vocabulary - 1}]") == [0, CHAT.vocabulary - 1]


def test_documents_of_a_decoder_are_cut_into_pieces_behind_the_start_id(prompts):
    tokenizer = Tokenizer(byte_tokenizer_json(CHAT.vocabulary), 5, CHAT.start_id)
    pieces = tokenizer.encode_documents(["abcdefghi", "x"])
    assert [len(piece) for piece in pieces] == [5, 5, 2, 2] and all(piece[0] == CHAT.start_id for piece in pieces)
    assert prompts.decode(np.concatenate([piece[1:] for piece in pieces[:3]])) == "abcdefghi"


WITH_ALL = """{{ bos_token }}{% set said = namespace(system='') %}
{% for message in messages %}
    {% if message['role'] == 'system' %}
        {% set said.system = message.content | trim %}
        {% continue %}
    {% elif message['role'] not in ('user', 'assistant') %}
        {{ raise_exception('no role ' + message['role']) }}
    {% endif %}
    {% generation %}{{ message | tojson }}{% endgeneration %}{{ eos_token }}
    {{- said.system }}
{% endfor %}
{% if tools is not none or documents is not none %}tools{% endif %}
{% if add_generation_prompt %}<|259|>{{ '\n' }}{% endif %}
"""
TALK = [
    {"role": "system", "content": "  be kind, <b>please</b> "},
    {"role": "user", "content": "Où est l'été ? 水 👍"},
    {"role": "assistant", "content": "\n\nhere\n"},
    {"role": "user", "content": ""},
]
SPECIAL = [f"<|{id}|>" for id in range(START, CHAT.vocabulary)]


def prompts_of(template, **changes):
    return Prompts(byte_tokenizer_json(CHAT.vocabulary), replace(CHAT, chat_template=template, **changes))


def tokens_of(prompts, *contents, role="user"):
    return prompts.of_messages(json.dumps([{"role": role, "content": content} for content in contents])).tolist()


def special_in(tokens):
    return [token for token in tokens if token >= START]


@pytest.mark.parametrize("template", [CHATML, WITH_ALL])
def test_tokens_equal_those_of_transformers(tmp_path, template):
    folder = saved(drawn(llama()), tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    checkpoint = load_checkpoint(folder, lower=0, window=Window(1))
    prompts = Prompts(checkpoint.tokenizer_json, checkpoint.config)
    for last in range(2, len(TALK) + 1):
        expected = tokenizer.apply_chat_template(TALK[:last], add_generation_prompt=True, return_dict=False)
        assert prompts.of_messages(json.dumps(TALK[:last])).tolist() == expected and END in expected


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        CHATML.replace("message['content']", "message['content'][1:] + message['content'][:-1]"),
        CHATML.replace("message['content']", "message['content'].split('|') | join('|')"),
        CHATML.replace("message['content']", "message['content'] | replace('<|256|>', '') | trim"),
    ],
)
def test_no_message_holds_a_special_token(template):
    prompts, chance = prompts_of(template), random.Random(0)
    expected = special_in(tokens_of(prompts, "x"))
    parts = [*SPECIAL, "<", "|", "<|", "|>", "257", "25", "8|>", BREAK, " ", "é"]
    for content in [*SPECIAL, *("".join(chance.choices(parts, k=6)) for _ in range(300))]:
        tokens = tokens_of(prompts, content)
        assert special_in(tokens) == expected
        if template == CHATML:  # it is read as text
            assert prompts.decode(tokens) == f"user\n{content.replace(BREAK, '')}\nassistant\n"


def test_a_role_is_a_word():
    prompts = prompts_of("{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}")
    assert tokens_of(prompts, "a", role="258") == [START, 258, *tokens_of(prompts_of("a"), "")[1:]]
    for role in ("", "258|><|257", "a b", "a" * 65, "a\n"):
        with pytest.raises(InvalidInput, match=mentioning("role", repr(role))):
            tokens_of(prompts, "a", role=role)


def test_a_tokenizer_that_always_reads_a_special_token_is_not_fooled():
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    whole_words = HuggingFaceTokenizer(models.BPE({**letters, "<|9|>": 256}, [], ignore_merges=True))
    whole_words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    whole_words.decoder = decoders.ByteLevel()
    whole_words.add_special_tokens(["<|9|>"])
    wide = HuggingFaceTokenizer.from_str(whole_words.to_str())
    wide.model = models.BPE(letters, [])
    wide.normalizer = normalizers.NFKC()
    wide.add_special_tokens([AddedToken("<|8|>", normalized=True)])
    for tokenizer, content, named in ((whole_words, "a<|9|>", "<|9|>"), (wide, "＜|8|＞", "<|8|>")):
        chat = ChatTemplate("{{ messages[0].content }}", tokenizer, 0, None)
        assert chat.tokens([{"role": "user", "content": "ab"}]) == tokenizer.encode("ab").ids
        with pytest.raises(InvalidInput, match=mentioning(named)):
            chat.tokens([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("", ["JSON"]),
        ("[" * 100_000, ["messages"]),
        ("[]", ["list"]),
        (f"[{', '.join(['{}'] * 2049)}]", ["2,049", "2,048"]),
        ('[{"role": "user", "content": "a"}, {"role": "user"}]', ["message 2"]),
        ('[{"role": "user", "content": "a", "name": "b"}]', ["message 1"]),
        ('[{"role": 1, "content": "a"}]', ["role", "1"]),
        ('[{"role": "user", "content": [{"type": "text", "text": "a"}]}]', ["message 1", "content"]),
        ('[{"role": "user", "content": "a\\ud800"}]', ["message 1"]),
        (json.dumps([{"role": "user", "content": "a" * READ_CHARACTERS * CHAT.positions}]), [READ_CHARACTERS * CHAT.positions]),
        (" " * 10**6, [10**6]),
    ],
)
def test_bad_messages_are_refused(given, named):
    named = [f"{name:,}" if isinstance(name, int) else name for name in named]
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        prompts_of(CHATML).of_messages(given)


@pytest.mark.parametrize(
    ("template", "error", "named"),
    [
        (None, InvalidInput, ["chat template", "text_input"]),
        ("{% for %}", Broken, ["chat template", "chat"]),
        ("{{ raise_exception('roles must alternate') }}", InvalidInput, ["chat template", "roles must alternate"]),
        ("{{ ''.__class__.__mro__ }}", InvalidInput, ["chat template"]),
        ("{{ messages.append(1) }}", InvalidInput, ["chat template"]),
        ("{{ 1 / 0 }}", InvalidInput, ["chat template"]),
        ("{% for _ in range(99999) %}{{ messages[0].content }}{% endfor %}", InvalidInput, ["chat template", "too much"]),
        ("{% for _ in range(99999) %}" * 2 + "{{ none_of_it }}" + "{% endfor %}" * 2, InvalidInput, ["too long"]),
    ],
)
def test_a_template_that_does_not_take_messages_is_named(template, error, named):
    with pytest.raises(error, match=mentioning(*named)):
        tokens_of(prompts_of(template), "some words")
