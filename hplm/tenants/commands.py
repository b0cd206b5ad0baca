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
from typing import Any, TypeGuard, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from hplm.adapters.layout import Layout, adapter_layout, exit_layout, head_layout
from hplm.errors import MISFITS, InvalidInput
from hplm.levels.calibration import Calibration
from hplm.model.config import BackboneConfig
from hplm.plot.table import Table
from hplm.tasks import check_backbone, find_task
from hplm.tenants.exits import Exits
from hplm.tenants.knowledge import Adapter, ExitKnowledge, Head, Knowledge
from hplm.tenants.listing import described
from hplm.tenants.manager import Manager
from hplm.tenants.snapshot import LIMITS, NAME

log = logging.getLogger(__name__)
LARGEST = 256 << 20  # bytes of a tenant's tensors
Default = TypeVar("Default")


class Commands:
    def __init__(self, manager: Manager, config: BackboneConfig) -> None:
        self._manager = manager
        self._config = config
        self._known: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "tenant.list": self._list,
            "tenant.show": self._show,
            "tenant.add": lambda given: self._changed(manager.add(_name(given), self._knowledge(given))),
            "tenant.update": lambda given: self._changed(manager.update(_name(given), self._knowledge(given))),
            "tenant.rollback": lambda given: self._changed(manager.roll_back(_name(given))),
            "tenant.delete": lambda given: self._changed(manager.delete(_name(given))),
            "tenant.compact": lambda given: {"bytes": manager.compact()},
            "tenant.limit": self._limit,
            "tenant.key.add": self._add_key,
            "tenant.key.revoke": self._revoke_key,
            "domain.list": self._domains,
            "domain.add": self._add_domain,
            "domain.rollback": lambda given: self._changed(manager.roll_back_domain(_text(given, "name"))),
            "domain.delete": lambda given: self._changed(manager.delete_domain(_text(given, "name"))),
            "log": lambda given: {"changes": manager.registry.audit()},
        }

    def run(self, command: str) -> str:
        try:
            given = json.loads(command)
        except (ValueError, RecursionError) as error:  # deep ones
            raise InvalidInput(f'the command is not JSON ({error}): send JSON such as {{"command": "tenant.list"}}') from None
        if not _is_object(given) or str(given.get("command")) not in self._known:
            raise InvalidInput(f'unknown command: send one of {", ".join(self._known)}, such as {{"command": "tenant.list"}}')
        self._manager.registry.check_begun()
        return json.dumps(self._known[given["command"]](given))

    def _list(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"tenants": [{"id": tenant.id, "version": tenant.version} for tenant in self._manager.current().tenants]}

    def _show(self, given: dict[str, Any]) -> dict[str, Any]:
        name = _name(given)
        tenant = next((tenant for tenant in self._manager.current().tenants if tenant.id == name), None)
        if tenant is None:
            raise InvalidInput(f"tenant {name!r} is not served: `tenant.list` lists all tenants")
        return described(tenant)

    def _changed(self, change: Any) -> dict[str, Any]:
        """Waits until every reader has taken the change, and returns the answer."""
        return {**asdict(change), "late": self._manager.settle(change.generation)}

    def _limit(self, given: dict[str, Any]) -> dict[str, Any]:
        limits = {name: given[name] for name in (*LIMITS, "homes") if name in given}
        self._manager.limit(_name(given), **limits)
        return {"tenant": given["id"], **limits, "late": self._manager.settle_now()}

    def _add_key(self, given: dict[str, Any]) -> dict[str, Any]:
        secret, key = self._manager.add_key(_name(given), given.get("days", 0))
        late = self._manager.settle_now()
        return {"tenant": given["id"], "key": key.id, "secret": secret, "expires": key.expires, "late": late}

    def _revoke_key(self, given: dict[str, Any]) -> dict[str, Any]:
        dead = self._manager.revoke_key(_name(given), _text(given, "key"))
        late = self._manager.settle_now()
        return {"tenant": given["id"], "revoked": given["key"], "late": late, "dead_at": round(dead, 3)}

    def _domains(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"domains": [{"name": branch.domain, "version": branch.version} for branch in self._manager.current().branches]}

    def _add_domain(self, given: dict[str, Any]) -> dict[str, Any]:
        """Adds a domain. A table is too large for a request, so it must already be in the state's `inbox/<name>/<version>`."""
        name, version = _text(given, "name"), _whole_number(given, "version", 1)
        if self._manager.state is None:
            raise InvalidInput("a state in a bucket has no inbox: run `hplm domain add` where the store is")
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

    def _knowledge(self, given: dict[str, Any]) -> Knowledge:
        task = _text(given, "task")
        check_backbone(task, self._config)
        generates = find_task(task).generates
        labels = [] if generates else _names(given, "labels")
        tensors = {} if generates and _adapter(given) is None else _tensors(given)
        return Knowledge(
            domain=_text(given, "domain"),
            domain_version=_whole_number(given, "domain_version", 1),
            task=task,
            labels=tuple(labels),
            head=None if generates else _given_head(given, self._config, tensors, len(labels)),
            adapter=_given_adapter(given, self._config, tensors),
            calibration=_calibration(given),
            exits=_given_exits(given, self._config, task, labels),
        )


