"""Knowledge: what makes a tenant, before it lies in a bank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hplm.adapters.layout import Layout
from hplm.errors import InvalidInput
from hplm.plot.forest import Branch
from hplm.tasks import TASKS


@dataclass(frozen=True)
class Knowledge:
    """The tensors are named and shaped as their layouts say."""

    domain: str
    domain_version: int
    task: str
    labels: tuple[str, ...]
    head: tuple[Layout, Mapping[str, Tensor]]
    adapter: tuple[Layout, Sequence[Mapping[str, Tensor]]] | None
    version: int = 0  # where it comes from; 0: it has none there

    def check(self, tenant_id: str, branches: Iterable[Branch], width: int | None) -> None:
        """Refuses what a backbone with these tables cannot serve; `width` of its vectors, None if it is not known."""
        if self.task not in TASKS:
            raise InvalidInput(f"tenant {tenant_id!r}: task {self.task!r} is not known: choose {' or '.join(TASKS)}")
        size = TASKS[self.task].head_size(len(self.labels))
        if len(self.labels) != size:
            found = len(self.labels)
            raise InvalidInput(f"tenant {tenant_id!r} has {found} labels: one of the task {self.task} has {size}")
        branch = (self.domain, self.domain_version)
        if branch not in {(branch.domain, branch.version) for branch in branches}:
            raise InvalidInput(
                f"tenant {tenant_id!r} stands on version {branch[1]} of domain {branch[0]!r}, which is not served: "
                "`hplm domain add` or `hplm domain update` brings it"
            )
        known = self.head[0].hidden if width is None else width
        for layout in (self.head[0], *((self.adapter[0],) if self.adapter else ())):
            if layout.hidden != known:
                raise InvalidInput(f"tenant {tenant_id!r} is of width {layout.hidden}, this backbone of {known}")
