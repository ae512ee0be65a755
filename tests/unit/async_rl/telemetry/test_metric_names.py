"""Pages, dashboards and alert rules name metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from async_rl.telemetry import METRICS
from async_rl.telemetry.sinks.prometheus import exported_name
from tests.support.repository import ROOT

DASHBOARD = ROOT / "deploy" / "grafana" / "async_rl.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
EXPORTED = re.compile(
    "|".join([*(re.sub(r"\\{.*?\\}", ".+", re.escape(each.name)).replace("/", "_") for each in METRICS), "step", "eval_.*"])
)


@pytest.mark.parametrize("file", [DASHBOARD, ALERTS], ids=lambda file: file.name)
def test_every_exported_name_is_in_the_table(file: Path) -> None:
    names = set(re.findall(r"\basync_rl_([a-z0-9_]+)", file.read_text()))
    assert len(names) > 10
    for name in names:
        assert EXPORTED.fullmatch(name), f"{file.name}: no metric is exported as {exported_name(name)}"


def test_the_dashboard_and_the_rules_are_well_formed() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(target["expr"] for panel in panels for target in panel["targets"])
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    assert all({"alert", "expr", "labels", "annotations"} <= rule.keys() for rule in group["rules"])
    assert yaml.safe_load((ALERTS.parent / "scrape.yaml").read_text())["rule_files"] == [ALERTS.name]
