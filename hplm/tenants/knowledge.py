"""The knowledge of a tenant before it is written into a bank: domain, task, labels, adapter, head, and those of its levels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from hplm.adapters.layout import Layout
from hplm.errors import InvalidInput
from hplm.levels.calibration import Calibration
from hplm.levels.plan import MOST_RUNGS, Plan
from hplm.plot.branch import Branch
from hplm.tasks import TASKS
from hplm.tenants.link import WITHOUT_LINKS, Link, has_links

Head = tuple[Layout, Mapping[str, Tensor]]
Adapter = tuple[Layout, Sequence[Mapping[str, Tensor]]]


@dataclass(frozen=True)
class LevelKnowledge:
    """A level of a tenant in memory."""

    stack: str  # the name of an upper stack
    head: Head
    adapter: Adapter | None
    calibration: Calibration


@dataclass(frozen=True)
class Knowledge:
    """A version of a tenant in memory. The tensors have the names and shapes of their layouts."""

    domain: str
    domain_version: int
    task: str
    labels: tuple[str, ...]
    head: Head | None
    adapter: Adapter | None
    version: int = 0  # its version in the store; 0: none
    calibration: Calibration | None = None
    levels: tuple[LevelKnowledge, ...] = ()  # on shallower stacks, the shallowest first
    ladder: tuple[Plan, ...] = ()  # the dearest first
    link: Link | None = None  # to a tenant of another backbone

    def check(self, tenant_id: str, branches: Iterable[Branch], width: int | None, stacks: Mapping[str, int]) -> None:
        """Raises if a backbone with these tables and stacks cannot serve the tenant.

        `width`: of the backbone's vectors; None: unknown. `stacks`: the layers of each shallower stack.
        """
        if self.task not in TASKS:
            raise InvalidInput(f"tenant {tenant_id!r} has the unknown task {self.task!r}: choose {' or '.join(TASKS)}")
        size = TASKS[self.task].head_size(len(self.labels))
        if len(self.labels) != size:
            found = len(self.labels)
            raise InvalidInput(f"tenant {tenant_id!r} has {found} labels, but the task {self.task} needs {size}")
        twice = [label for label, times in Counter(self.labels).items() if times > 1]
        if twice:
            raise InvalidInput(f"tenant {tenant_id!r} has the label {twice[0]!r} more than once: give each label once")
        try:
            "".join(self.labels).encode()
        except UnicodeEncodeError as error:  # JSON may have halves of characters
            half = error.object[error.start]
            raise InvalidInput(f"tenant {tenant_id!r} has a label with {half!r}, which is not UTF-8: send UTF-8") from None
        if (self.head is None) != TASKS[self.task].generates:
            has = "no head" if self.head is None else "a head"
            raise InvalidInput(f"tenant {tenant_id!r} has the task {self.task} and {has}: export it again")
        if self.calibration is not None and not self.calibration.suits(size):
            raise InvalidInput(
                f"tenant {tenant_id!r} has {size} labels and a calibration of another number: calibrate it again"
            )
        branch = (self.domain, self.domain_version)
        if branch not in {(branch.domain, branch.version) for branch in branches}:
            raise InvalidInput(
                f"tenant {tenant_id!r} needs version {branch[1]} of domain {branch[0]!r}, which is not served: "
                "add it with `hplm domain add` or `hplm domain update`"
            )
        self._check_levels(tenant_id, size, stacks)
        parts = (self.head, self.adapter, *(part for level in self.levels for part in (level.head, level.adapter)))
        layouts = [part[0] for part in parts if part is not None]
        for layout in layouts:
            known = layouts[0].hidden if width is None else width
            if layout.hidden != known:
                raise InvalidInput(
                    f"tenant {tenant_id!r} has width {layout.hidden}, but this backbone has {known}: train it for this backbone"
                )

    def _check_levels(self, tenant_id: str, labels: int, stacks: Mapping[str, int]) -> None:
        for level in self.levels:
            layers, layout = layers_of(level.stack, stacks), level.adapter[0] if level.adapter is not None else None
            if layout is not None and layout.layers != layers:
                raise InvalidInput(
                    f"tenant {tenant_id!r} has an adapter for {layout.layers} layers on stack {level.stack!r}, which has "
                    f"{layers}: build that level again with `hplm cascade build`"
                )
            if level.head[0].size != labels or not level.calibration.suits(labels):
                raise InvalidInput(
                    f"tenant {tenant_id!r} has {labels} labels, and its level {level.stack!r} has a head or a calibration of "
                    "another number: build that level again with `hplm cascade build`"
                )
        names = [level.stack for level in self.levels]
        if len(set(names)) < len(names) or names != sorted(names, key=stacks.__getitem__):
            raise InvalidInput(
                f"tenant {tenant_id!r} has levels on {', '.join(names)}: give each stack once, the shallowest first"
            )
        if self.levels and self.head is None:
            raise InvalidInput(f"tenant {tenant_id!r} generates text, which has no levels: leave them out")
        for plan in self.ladder:
            if not plan.suits(len(names) + 1):
                raise InvalidInput(
                    f"tenant {tenant_id!r} has a plan with level {plan.steps[-1].level}, and {len(names)} levels below its own "
                    "one: choose its ladder again with `hplm cascade select`"
                )
        if len(self.ladder) > MOST_RUNGS:
            raise InvalidInput(f"tenant {tenant_id!r} has {len(self.ladder)} plans: give {MOST_RUNGS} at most")
        if self.ladder and self.calibration is None:
            raise InvalidInput(
                f"tenant {tenant_id!r} has a ladder and no calibration of its own: calibrate it with `hplm calibrate`"
            )
        if self.link is not None and not has_links(TASKS[self.task]):
            raise InvalidInput(
                f"tenant {tenant_id!r} has the task {self.task} and a link to backbone {self.link.backbone!r}: "
                f"{WITHOUT_LINKS}; leave the link out"
            )
        if self.link is not None and (not self.link.suits(len(names) + 1) or self.calibration is None):
            raise InvalidInput(
                f"tenant {tenant_id!r} has a link to backbone {self.link.backbone!r} for other levels, or no calibration: make "
                "it again with `hplm cascade across`"
            )


def layers_of(stack: str, stacks: Mapping[str, int]) -> int:
    """Returns the layers of a stack. Raises if the export, which has `stacks`, does not have it."""
    if stack not in stacks:
        known = ", ".join(sorted(stacks)) or "none"
        raise InvalidInput(
            f"a level needs the stack {stack!r}, which is not in this export (it has {known}): make it with "
            "`hplm build stack`, export the store again, and serve that"
        )
    return stacks[stack]
