"""Ray's workers, on other machines: they need no shared disk, and this process alone writes the store.

A task gets the files that it reads. On its node they lie below one folder, under their paths here. It does its job in the store
there as a worker process does here, and returns the tenant's new files.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pickle
import secrets
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from builder.importing.matching import Refused
from builder.store.resumable import replaced
from builder.store.store import FORMAT, Store, written_folder
from builder.store.version import REPORT
from builder.tables.build_folder import locked_tenant
from builder.worker_processes import BYTES_EACH, Workers
from hplm.errors import InvalidInput
from hplm.tenants.snapshot import NAME

AHEAD = 2  # tasks that wait at the cluster, with their inputs
RETRIES = 3  # of a task whose worker or node has died
UNREAD = {".pt", ".pth", ".onnx", ".h5", ".msgpack"}  # files beside a checkpoint, such as an optimizer's, which no task reads


@contextmanager
def ray_workers(
    address: str, count: int | None, store: Store, domains: Iterable[str], others: Iterable[Path], gpus: int
) -> Generator[Workers, None, None]:
    """A pool whose jobs are tasks of a Ray cluster. Each gets the name of its tenant, and things that name its files.

    `count`: so many at a time; default: the cluster's CPUs, and some ahead. `domains`, `others`: tables and files that all
    need. An error or Ctrl-C cancels all.
    """
    ray = _joined(address)
    try:
        away = _Away(ray, store, gpus, _shared(store, domains, others))
        pool = Workers(count or int(ray.cluster_resources().get("CPU", 1)) + AHEAD, lambda: away)
        try:
            yield pool
        except BaseException:
            away.cancel()
            pool.shutdown(cancel_futures=True)
            raise
        else:
            pool.shutdown()
        finally:
            away.remove_files()
    finally:
        ray.shutdown()


def _joined(address: str) -> Any:
    """Returns Ray, as a driver of the cluster."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_task_oom_retries", "0")  # Ray would try for ever what lacks memory
    try:
        ray = import_module("ray")
    except ModuleNotFoundError:
        raise InvalidInput("--ray needs the package ray: `pip install -e '.[ray]'`, here and on all nodes") from None
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray raises any
        said = next(iter(str(error).strip().splitlines()), "")
        way_out = "give HOST:PORT of a cluster's head, auto on a machine of a cluster, or local for one of this machine alone"
        raise InvalidInput(f"--ray {address}: {said}: {way_out}") from None
    return ray


