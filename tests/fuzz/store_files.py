"""Bad files in formats that the builder reads: stores, packed roots, and placements with what they are made of."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

from hypothesis import strategies as st

from builder.cascade import selection
from builder.cascade.candidates import Candidate
from builder.cascade.common_stacks import Tenants
from builder.cascade.profile import FORMAT, Profile, read_profile, save_profile
from builder.store.levels import ladder_of, levels_of, save_ladder
from builder.store.links import link_of, save_link
from builder.store.pack import MANIFEST, pack_root, unpack_root
from builder.store.store import Store
from builder.store.verification import store_parts
from hplm.levels.plan import Plan, Step
from hplm.placement.cluster import Cluster
from hplm.placement.placement import Group, Placement
from hplm.placement.profile import Profile as PlacementProfile
from hplm.placement.units import units_of
from hplm.tenants.link import Link
from testing.random_store import random_level, random_stack
from testing.toy import make_toy
from tests.fuzz.files import Files, verified
from tests.fuzz.mutations import dumped, mutated, mutated_json
from tests.fuzz.target import Found, accepts
from tests.placement.profiles import cluster_of, profile_of, write_cluster


class Stores(Files):
    """A store, as builds, `hplm export` and `hplm verify` read it."""

    weight = 0.02

    def make(self, folder):
        store = make_toy(folder / "toy").store
        random_stack(store, "small", 1, seed=1)
        acme, plan = store.tenant("acme"), Plan((Step(0, 0.9, 4.0, 0.7, reached=1.0), Step(1, weight=0.6, reached=0.4)))
        random_level(store, acme, "small", 0.3, seed=1)
        sheets = {"tokens": [8, 64], "ms": [0.5, 1.0], "watched_ms": [0.5, 1.0]}
        levels = [{"name": name, "layers": 1, "score": 0.9, "mean_ms": 1.0, "sheets": sheets} for name in ("small", "full")]
        asked = {"format": FORMAT, "precision": "fp32", "device": "cpu", "levels": [["small", "0", None], ["full", "1", None]]}
        report = {"metric": "accuracy", "levels": levels}
        plans = [Candidate(plan, 0.9, 0.01, 0.02, 0.1, (1.0, 0.4)), Candidate(Plan((Step(1),)), 0.9, 0.02, 0.03, 0.0, (1.0,))]
        save_profile(store, acme, Profile(plans, asked, report))
        save_ladder(store, acme, [plan])
        save_link(store, acme, Link("large", "acme", 1, Plan((Step(1, 0.9, 4.0, 0.7), Step(2, weight=0.6)))), {})
        return store.folder

    def names(self):
        return [name for name in super().names() if name.endswith((".json", ".safetensors"))]

    def read(self):
        def open_parts():
            store = Store(self.folder)
            store.users()
            store.branches()
            for tenant in store.tenants():
                accepts(
                    lambda tenant=tenant: (tenant.adapter_layout(store.config), tenant.head_layout(store.config)),
                    self.work,
                    True,
                )
                accepts(lambda tenant=tenant: store.tenant_weights(tenant), self.work, broken=True)
                accepts(lambda tenant=tenant: _levels(store, tenant), self.work, broken=True)
                accepts(lambda tenant=tenant: ladder_of(store, tenant), self.work, broken=True)
                accepts(lambda tenant=tenant: link_of(store, tenant), self.work, broken=True)
                accepts(lambda tenant=tenant: _selected(store, tenant), self.work, broken=True)
            for read in (store.tokenizer, store.upper, lambda: store.lower("root", 1), lambda: store.stack("small")):
                accepts(read, self.work, broken=True)

        accepts(open_parts, self.work, broken=True)
        for part in store_parts(self.folder):
            if not part.path.name.startswith("values"):
                verified(part)


def _levels(store, tenant):
    for level in levels_of(store, tenant):
        level.head_layout, level.adapter_layout  # noqa: B018
        level.weights()
        level.report()


def _selected(store, tenant):
    """Reads a tenant's profile, and selects from it."""
    if (profile := read_profile(store, tenant)) is not None:
        for one in selection.select(profile.front, selection.Target(accuracy=0), profile.own):
            selection.reported(one, profile.names)
        Tenants({tenant.id: profile}).choices(selection.Target(accuracy=0))


class Placements(Files):
    """The files of placement: a cluster, a profile and a placement, which is checked if it can be read."""

    def make(self, folder):
        profile, cluster = profile_of(), cluster_of()
        units = units_of(profile)
        group = Group("one", "m0", ("cpu:0",), 1, {"bert": ((0, 2),)}, tuple(unit.name for unit in units))
        write_cluster(cluster, folder / "cluster.json")
        profile.write(folder / "profile.json")
        Placement.of((group,), units, cluster, profile).write(folder / "placement.json")
        return folder

    def read(self):
        cluster, profile = Cluster.read(self.folder / "cluster.json"), PlacementProfile.read(self.folder / "profile.json")
        placement = Placement.read(self.folder / "placement.json")
        accepts(lambda: placement.check(cluster, profile), self.work)
        replace(placement, cluster=cluster.digest, profile=profile.digest).check(cluster, profile)


class PackedRoots(Files):
    """A root packed into a file."""

    weight = 0.2

    def make(self, folder):
        store = make_toy(folder / "toy").store
        (folder / "packed").mkdir()
        for path in (store.table_folder("root", 1) / "values", store.folder / "upper.safetensors"):
            assert path.exists()
        store.counts_folder("root", 1).mkdir(parents=True, exist_ok=True)
        pack_root(store, folder / "packed" / "root.tar")
        return folder / "packed"

    def cases(self):
        data = self.good["root.tar"]
        end = data.index(b"}\n\0") + 2
        manifest = json.loads(data[512:end])
        assert MANIFEST.encode() in data[:100]

        def with_manifest(text: bytes) -> bytes:
            room = -(-(end - 512) // 512) * 512
            return data[:512] + text[: end - 512].ljust(end - 512, b" ").ljust(room, b"\0") + data[512 + room :]

        shorter = json.dumps(manifest)
        return st.tuples(
            st.just("root.tar"), st.one_of(mutated(data), mutated_json(json.loads(shorter)).map(dumped).map(with_manifest))
        )

    def read(self):
        into = self.work / "unpacked"
        try:
            unpack_root(self.folder / "root.tar", into)
        finally:
            shutil.rmtree(into, ignore_errors=True)
            if {path.name for path in self.work.iterdir()} - {"toy", "packed"}:
                raise Found(f"files beside the store: {list(self.work.iterdir())}")


TARGETS = {
    "store": Stores,
    "placement": Placements,
    "packed-root": PackedRoots,
}
