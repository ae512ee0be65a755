"""The manifests of deploy/kubernetes fit Kubernetes' schemas; a warning fails, too."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.repository import ROOT

pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed: make test-adapters")

MANIFESTS = ROOT / "deploy" / "kubernetes"
SECRETS = ("users.acl", "tls.crt", "tls.key", "ca.crt", "learner.password", "worker.password", "monitor.password")


def problems(path: Path) -> str:
    """What the validator says of a file; the test of a broken manifest shows that it would."""
    said = subprocess.run(
        [Path(sys.executable).with_name("kubernetes-validate"), "--strict", path], capture_output=True, text=True
    )
    lines = [line for line in (said.stdout + said.stderr).splitlines() if not line.startswith("INFO")]
    return "\n".join(lines) if lines or not said.returncode else f"code {said.returncode}"


@pytest.mark.parametrize("name", ["valkey", "learner", "worker", "network"])
def test_a_manifest_fits_the_schemas(name: str) -> None:
    assert problems(MANIFESTS / "base" / f"{name}.yaml") == ""


def test_a_wrong_manifest_does_not(tmp_path: Path) -> None:
    text = (MANIFESTS / "base" / "learner.yaml").read_text()
    for wrong in (text.replace("backoffLimit:", "backofLimit:"), text.replace("kind: Job", "kind: Jobb")):
        (tmp_path / "wrong.yaml").write_text(wrong)
        assert problems(tmp_path / "wrong.yaml")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl renders overlays: it is not installed")
@pytest.mark.parametrize("overlay", ["cpu", "gpu"])
def test_a_rendered_overlay_fits_the_schemas(overlay: str, tmp_path: Path) -> None:
    shutil.copytree(MANIFESTS, tmp_path / "kubernetes")
    folder = tmp_path / "kubernetes" / "overlays" / overlay
    shutil.rmtree(folder / "secrets", ignore_errors=True)
    (folder / "secrets").mkdir()
    for name in SECRETS:
        (folder / "secrets" / name).write_text("x")
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    (tmp_path / "all.yaml").write_text(done.stdout)
    assert problems(tmp_path / "all.yaml") == ""
    found = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(done.stdout)}
    pod = found["Deployment", "worker"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == f"async-rl:{overlay}"
    assert pod["volumes"][0]["secret"]["secretName"].startswith("worker-"), "secrets are renamed with their content"
    has_gpu = "nvidia.com/gpu" in pod["containers"][0]["resources"].get("limits", {})
    assert has_gpu == (overlay == "gpu")
