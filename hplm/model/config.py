"""The configuration of a backbone: sizes, where it is split, and the ids of its special tokens."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from hplm.errors import InvalidInput
from hplm.model.windows import TRIGRAMS, Window

LAYER_NORM, SCALED, RMS = "layer", "scaled", "rms"  # kinds of norms; a scaled one is a layer norm without bias
UNUSED = -1  # in place of the id of a token that decoders do not have
FORMAT = 3
NEWER = ("head_norms", "normed_words", "near", "global_every", "near_base")  # fields that the first release lacks


@dataclass(frozen=True)
class BackboneConfig:
    """An encoder, or a decoder, which has a `start_id`."""

    name: str
    vocabulary: int
    hidden: int
    heads: int
    intermediate: int
    lower_layers: int
    upper_layers: int
    positions: int  # the most tokens of a sequence, including special tokens
    segments: int
    activation: str
    norm_eps: float
    cls_id: int  # these four: of encoders only; decoders have UNUSED
    sep_id: int
    unk_id: int
    mask_id: int
    window: Window = TRIGRAMS  # tokens that the lower stack sees at once
    entry_eps: float | None = None  # epsilon of the norm before the upper layers (default: norm_eps)
    kv_heads: int | None = None  # heads of keys and values (default: heads)
    head: int | None = None  # numbers of one head (default: hidden // heads)
    norm: str = LAYER_NORM  # or SCALED or RMS
    pre_norm: bool = False  # the norms are before attention and feed-forward part, not behind them
    biases: bool | tuple[str, ...] = True  # whether projections have biases, or which have
    gated: bool = False  # the feed-forward part multiplies two projections
    rotary_base: float | None = None  # of rotary positions; None: learned positions
    start_id: int | None = None  # the token that begins a text of a decoder, where one does
    starts: bool = True  # whether the tokenizer puts it before a text
    end_ids: tuple[int, ...] = ()  # tokens that end a text, the first one for chat templates
    chat_template: str | None = None
    head_norms: bool = False  # queries and keys have norms, which all heads share
    normed_words: bool = True  # of encoders; with norms before the parts, the first layer then has none before its attention
    near: int | None = None  # tokens to each side that a token sees in near layers; None: there are none
    global_every: int = 1  # every so many layers of the whole model, from the first on, one is not near
    near_base: float | None = None  # the `rotary_base` of near layers; None: that of all
    format: int = FORMAT

    @property
    def is_decoder(self) -> bool:
        return self.start_id is not None

    @property
    def always_starts(self) -> bool:
        """Whether every sequence needs the start id: its windows were computed behind it, and pile attention up on it."""
        return self.lower_layers > 0

    @property
    def has_places(self) -> bool:
        """Whether positions are learned."""
        return self.rotary_base is None

    @property
    def enters_normed(self) -> bool:
        """Whether a norm stands before the upper layers: where layers end in norms. Others have a last norm instead."""
        return not (self.is_decoder or self.pre_norm)

    def near_in(self, layer: int) -> int | None:
        """Returns how many tokens to each side a layer of the whole model sees; None: all."""
        return self.near if layer % self.global_every else None

    def has_bias(self, projection: str) -> bool:
        return projection in self.biases if isinstance(self.biases, tuple) else self.biases

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads if self.head is None else self.head

    @property
    def query_width(self) -> int:
        return self.heads * self.head_size

    @property
    def key_width(self) -> int:
        """The numbers of a key, and of a value."""
        return (self.heads if self.kv_heads is None else self.kv_heads) * self.head_size

    def save(self, path: Path) -> None:
        fields = asdict(self)
        for name in NEWER:
            if fields[name] == self.__dataclass_fields__[name].default:
                del fields[name]  # the file stays as releases without it wrote it, and is compared with theirs
        path.write_text(json.dumps(fields, indent=2) + "\n", "utf-8")

    @classmethod
    def load(cls, path: Path) -> BackboneConfig:
        try:
            stored = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except FileNotFoundError:
            raise InvalidInput(f"{path.parent} contains no backbone: {path.name} is missing") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidInput(f"{path} is no JSON object ({error}): export the repository again with --replace") from None
        if stored.get("format") != FORMAT:
            raise InvalidInput(
                f"{path} has format {stored.get('format')!r}, but this version of hplm reads {FORMAT}: "
                "export the repository again with this version and --replace, or install the version that wrote it"
            )
        try:
            return msgspec.convert(stored, cls)
        except (msgspec.ValidationError, InvalidInput) as error:  # InvalidInput: of a window
            raise InvalidInput(
                f"{path} does not describe a backbone ({error}): export the repository again with --replace"
            ) from None
