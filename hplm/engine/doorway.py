"""Exit 0, before the queue: it sees only the tables' vectors, so a text that leaves there needs no batch and no engine."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from hplm.adapters.record import Record
from hplm.arrays import Array
from hplm.engine.backbone import Backbone
from hplm.engine.exits import Watch
from hplm.engine.passage import Computed
from hplm.engine.request import Text
from hplm.errors import HplmError
from hplm.model.means import with_means
from hplm.model.stacks import UpperStack
from hplm.model.tensors import array_of, tensor_of
from hplm.plot.gathering import Gatherer

log = logging.getLogger(__name__)
EXIT = 0
HEADS = 512  # of tenants, that are kept in memory: 100 KB each
NOBODY = Computed([], [], EXIT)


class Doorway:
    """Belongs to the thread that takes requests. It computes on the CPU, in 32 bits."""

    def __init__(self, backbone: Backbone, upper: UpperStack, watch: Watch) -> None:
        self._backbone, self._watch = backbone, watch
        self._gatherer = Gatherer(torch.device("cpu"), torch.float32)
        self._entry = UpperStack(replace(upper.config, upper_layers=0))
        self._entry.load_state_dict(upper.state_dict(), strict=False)  # not its layers
        self._entry = self._entry.float().eval().requires_grad_(False)
        self._heads: OrderedDict[Record, dict[str, Tensor]] = OrderedDict()

    def leaving(self, texts: Sequence[Text]) -> Computed:
        """Returns which of a request's texts leave. Where their rows or heads are broken, all go on, and staging says so."""
        record = texts[0].records.exits
        if record is None or not texts[0].may_leave(EXIT):
            return NOBODY
        try:
            outputs = self._outputs(texts, record)
        except HplmError:
            return NOBODY
        if outputs is None:
            return NOBODY
        ends = np.cumsum([len(text.reading) for text in texts])[:-1]
        logits = np.split(outputs, ends)
        leaves = self._watch.leaving(texts, logits, EXIT)
        numbers: list[int] = np.flatnonzero(leaves).tolist()
        return Computed(numbers, [logits[number] for number in numbers], EXIT)

    @torch.inference_mode()
    def _outputs(self, texts: Sequence[Text], record: Record) -> Array | None:
        """Returns the logits of all answer rows; None if a row of a table is broken."""
        forest = texts[0].request.view.forest
        addresses = np.concatenate([text.addresses for text in texts])
        if len(self._gatherer.broken(forest, addresses)):
            return None
        head = self._head(texts[0], record)
        lengths = np.array([len(text.addresses) for text in texts])
        starts = np.cumsum(lengths) - lengths
        positions = np.arange(len(addresses)) - np.repeat(starts, lengths)
        segments = np.concatenate([text.segments for text in texts]).astype(np.int64)
        sums = self._gatherer.sums(forest, addresses, lengths)
        x = self._entry.enter(sums, tensor_of(positions), tensor_of(segments))
        rows_of = np.array([len(text.reading) for text in texts])
        reading = np.concatenate([text.reading for text in texts]) + np.repeat(starts, rows_of)
        inner = linear(with_means(x, reading, rows_of, starts, lengths), head["dense"], head["dense_bias"]).relu_()
        return array_of(linear(inner, head["weight"], head["bias"]))

    def _head(self, text: Text, record: Record) -> dict[str, Tensor]:
        head = self._heads.get(record)
        if head is None:
            bank = text.request.view.banks.get(record.bank) or self._backbone.bank(record.bank)
            head = self._heads[record] = {name: weight.float() for name, weight in bank.weights(record)[EXIT].items()}
            if len(self._heads) > HEADS:
                self._heads.popitem(last=False)
        self._heads.move_to_end(record)
        return head
