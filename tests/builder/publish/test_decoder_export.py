"""The export of a decoder: one model, whose settings are checked before anything is written."""

from dataclasses import replace

import pytest

from builder.publish.export import export
from builder.publish.model_configs import ALIAS, ServingOptions
from builder.store.store import TenantFile
from hplm.errors import InvalidInput
from testing.random_store import random_store
from testing.toy import CHAT, CONFIG
from tests.support.message import mentioning

PLAIN = TenantFile("plain", 1, "root", 1, "generate", [], 0)
HEAD = TenantFile("head", 1, "root", 1, "classify", ["a", "b"], 0)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return random_store(tmp_path_factory.mktemp("chat") / "store", CHAT, [PLAIN], corpus_tokens=300)


def test_a_decoder_is_one_decoupled_model_beside_the_alias(store, tmp_path):
    export(store, tmp_path, ServingOptions(cache_tokens=512, seats=3, cache="paged"))
    assert {config.parent.name for config in tmp_path.glob("*/config.pbtxt")} == {CHAT.name, ALIAS}
    text = (tmp_path / CHAT.name / "config.pbtxt").read_text("utf-8")
    assert "decoupled: true" in text
    assert 'key: "cache_tokens"    value { string_value: "512" }' in text and "$" not in text
    assert 'key: "cache"           value { string_value: "paged" }' in text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dtype": "int8"}, ["int8"]),
        ({"cache_tokens": CHAT.positions - 1}, ["cache_tokens", CHAT.positions]),
        ({"cache_tokens": 255, "cache": "paged"}, ["cache_tokens", 256]),  # a block on CUDA
        ({"seats": 0}, ["seats"]),
        ({"cache": "dense"}, ["dense"]),
        ({"cleaning": "never"}, ["never"]),
        ({"deadline_ms": -1}, ["deadline_ms"]),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(store, tmp_path, options, named):
    with pytest.raises(InvalidInput, match=mentioning(*named)):
        export(store, tmp_path, ServingOptions(**options))
    assert not list(tmp_path.iterdir())


def test_an_encoder_and_a_decoder_of_one_name_have_repositories_of_their_own(store, tmp_path):
    encoder = random_store(tmp_path / "store", replace(CONFIG, name=CHAT.name), [HEAD], corpus_tokens=300)
    for first, second in ((store, encoder), (encoder, store)):
        repository = tmp_path / f"repository-{first is store}"
        export(first, repository, ServingOptions())
        with pytest.raises(InvalidInput, match=mentioning(CHAT.name, "--repository")):
            export(second, repository, ServingOptions(), replace=True)
