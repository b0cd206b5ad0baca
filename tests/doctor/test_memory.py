"""`hplm doctor` prices a decoder's process as it will be."""

import torch

from builder.publish.export import export
from builder.publish.model_configs import ServingOptions
from builder.store.store import TenantVersion
from hplm.doctor.checks import OK, PROBLEM
from hplm.doctor.memory import cache_bytes, decoders, lower_bytes
from hplm.engine.backbone import Backbone
from hplm.generation.cache import Cache
from hplm.generation.settings import DecoderSettings
from hplm.memory import machine_memory
from testing.toy import CHAT, make_decoder
from tests.support.message import mentions


def test_the_lower_layers_of_all_domains_the_kept_rows_and_the_cache_have_their_price(tmp_path):
    """Equal weights are in memory once, as tests/builder/publish/test_export.py says."""
    store = make_decoder(tmp_path / "store", [TenantVersion("plain", 1, "law", 1, "generate", [], 0)], ["law"])
    lower = store.lower("law", 1)
    lower.words = store.lower("root", 1).words
    store.save_lower("law", 1, lower)
    export(store, tmp_path / "repository", ServingOptions(device="cpu").with_parameters({"kept_mb": "70"}, store.config))
    folder = tmp_path / "repository/chat/1"
    backbone = Backbone(folder)
    opened = [backbone.lower(table) for table in backbone.view.forest.tables()]
    weights = [weight for lower in opened for weight in lower.state_dict().values()]
    assert lower_bytes(folder.glob("plot/*/*/lower.safetensors")) == sum(
        {weight.data_ptr(): weight.nbytes for weight in weights}.values()
    )
    (finding,) = decoders(tmp_path / "repository", None, machine_memory()[0])
    assert finding.status == OK and mentions(finding.says, "lower layers of 2 tables", "0.07 GB of rows", "cpu")
    assert mentions(finding.check, "chat")
    (finding,) = decoders(tmp_path / "repository", None, 70 * 10**6)
    assert finding.status == PROBLEM and mentions(finding.do, "cache_tokens", "kept_mb")


def test_the_price_of_a_cache_is_its_size():
    settings = DecoderSettings(cache_tokens=64, dtype=torch.bfloat16)
    cache = Cache(64, CHAT.positions, CHAT.upper_layers, CHAT.key_width, settings.device, settings.dtype)
    layers = [cache.layer(number) for number in range(CHAT.upper_layers)]
    assert cache_bytes(settings, CHAT) == sum(part.nbytes for layer in layers for part in layer)


def test_the_limit_of_a_container_counts(tmp_path):
    machine, _ = machine_memory(tmp_path)
    for name, content in (("current", "3000000\n"), ("stat", "anon 1000000\ninactive_file 2000000\n"), ("max", "9000000\n")):
        (tmp_path / f"memory.{name}").write_text(content)
    assert machine_memory(tmp_path) == (9_000_000, 8_000_000) and machine > 9_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert machine_memory(tmp_path)[0] == machine