def _given_head(given: dict[str, Any], config: BackboneConfig, tensors: dict[str, Tensor], labels: int) -> Head:
    layout = head_layout(config, labels, _word(given, "head_function", None))
    return layout, _layers(tensors, layout, ["head."])[0]


def _given_adapter(given: dict[str, Any], config: BackboneConfig, tensors: dict[str, Tensor]) -> Adapter | None:
    adapter = _adapter(given)
    if adapter is None:
        return None
    places = tuple(_names(adapter, "places")) if adapter.get("places") is not None else None
    kind, function = _word(adapter, "kind", "bottleneck"), _word(adapter, "function", "relu")
    layout = adapter_layout(config, kind, _whole_number(adapter, "rank"), places, function)
    assert layout is not None  # its rank is positive
    return layout, _layers(tensors, layout, [f"adapter.{number}." for number in range(layout.layers)])


def _calibration(given: dict[str, Any]) -> Calibration | None:
    if (stored := given.get("calibration")) is None:
        return None
    try:
        return Calibration.read(stored)
    except MISFITS as error:
        raise InvalidInput(f"'calibration' is not that of a record ({error})") from None


def _given_exits(given: dict[str, Any], config: BackboneConfig, task: str, labels: Sequence[str]) -> ExitKnowledge | None:
    if (stored := given.get("exits")) is None:
        return None
    try:
        exits = Exits.read(stored)
    except MISFITS as error:
        raise InvalidInput(f"'exits' is not that of a record ({error})") from None
    layout = exit_layout(config, find_task(task).exit_outputs(labels))
    heads = _layers(_tensors(given), layout, [f"exits.{number}." for number in range(layout.layers)])
    return ExitKnowledge(exits, layout, heads)


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


def _tensors(given: dict[str, Any]) -> dict[str, Tensor]:
    text = _text(given, "tensors")
    if len(text) > LARGEST * 4 // 3:
        raise InvalidInput(f"'tensors' has {len(text):,} characters: send at most {LARGEST:,} bytes of tensors for a tenant")
    try:
        return load(base64.b64decode(text, validate=True))
    except (ValueError, KeyError, SafetensorError) as error:  # KeyError: a type that torch does not have
        raise InvalidInput(f"'tensors' is not a safetensors file in base64: {error}") from None


def _is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _is_list(value: Any) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def _name(given: dict[str, Any]) -> str:
    name = _text(given, "id")
    if not NAME.fullmatch(name):
        raise InvalidInput(
            f"tenant id {name!r} is invalid: use 1-64 lower-case letters, digits, '.', '_' and '-', and begin with a letter "
            "or digit"
        )
    return name


def _text(given: dict[str, Any], field: str) -> str:
    value = given.get(field)
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"{given['command']} needs {field!r}: send a string that is not empty")
    return value


def _word(given: dict[str, Any], field: str, otherwise: Default) -> str | Default:
    value = given.get(field)
    if value is not None and not isinstance(value, str):
        raise InvalidInput(f"{field!r} is {value!r}: send a name")
    return otherwise if value is None else value


def _adapter(given: dict[str, Any]) -> dict[str, Any] | None:
    value: Any = given.get("adapter")
    if value is not None and not _is_object(value):
        raise InvalidInput('\'adapter\' is not an object: send one such as {"kind": "bottleneck", "rank": 32}')
    return value


def _names(given: dict[str, Any], field: str) -> list[str]:
    value: Any = given.get(field)
    if not _is_list(value) or not value or not all(isinstance(name, str) and name for name in value):
        raise InvalidInput(f"{field!r} must be a list of names" + (", in the order of the logits" if field == "labels" else ""))
    return value


def _whole_number(given: dict[str, Any], field: str, otherwise: int | None = None) -> int:
    value = given.get(field, otherwise)
    if type(value) is not int or value < 1:  # not isinstance: in Python, True is an int too
        raise InvalidInput(f"{field!r} is {value!r}: send a positive whole number")
    return value
