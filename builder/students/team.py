"""The students of a tenant on the first upper layers: their rows are added, and one classifier reads the sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from builder.learning.bodies import PlotBody
from builder.tasks.lookup import Pack
from builder.training.finetuning import Answering
from builder.training.model import TenantModel, rounded
from hplm.adapters.layout import adapter_layout, every_place, head_layout
from hplm.model.config import BackboneConfig
from hplm.tenants.knowledge import Adapter, Head


class StudentTeam:
    """While it learns, a member's head gives as many numbers as the backbone is wide, and `classifier` reads their sum.

    A stored member's head gives logits: the classifier is linear, so that it may be applied before the sum.
    """

    def __init__(
        self, config: BackboneConfig, depth: int, rank: int, labels: int, dtype: str, seed: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:  # fmt: skip
        whole = adapter_layout(config, "lora", rank, every_place(config), dtype=dtype)
        assert whole is not None  # its rank is not 0
        self.depth, self._seed, self._device = depth, seed, device
        self._adapter, self._pooler = replace(whole, layers=depth), head_layout(config, config.hidden, dtype=dtype)
        self._stored = head_layout(config, labels, dtype=dtype)
        self.members: list[TenantModel] = []
        self.classifier = nn.Linear(config.hidden, labels).to(device)
        self.mean, self.spread = 0.0, 1.0  # of values, as in `TenantModel`

    @torch.no_grad()
    def start_at(self, weight: Tensor, bias: Tensor) -> None:
        """Lets the classifier start as a teacher's head, which reads the rows that members learn."""
        self.classifier.weight.copy_(weight / self.spread)
        self.classifier.bias.copy_((bias - self.mean) / self.spread)

    def add(self) -> None:
        """Adds a member, which starts as the one before it."""
        member = TenantModel(self._adapter, self._pooler, self._seed)
        if self.members:
            member.load_state_dict(self.members[-1].state_dict())
        self.members.append(member.to(self._device))

    def parts(self) -> nn.Module:
        """Returns all that learns together."""
        return nn.ModuleDict({"members": nn.ModuleList(self.members), "classifier": self.classifier})

    def rows(self, body: PlotBody, pack: Pack, number: int) -> Tensor:
        """Returns what a member's head says of the rows that are read."""
        return self.members[number](body, pack, self.depth)

    def prefixes(self, body: PlotBody, pack: Pack) -> list[Tensor]:
        """Returns the logits of the first member, of the first two, and so on."""
        every = torch.stack([self.rows(body, pack, number) for number in range(len(self.members))])
        return [self.read(rows) for rows in self.joined(every)]

    def joined(self, rows: Tensor) -> Tensor:
        """Returns the rows of each prefix, from those of each member."""
        return rows.cumsum(0)

    def read(self, rows: Tensor) -> Tensor:
        """Returns the classifier's logits."""
        return self.classifier(rows).float() * self.spread + self.mean

    @torch.no_grad()
    def knowledge(self) -> list[tuple[Adapter, Head]]:
        """Returns the members as records have them: each with a head that gives logits."""
        found: list[tuple[Adapter, Head]] = []
        weight, bias = self.classifier.weight * self.spread, self.classifier.bias * self.spread + self.mean
        for number, member in enumerate(self.members):
            member.round_to_storage()  # raises where a weight is too large for 16 bits
            adapter, pooler = member.stored()
            assert adapter is not None
            head = {"weight": weight @ pooler["weight"].to(weight), "bias": weight @ pooler["bias"].to(bias)}
            if not number:
                head["bias"] = head["bias"] + bias
            stored = rounded(head, self._stored, "a student's head diverged", "Use a smaller --learning-rate")
            found.append(((self._adapter, adapter), (self._stored, {name: part.cpu() for name, part in stored.items()})))
        return found


def served(members: Sequence[tuple[Adapter, Head]], depth: int, device: torch.device) -> Answering:
    """Returns what gives the logits of stored students, as they are served."""
    models = [TenantModel.of(*member).to(device) for member in members]
    return lambda body, pack: torch.stack([model(body, pack, depth) for model in models]).sum(0)
