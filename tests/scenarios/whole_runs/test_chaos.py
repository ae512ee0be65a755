"""Eight faults that strike one whole run, which the audit then finds clean. `make chaos` strikes 500 times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos.pipeline.run import main


@pytest.mark.timeout(1800)
def test_eight_faults_and_a_clean_audit(tmp_path: Path) -> None:
    report_file, kept = tmp_path / "report.json", tmp_path / "kept"
    code = main(["--few", "--report", str(report_file), "--keep", str(kept)])
    report = json.loads(report_file.read_text())
    [played] = report["rounds"]
    assert (played["problems"], played["audit"]["findings"]) == ([], [])
    assert code == 0
    assert report["faults"] == 8
    assert played["audit"]["clean"]
    assert played["audit"]["rolled_back_steps"] + played["audit"]["steps"] >= 8
    assert {"learner", "worker", "server", "network", "disk"} <= report["recovery_s"].keys()