def _shared(store: Store, domains: Iterable[str], others: Iterable[Path]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the files that all tasks need, by path."""
    folders = {store.table_folder(*step) for domain in domains for step in store.chain(domain, store.latest(domain))}
    found = [store.folder / name for name in ("backbone.json", "tokenizer.json", "upper.safetensors")]
    found += [file for folder in (*folders, *others) for file in _files_of(folder)]
    yield from ((str(file.resolve()), np.fromfile(file, np.uint8)) for file in found)


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path] if path.exists() else []
    return [file for file in path.iterdir() if file.is_file() and file.suffix not in UNREAD]


class _Away(Executor):
    """Does each job as a task, while its thread waits."""

    def __init__(self, ray: Any, store: Store, gpus: int, shared: Iterable[tuple[str, np.ndarray]]) -> None:
        self._ray, self._store, self._running, self._cancelled = ray, store, set[Any](), False
        self._root = f"{tempfile.gettempdir()}/hplm-{secrets.token_hex(8)}"
        self._shared = {path: ray.put(content) for path, content in shared}  # fetched once by each node
        model = Path(store.model)
        model = f"{self._root}{model.resolve()}" if model.exists() else store.model
        described = json.dumps({"format": FORMAT, "model": model}).encode()
        self._shared[f"{store.folder.resolve()}/store.json"] = ray.put(np.frombuffer(described, np.uint8))
        self._task = ray.remote(num_cpus=1, num_gpus=gpus, memory=BYTES_EACH, max_retries=RETRIES)(_done_there)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done = Future[Any]()
        try:
            done.set_result(self._do(fn))
        except Exception as error:
            done.set_exception(error)
        return done

    def _do(self, job: Any) -> Any:
        tenant_id, given = job.args
        if not NAME.fullmatch(tenant_id):
            return job()  # which refuses it
        store, errors = self._store, self._ray.exceptions
        with locked_tenant(store, tenant_id):
            had, refused = store.tenant_versions(tenant_id), Refused.of(store, tenant_id).file
            before = [store.tenant_folder(tenant_id, version) for version in had]
            paths = _paths_in(given)
            own = {str(file.resolve()): file.read_bytes() for path in (refused, *paths) for file in _files_of(path)}
            own |= {str(file.resolve()): self._there(file, paths) for folder in before for file in _files_of(folder)}
            there = f"{self._root}{store.folder.resolve()}"
            task = self._task.remote(self._root, there, self._shared, own, tenant_id, had, _packed(job, "", self._root))
            self._running.add(task)
            try:
                if self._cancelled:
                    self._ray.cancel(task, force=True)
                result, versions, kept = _unpacked(self._ray.get(task))
            except errors.RayTaskError as error:
                raise error.cause or error from error
            except errors.RayError as error:
                raise BrokenProcessPool(str(error)) from error
            finally:
                self._running.discard(task)
            for version, files in versions.items():
                with written_folder(store.tenant_folder(tenant_id, version)) as folder:
                    for name, content in files.items():
                        (folder / name).write_bytes(content)
            refused.unlink(missing_ok=True)
            if kept is not None:
                refused.parent.mkdir(exist_ok=True)
                with replaced(refused) as temporary:
                    temporary.write_bytes(kept)
            return result

    def _there(self, file: Path, paths: list[Path]) -> bytes:
        """Returns a file of a version. Its report says that it was made of these paths as they are there."""
        content = file.read_bytes()
        for path in paths if file.name == REPORT else ():
            whole = str(path.resolve())
            content = content.replace(json.dumps(whole).encode(), json.dumps(self._root + whole).encode())
        return content

    def cancel(self) -> None:
        """Ends all tasks, and those that are submitted later."""
        self._cancelled = True
        for task in [*self._running]:
            self._ray.cancel(task, force=True)

    def remove_files(self) -> None:
        """Removes the files on all nodes."""
        affinity = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        remove = self._ray.remote(num_cpus=0)(shutil.rmtree)  # a function of ours would import torch there first
        nodes = [affinity(node_id=node["NodeID"], soft=False) for node in self._ray.nodes() if node["Alive"]]
        tasks = [remove.options(scheduling_strategy=node).remote(self._root, True) for node in nodes]
        self._ray.wait(tasks, num_returns=len(tasks), timeout=30)


def _paths_in(given: Any) -> list[Path]:
    """Returns what a tenant alone needs: the folder to import, or the files among the options of a build."""
    found = [given] if isinstance(given, Path) else [given["train"], given["dev"], given["training"].teacher]
    return [one for one in found if isinstance(one, Path)]


def _done_there(
    root: str, store: str, shared: Mapping[str, Any], own: Mapping[str, bytes], tenant_id: str, had: list[int], job: bytes
) -> bytes:
    """Does a job on a node. Returns its result, and the files of the tenant's new versions and of its refusal."""
    torch.set_num_threads(1)
    _receive(root, shared)
    for path, content in own.items():
        _written(root, path).write_bytes(content)
    opened = Store(Path(store))
    refused = Refused.of(opened, tenant_id).file
    try:
        result = _unpacked(job)()
        new = (opened.tenant_folder(tenant_id, one) for one in opened.tenant_versions(tenant_id) if one not in had)
        versions = {int(folder.name): {file.name: _content(file, root) for file in folder.iterdir()} for folder in new}
        kept = refused.read_bytes() if refused.exists() else None
        return _packed((result, versions, kept), root, "")
    finally:
        for path in (*(Path(root + name) for name in own), refused):
            path.unlink(missing_ok=True)
        shutil.rmtree(opened.folder / "tenants" / tenant_id, ignore_errors=True)


def _receive(root: str, shared: Mapping[str, Any]) -> None:
    """Writes the files that all tasks need. The first task of a node does it, and others wait."""
    ray = import_module("ray")
    Path(root).mkdir(exist_ok=True)
    with open(f"{root}/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (received := Path(root, "received")).exists():
            for path, content in shared.items():
                ray.get(content).tofile(_written(root, path))
            received.touch()


def _written(root: str, path: str) -> Path:
    (file := Path(root + path)).parent.mkdir(parents=True, exist_ok=True)
    return file


def _content(file: Path, root: str) -> bytes:
    """Returns what a file holds. A report names paths as they are at the driver."""
    content = file.read_bytes()
    return content.replace(root.encode(), b"") if file.suffix in (".json", ".html") else content


class _Packer(pickle.Pickler):
    """Packs things for the other side, on which what lies below `here` lies below `there`."""

    def __init__(self, file: io.BytesIO, here: str, there: str) -> None:
        super().__init__(file)
        self._here, self._there = here, there

    def persistent_id(self, obj: Any) -> tuple[str, str] | None:
        if isinstance(obj, Path):
            return "path", self._there + str(obj.resolve()).removeprefix(self._here)
        if self._here and isinstance(obj, str) and self._here in obj:
            return "text", obj.replace(self._here, self._there)
        return None


class _Unpacker(pickle.Unpickler):
    def persistent_load(self, pid: tuple[str, str]) -> Path | str:
        kind, text = pid
        return Path(text) if kind == "path" else text


def _packed(thing: Any, here: str, there: str) -> bytes:
    _Packer(file := io.BytesIO(), here, there).dump(thing)
    return file.getvalue()


def _unpacked(content: bytes) -> Any:
    return _Unpacker(io.BytesIO(content)).load()
