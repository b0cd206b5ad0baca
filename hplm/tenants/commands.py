"""Remote management: runs a JSON command with a `Manager`, and returns a JSON answer.

{"command": "tenant.list"}                  {"command": "tenant.delete", "id": "acme"}
{"command": "tenant.add", "id": "acme", "domain": "bio", "domain_version": 1, "task": "classify", "labels": ["no", "yes"],
 "adapter": {"kind": "bottleneck", "rank": 32}, "tensors": "<a safetensors file, base64>"}
"""

from __future__ import annotations

import base64
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from hplm.adapters.layout import Layout, adapter_layout, exit_layout, head_layout
from hplm.calibration import Calibration
from hplm.errors import MISFITS, InvalidInput
from hplm.model.config import BackboneConfig
from hplm.plot.table import Table
from hplm.tasks.tasks import check_backbone, find_task
from hplm.tenants.embedding import Embedding
from hplm.tenants.exits import Exits
from hplm.tenants.knowledge import ExitKnowledge, TenantKnowledge
from hplm.tenants.listing import described
from hplm.tenants.manager import Manager
from hplm.tenants.snapshot import LIMITS, NAME

log = logging.getLogger(__name__)
LARGEST = 256 << 20  # bytes of a tenant's tensors
Word = Annotated[str, Meta(min_length=1)]
Name = Annotated[str, Meta(pattern=rf"^{NAME.pattern}\Z")]
Positive = Annotated[int, Meta(ge=1)]
Form = TypeVar("Form")
Stored = TypeVar("Stored", Calibration, Exits, Embedding)


