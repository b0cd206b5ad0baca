"""A link: where texts of a tenant go on whose answers are not sure enough in its own backbone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hplm.levels.plan import Plan
from hplm.tasks import Task

ONWARD = "ONWARD"  # the output of upper that says what another backbone is to read of a text; only for the model `hplm`
# Backbones divide a passage into other tokens, so that an answer which is a piece of one cannot go on.
WITHOUT_LINKS = "links are for tasks whose answers have a confidence and are not pieces of a passage"


@dataclass(frozen=True)
class Link:
    """Leads to a tenant of another backbone, with the same task and labels."""

    backbone: str
    tenant: str  # its name there
    version: int  # that was profiled, of the store
    plan: Plan  # through levels of the tenant that has the link; the last step, one level deeper than all of them, is there

    @classmethod
    def read(cls, stored: Mapping[str, Any]) -> Link:
        """Reads what `asdict` has written. Raises TypeError or KeyError if a field is missing or of another type."""
        link = cls(stored["backbone"], stored["tenant"], stored["version"], Plan.read(stored["plan"]))
        if not type(link.backbone) is type(link.tenant) is str or type(link.version) is not int:
            raise TypeError("a link has a field of another type")
        return link

    @property
    def weight(self) -> float:
        """The weight of the answer there beside the one before."""
        return self.plan.steps[-1].weight

    @property
    def prunes(self) -> bool:
        return any(step.alpha for step in self.plan.steps)

    def suits(self, levels: int) -> bool:
        """Whether it starts at a tenant with so many levels, its own one included."""
        return len(self.plan.steps) > 1 and self.plan.steps[-1].level == levels


def has_links(task: Task) -> bool:
    """Whether texts of this task can go on in another backbone."""
    return task.evidence is not None and task.combined is not None and not task.needs_pair
