"""The Helm chart: the plain manifests are its own, its values are used, and other values make sense too."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from hplm.cli.main import parser
from hplm.cli.place_renew import KEPT
from tests.deploy.image import DEPLOY
from tests.deploy.manifests import KUBERNETES, NEWEST, OLDEST, Object, container, faults, find, words, workload
from tests.deploy.programs import kubernetes_program, run
from tests.deploy.test_kubernetes import check_journals, check_share_of_routers

CHART = DEPLOY / "helm/hplm"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
TEMPLATES = {path.name: path.read_text("utf-8") for path in sorted((CHART / "templates").iterdir())}


def rendered(release: str, namespace: str, *options: str) -> list[Object]:
    helm = kubernetes_program("helm")
    return list(yaml.safe_load_all(run(helm, "template", release, CHART, "--namespace", namespace, *options)))


def test_helm_finds_no_fault_and_the_plain_manifests_are_those_of_the_chart(tmp_path):
    run(kubernetes_program("helm"), "lint", "--strict", CHART)
    script = KUBERNETES / "render.sh"
    run(str(script), tmp_path, env={**os.environ, "HELM": kubernetes_program("helm")})
    fresh = {path.relative_to(tmp_path): path.read_text("utf-8") for path in tmp_path.rglob("*.yaml")}
    assert len(fresh) == 5
    for file, content in fresh.items():
        assert (KUBERNETES / file).read_text("utf-8") == content, f"{file} is old: run deploy/kubernetes/render.sh"


def paths(values: dict[str, Any], above: str = "") -> set[str]:
    """Returns the path of each value that is no group of others."""
    found: set[str] = set()
    for name, value in values.items():
        path = f"{above}.{name}"
        found |= paths(value, path) if isinstance(value, dict) and value else {path}
    return found


def test_templates_use_every_value_and_no_other():
    used = set(re.findall(r"\.Values((?:\.\w+)+)", "".join(TEMPLATES.values())))
    known = paths(VALUES)
    groups = {path for path in used if any(own.startswith(f"{path}.") for own in known)}
    assert used - groups <= known
    assert not [path for path in known - used if not any(path.startswith(f"{group}.") for group in groups)]


def test_another_release_with_other_values_is_whole_too():
    """A follower sees the free space of its volume. Of an emptyDir it would see the node's."""
    objects = rendered(
        *("green", "shop"),
        *("--set", "pool.name=law", "--set", "pool.most=12", "--set", "repository.claim=export-2"),
        *("--set", "secrets.admin=a", "--set", "secrets.source=s", "--set", "clusterDomain=k8s.example"),
        *("--set", "monitoring.enabled=true", "--set", "autoscaling.with=hpa", "--set", "pool.nodeSelector.disk=fast"),
        *("--set", "router.replicas=3", "--set", "pool.storageClass=local", "--set", "pool.stateSize=7Gi"),
    )
    assert not list(faults(objects, {"export-2", "a/admin", "s/token"}))
    assert all(one["metadata"]["name"].startswith("green") and one["metadata"]["namespace"] == "shop" for one in objects)
    assert workload(objects, "green-law").pod["nodeSelector"] == {"disk": "fast"}
    (described,) = [one["data"]["cluster.json"] for one in objects if one["metadata"]["name"] == "green-cluster"]
    hosts = [replica["http"] for replica in yaml.safe_load(described)["pools"][0]["replicas"]]
    assert len(hosts) == 12 and hosts[11] == "green-law-11.green-law.shop.svc.k8s.example:8000"
    check_share_of_routers(objects, "green-router", 3)
    for name in ("green-law", "green-router"):
        (state,) = [volume for volume in workload(objects, name).pod["volumes"] if volume["name"] == "state"]
        claim = state["ephemeral"]["volumeClaimTemplate"]["spec"]
        assert claim["storageClassName"] == "local" and claim["resources"]["requests"]["storage"] == "7Gi"


@pytest.mark.parametrize(
    "wrong", ["autoscaling.with=kedda", "pool.most=1", "pool.replicas=9", "autoscaling.least=9", "renewal.enabled=true"]
)
def test_values_that_make_no_sense_are_refused(wrong):
    value = wrong.partition("=")[0]
    with pytest.raises(AssertionError, match=re.escape(value)):
        rendered("hplm", "hplm", "--set", wrong)


def test_another_description_of_the_cluster_replaces_the_routers():
    def annotations(*options: str) -> dict[str, str]:
        return workload(rendered("hplm", "hplm", *options), "hplm-router").template["metadata"]["annotations"]

    assert annotations() == annotations("--set", "pool.replicas=3") != annotations("--set", "pool.most=9")


RENEWAL = ("--set", "journals.claim=journals", "--set", "renewal.enabled=true", "--set", "renewal.options={--slo-scale=5}")


def test_a_placement_is_renewed_from_the_journals_of_all_replicas():
    objects = rendered("hplm", "hplm", *RENEWAL)
    assert not list(faults(objects, {"hplm-repository", "hplm-admin/admin", "hplm-source-token/token", "journals"}))
    for version in (OLDEST, NEWEST):
        kubernetes_validate.validate(find(objects, "CronJob", "hplm-renewal"), version, strict=True)
        kubernetes_validate.validate(find(objects, "StatefulSet", "hplm-all"), version, strict=True)
    check_journals(objects)


@pytest.mark.parametrize("status, ends", [(0, 0), (KEPT, 0), (1, 1)])
def test_the_job_fails_only_if_the_search_does(tmp_path, status, ends):
    """Its script runs here, with a folder for the claim and a program that keeps the arguments of `hplm`."""
    stub = tmp_path / "bin/hplm"
    for name in ("bin", "placement", "hplm-all-0", "hplm-all-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "journal.jsonl").touch() if name.startswith("hplm") else None
    stub.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/said\nexit {status}\n')
    stub.chmod(0o755)
    script = [
        word.replace("/journals", str(tmp_path))
        for word in words(container(rendered("hplm", "hplm", *RENEWAL), "hplm-renewal", "renew"))
    ]
    done = subprocess.run(script, env={**os.environ, "PATH": f"{stub.parent}:{os.environ['PATH']}"})
    assert done.returncode == ends
    renewed = parser().parse_args((tmp_path / "said").read_text().splitlines())
    assert renewed.trace == [tmp_path / f"hplm-all-{number}/journal.jsonl" for number in range(2)]
    assert (renewed.action, renewed.slo_scale, renewed.to) == ("renew", 5, Path("next.json"))


@pytest.mark.parametrize("file", ["source.conf", "scaling.yaml", "alerts.yaml"])
def test_files_of_the_chart_are_those_of_deploy(file):
    link = CHART / "files" / file
    assert link.is_symlink() and not Path(os.readlink(link)).is_absolute() and link.resolve().is_relative_to(DEPLOY)
