"""Eight faults that strike one whole run, which the audit then finds clean. `make chaos` strikes 500 times."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.repository import module_command, module_environment


@pytest.mark.timeout(600)
def test_eight_faults_and_a_clean_audit(tmp_path: Path) -> None:
    report_file, kept = tmp_path / "report.json", tmp_path / "kept"
    done = subprocess.run(
        module_command("tests.chaos.pipeline.run", "--few", "--report", report_file, "--keep", kept),
        env=module_environment(),
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    print(done.stdout, done.stderr)  # pytest shows it when the run was not clean
    report = json.loads(report_file.read_text())
    [played] = report["rounds"]
    assert (played["problems"], played["audit"]["findings"]) == ([], [])
    assert done.returncode == 0
    assert report["faults"] == 8
    assert played["audit"]["clean"]
    assert played["audit"]["rolled_back_steps"] + played["audit"]["steps"] >= 8
    assert {"learner", "worker", "server", "network", "disk"} <= report["recovery_s"].keys()
