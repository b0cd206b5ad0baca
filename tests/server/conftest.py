"""The served decoder, as the reference reads it."""

import pytest

from hplm.engine.backbone import Backbone
from hplm.model.prompts import Prompts


@pytest.fixture
def backbone(server):
    return Backbone(server.model_folder("chat"))


@pytest.fixture
def prompts(backbone):
    return Prompts.load(backbone.folder / Backbone.TOKENIZER, backbone.config)