class _Fields(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a command. This one needs none, and all refuse fields that they do not know."""


class _OfTenant(_Fields):
    id: Name


class _NewKey(_OfTenant):
    days: Any = 0


class _OfKey(_OfTenant):
    key: Word


class _OfDomain(_Fields):
    name: Word


class _NewDomain(_OfDomain):
    version: Positive = 1


_Limits = msgspec.defstruct("_Limits", [(name, Any, UNSET) for name in (*LIMITS, "homes")], bases=(_OfTenant,))


class _Adapter(_Fields):
    rank: Positive
    kind: Word | None = None
    places: Annotated[tuple[Word, ...], Meta(min_length=1)] | None = None
    function: Word | None = None


class _Version(_OfTenant):
    domain: Word
    task: Word
    domain_version: Positive = 1
    labels: tuple[Word, ...] | None = None  # in the order of the logits; a tenant without a head has none
    tensors: Annotated[str, Meta(max_length=LARGEST * 4 // 3)] = ""
    adapter: _Adapter | None = None
    head_function: Word | None = None
    calibration: dict[str, Any] | None = None
    exits: dict[str, Any] | None = None
    embedding: dict[str, Any] | None = None


class Commands:
    def __init__(self, manager: Manager, config: BackboneConfig) -> None:
        self._manager = manager
        self._config = config
        self._known: dict[str, tuple[type[Any], Callable[[Any], dict[str, Any]]]] = {
            "tenant.list": (_Fields, lambda _: self._list()),
            "tenant.show": (_OfTenant, self._show),
            "tenant.add": (_Version, lambda given: self._changed(manager.add(given.id, self._knowledge(given)))),
            "tenant.update": (_Version, lambda given: self._changed(manager.update(given.id, self._knowledge(given)))),
            "tenant.rollback": (_OfTenant, lambda given: self._changed(manager.roll_back(given.id))),
            "tenant.delete": (_OfTenant, lambda given: self._changed(manager.delete(given.id))),
            "tenant.compact": (_Fields, lambda _: {"bytes": manager.compact()}),
            "tenant.limit": (_Limits, self._limit),
            "tenant.key.add": (_NewKey, self._add_key),
            "tenant.key.revoke": (_OfKey, self._revoke_key),
            "domain.list": (_Fields, lambda _: self._domains()),
            "domain.add": (_NewDomain, self._add_domain),
            "domain.rollback": (_OfDomain, lambda given: self._changed(manager.roll_back_domain(given.name))),
            "domain.delete": (_OfDomain, lambda given: self._changed(manager.delete_domain(given.name))),
            "log": (_Fields, lambda _: {"changes": manager.registry.audit()}),
        }

    def run(self, command: str) -> str:
        try:
            given = _read("a command", dict[str, Any], json.loads(command))
        except (ValueError, RecursionError) as error:  # deep ones
            raise InvalidInput(f'the command is not JSON ({error}): send JSON such as {{"command": "tenant.list"}}') from None
        name = given.pop("command", None)
        if not isinstance(name, str) or name not in self._known:
            raise InvalidInput(f'unknown command: send one of {", ".join(self._known)}, such as {{"command": "tenant.list"}}')
        self._manager.registry.pointer()
        form, run = self._known[name]
        return json.dumps(run(_read(name, form, given)))

    def _list(self) -> dict[str, Any]:
        return {"tenants": [{"id": tenant.id, "version": tenant.version} for tenant in self._manager.current().tenants]}

    def _domains(self) -> dict[str, Any]:
        return {"domains": [{"name": branch.domain, "version": branch.version} for branch in self._manager.current().branches]}

    def _show(self, given: _OfTenant) -> dict[str, Any]:
        tenant = next((tenant for tenant in self._manager.current().tenants if tenant.id == given.id), None)
        if tenant is None:
            raise InvalidInput(f"tenant {given.id!r} is not served: `tenant.list` lists all tenants")
        return described(tenant)

    def _changed(self, change: Any) -> dict[str, Any]:
        """Waits until every reader has taken the change, and returns the answer."""
        return {**asdict(change), "late": self._manager.settle()}

    def _limit(self, given: Any) -> dict[str, Any]:
        limits = {name: value for name in (*LIMITS, "homes") if (value := getattr(given, name)) is not UNSET}
        self._manager.limit(given.id, **limits)
        return {"tenant": given.id, **limits, "late": self._manager.settle()}

    def _add_key(self, given: _NewKey) -> dict[str, Any]:
        secret, key = self._manager.add_key(given.id, given.days)
        late = self._manager.settle()
        return {"tenant": given.id, "key": key.id, "secret": secret, "expires": key.expires, "late": late}

    def _revoke_key(self, given: _OfKey) -> dict[str, Any]:
        dead = self._manager.revoke_key(given.id, given.key)
        late = self._manager.settle()
        return {"tenant": given.id, "revoked": given.key, "late": late, "dead_at": round(dead, 3)}

    def _add_domain(self, given: _NewDomain) -> dict[str, Any]:
        """Adds a domain. A table is too large for a request, so it must already be in the state's `inbox/<name>/<version>`."""
        name, version = given.name, given.version
        if self._manager.state is None:
            raise InvalidInput("a registry in a bucket has no inbox: run `hplm domain add` where the store is")
        source = self._manager.state.folder / "inbox" / name / str(version)
        if not NAME.fullmatch(name) or not source.is_dir():
            raise InvalidInput(f"table {f'{name}/{version}'!r} is not in {source.parent.parent}: copy its folder there first")
        Table(source).verify()
        change = self._manager.adopt_domain(name, version, source)
        try:
            shutil.rmtree(source)
        except OSError as error:  # it may belong to another user
            log.warning("the domain is served, but its copy in %s cannot be removed: %s", source, error)
        return self._changed(change)

    def _knowledge(self, given: _Version) -> TenantKnowledge:
        check_backbone(given.task, self._config)
        task = find_task(given.task)
        labels = (given.labels or ()) if task.has_head else ()
        if not labels and task.has_head:
            raise InvalidInput("'labels' is missing: send a list of names, in the order of the logits")
        tensors = _tensors(given.tensors) if task.has_head or given.adapter is not None else {}
        head = adapter = exits = None
        if task.has_head:
            layout = head_layout(self._config, len(labels), given.head_function)
            head = layout, _layers(tensors, layout, ["head."])[0]
        if (own := given.adapter) is not None:
            layout = adapter_layout(self._config, own.kind or "bottleneck", own.rank, own.places, own.function or "relu")
            assert layout is not None  # its rank is positive
            adapter = layout, _layers(tensors, layout, [f"adapter.{number}." for number in range(layout.layers)])
        if given.exits is not None:
            found, layout = _stored("exits", Exits.read, given.exits), exit_layout(self._config, len(labels))
            heads = _layers(tensors, layout, [f"exits.{number}." for number in range(layout.layers)])
            exits = ExitKnowledge(found, layout, heads)
        calibration = _stored("calibration", Calibration.read, given.calibration) if given.calibration is not None else None
        embedding = _stored("embedding", Embedding.read, given.embedding) if given.embedding is not None else None
        return TenantKnowledge(
            given.domain, given.domain_version, given.task, labels, head, adapter, calibration=calibration, exits=exits,
            embedding=embedding,
        )  # fmt: skip


def _read(command: str, form: type[Form], given: Any) -> Form:
    """Returns the fields of a command. Raises InvalidInput that names the first field which is missing or wrong."""
    try:
        return msgspec.convert(given, form)
    except msgspec.ValidationError as error:
        why, _, place = str(error).replace("`", "'").partition(" - at '$.")
        named = f"{place[:-1]!r} is wrong: {why}" if place else why
        raise InvalidInput(f"{command}: {named}. docs/operating.md lists the fields") from None
    except UnicodeEncodeError:  # JSON may have halves of characters
        raise InvalidInput(f"{command}: the name of a field is not UTF-8. docs/operating.md lists the fields") from None


def _stored(field: str, read: Callable[[dict[str, Any]], Stored], given: dict[str, Any]) -> Stored:
    """Reads what the header of a record file holds."""
    try:
        return read(given)
    except MISFITS as error:
        raise InvalidInput(f"{field!r} is not that of a record ({error})") from None


def _layers(tensors: dict[str, Tensor], layout: Layout, begins: Sequence[str]) -> list[dict[str, Tensor]]:
    """Returns the tensors of a head or an adapter, layer by layer, and checks their shapes against the layout.

    `begins`: what the names of each layer's tensors begin with.
    """
    layers: list[dict[str, Tensor]] = []
    for begin in begins:
        layer: dict[str, Tensor] = {}
        for name, shape in layout.shapes.items():
            tensor = tensors.get(begin + name)
            if tensor is None or tuple(tensor.shape) != shape:
                found = "missing" if tensor is None else f"of shape {tuple(tensor.shape)}"
                raise InvalidInput(f"tensor {begin + name!r} is {found}: {layout.name} needs the shape {shape}")
            if not tensor.to(layout.torch_dtype).isfinite().all():
                raise InvalidInput(f"tensor {begin + name!r} contains NaN, or a number that is infinite in {layout.dtype}")
            layer[name] = tensor.float()
        layers.append(layer)
    return layers


def _tensors(text: str) -> dict[str, Tensor]:
    try:
        return load(base64.b64decode(text, validate=True))
    except (ValueError, KeyError, SafetensorError) as error:  # KeyError: a type that torch does not have
        raise InvalidInput(f"'tensors' is not a safetensors file in base64: {error}") from None
