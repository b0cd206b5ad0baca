"""Measures a profile of a repository (AlpaServe 4.1): each layer's time alone, while the other cores compute too.

Each backbone and each number of devices a stage is measured in a process of its own, which has the cores that it is given, as
an engine would have them.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hplm.engine.backbone import Backbone
from hplm.engine.engine import Engine, resolve_device
from hplm.engine.service import ANSWERING_NS
from hplm.engine.settings import STAGES, EncoderSettings
from hplm.errors import Internal, InvalidInput
from hplm.location import Location
from hplm.model.config import BackboneConfig
from hplm.model.cpu import compute_with
from hplm.parameters import parameters_of
from hplm.placement.cluster import check_cores, check_kind, cores_of
from hplm.placement.files import refuse_twice
from hplm.placement.profile import BackboneProfile, FitError, Profile, Shape, Terms
from hplm.placement.samples import Sampler, Samples, fitted
from hplm.tenants.models import upper_config

HOP_TOKENS = (1, 64, 256, 1024)
HOPS = 50
ROUNDS = 5  # in which each batch is measured once
WAY_OUT = "give one core a device, such as --devices cpu:0,cpu:1, or a GPU, such as cuda:0"


@dataclass(frozen=True)
class ProfiledBackbone:
    """A backbone that is profiled."""

    folder: Path
    config: BackboneConfig
    parameters: dict[str, str]  # of its engine, without stages: each layer is measured by itself

    @property
    def name(self) -> str:
        return self.config.name


def profile_repository(
    backbones: Sequence[ProfiledBackbone],
    devices: Sequence[str],
    intra: Sequence[int],
    state: Location | None,
) -> Profile:
    """`intra`: the numbers of devices a stage to measure.

    For the way through the server ANSWERING_NS are assumed, and that it takes no time from the cores.
    """
    found: dict[str, BackboneProfile] = {}
    errors: list[FitError] = []
    for backbone in backbones:
        measured: dict[int, tuple[BackboneProfile, Samples]] = {}
        for count in intra:
            with _busy(backbone.folder, cores_of(devices[count:])):
                measured[count] = _apart(backbone, devices[:count], state)
        own = _timed(measured, bool(cores_of(devices)))
        found[backbone.name] = own
        errors += [samples.error(sum(own.times[count], Terms())) for count, (_, samples) in measured.items()]
    error = FitError(float(np.mean([one.mean for one in errors])), max(one.max for one in errors))
    return Profile(fingerprint(), found, _hop(devices, [backbone.config for backbone in backbones]), error)


def check_devices(devices: Sequence[str], intra: Sequence[int]) -> None:
    """Refuses devices that this machine does not have, and numbers of devices a stage that cannot be measured with them."""
    if not devices or not intra:
        raise InvalidInput(f"no devices, or no numbers of devices a stage, are named: {WAY_OUT}, and --intra 1,2")
    refuse_twice("--devices", "device", devices, WAY_OUT)
    refuse_twice("--intra", "number", intra, "give each once, such as --intra 1,2")
    check_kind("--devices", devices)
    cores = cores_of(devices)
    check_cores(cores)
    for device in devices:
        if not cores:
            resolve_device(device)
    for count in intra:
        if not 1 <= count <= len(devices):
            raise InvalidInput(f"--intra {count}: {len(devices)} devices are named, so give 1 to {len(devices)}")
        if count > 1 and not cores:
            raise InvalidInput(f"--intra {count}: a stage on several GPUs is not supported yet, so give 1")


def profiled_backbones(repository: Path) -> list[ProfiledBackbone]:
    """Returns the encoders of a repository. Decoders are not placed yet."""
    folders = [path.parent for path in sorted(repository.glob(f"*/1/{Backbone.CONFIG}"))]
    if not folders:
        raise InvalidInput(f"{repository} contains no backbone: name the folder that `hplm export` wrote")
    known = {folder.parent.name: BackboneConfig.load(folder / Backbone.CONFIG) for folder in folders}
    chosen = [name for name, config in known.items() if not config.is_decoder]
    if not chosen:
        raise InvalidInput(f"{repository} contains only decoders, which placement does not support yet: give encoders")
    configs = {name: upper_config(repository, name) for name in chosen}
    missing = next((path for path in configs.values() if not path.is_file()), None)
    if missing is not None:
        raise InvalidInput(f"{missing} is missing: write the repository again with `hplm export` or `hplm place emit`")
    return [
        ProfiledBackbone(repository / name / "1", known[name], {**parameters_of(configs[name]), STAGES: ""}) for name in chosen
    ]


def fingerprint() -> dict[str, str]:
    """Returns what times depend on: the processor, how many cores, the GPU, and torch's version."""
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    processor = next((line.split(":", 1)[1] for line in lines if line.startswith("model name")), platform.machine())
    found = {"processor": " ".join(processor.split()), "cores": str(os.cpu_count()), "torch": torch.__version__}
    return found | ({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {})


def measure(
    backbone: ProfiledBackbone, devices: Sequence[str], state: Location | None, label: str, rounds: int
) -> tuple[BackboneProfile, Samples]:
    """Measures in this process, on the cores that these devices are. Returns the profile without times."""
    if cores := cores_of(devices):
        os.sched_setaffinity(0, cores)
        compute_with(len(cores))
    settings = EncoderSettings.read({**backbone.parameters, **device_parameters(devices)})
    sampler = Sampler(backbone.folder, settings, state)
    return sampler.profile(), sampler.take(rounds, label)


def device_parameters(devices: Sequence[str], engines: int = 1) -> dict[str, str]:
    """Returns the parameters of an engine on these devices, which so many engines share."""
    if cores_of(devices):
        return {"device": "cpu", "threads": str(max(1, len(devices) // engines))}
    return {"device": devices[0]}


def _apart(backbone: ProfiledBackbone, devices: Sequence[str], state: Location | None) -> tuple[BackboneProfile, Samples]:
    label = f"{backbone.name}, {len(devices)} device{'s' * (len(devices) > 1)} a stage"
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(measure, backbone, devices, state, label, ROUNDS).result()
        except BrokenProcessPool:
            raise Internal(
                f"the process that measured {label} was killed: see its messages above, or whether the machine has enough "
                "memory"
            ) from None


@contextmanager
def _busy(folder: Path, cores: Sequence[int]) -> Generator[None]:
    """Keeps these cores computing the same backbone, as the other devices of a cluster do. Waits until they do."""
    context = multiprocessing.get_context("spawn")
    stop, begun = context.Event(), [context.Event() for _ in cores]
    processes = [
        context.Process(target=_keep_busy, args=(folder, core, event, stop), daemon=True)
        for core, event in zip(cores, begun, strict=True)
    ]
    try:
        for process in processes:
            process.start()
        for process, event in zip(processes, begun, strict=True):
            while not event.wait(0.1):
                if not process.is_alive():
                    raise Internal(
                        f"the process that keeps a core busy ended with code {process.exitcode}: see its messages above"
                    )
        yield
    finally:
        stop.set()
        for process in processes:
            if process.pid is not None:
                process.join()


def _keep_busy(folder: Path, core: int, begun: Event, stop: Event) -> None:
    os.sched_setaffinity(0, {core})
    compute_with(1)
    engine = Engine(Backbone(folder).upper(), torch.device("cpu"), torch.float32)
    while not stop.is_set():
        engine.seconds(texts=2, tokens=32)
        begun.set()


def _timed(measured: Mapping[int, tuple[BackboneProfile, Samples]], on_cores: bool) -> BackboneProfile:
    """Returns a profile with its times. `measured`: by the number of devices a stage."""
    times = {count: tuple(map(samples.terms, samples.layer_ns.T)) for count, (_, samples) in measured.items()}
    own, samples = measured[min(measured)]
    core, around = samples.terms(samples.around_ns), Terms(batch_ns=float(ANSWERING_NS))
    if not on_cores:  # a GPU does not wait for the work of cores
        core, around = Terms(), around + core
    return replace(own, times=times, around=around, core=core)


def _hop(devices: Sequence[str], configs: Sequence[BackboneConfig]) -> Terms:
    """Measures how long it takes to hand a batch of the widest backbone from one thread to another, which copies it once."""
    hidden = max(config.hidden for config in configs)
    to = resolve_device("cpu" if cores_of(devices) else devices[-1])
    source = resolve_device("cpu" if cores_of(devices) else devices[0])

    def receive(x: Tensor) -> int:
        """Returns when it has copied the batch."""
        _ = torch.empty_like(x, device=to).copy_(x)
        if to.type == "cuda":
            torch.cuda.synchronize(to)
        return time.perf_counter_ns()

    taken: list[float] = []
    with ThreadPoolExecutor(1) as receiver:
        for tokens in HOP_TOKENS:
            x, own = torch.randn(tokens, hidden, device=source), list[int]()
            for _ in range(HOPS):
                start = time.perf_counter_ns()
                own.append(receiver.submit(receive, x).result() - start)
            taken.append(float(np.median(own)))
    return fitted([Shape(tokens, 0, 0) for tokens in HOP_TOKENS], np.array(taken))
