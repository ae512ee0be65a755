"""Pages, dashboards and alert rules name metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_rl.telemetry import METRICS, find_metric
from async_rl.telemetry.sinks.prometheus import exported_name
from tests.support.repository import ROOT

DASHBOARD = ROOT / "deploy" / "grafana" / "async_rl.json"
KUBERNETES = ROOT / "deploy" / "kubernetes"
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


def objects(name: str) -> dict[str, Any]:
    """The manifests of a file by kind; of several of a kind, the last."""
    return {each["kind"]: each for each in yaml.safe_load_all((KUBERNETES / "base" / f"{name}.yaml").read_text())}


def test_the_autoscaler_asks_for_what_the_adapter_serves_of_what_is_scraped() -> None:
    (asked,) = objects("worker")["HorizontalPodAutoscaler"]["spec"]["metrics"]
    (rule,) = yaml.safe_load((KUBERNETES / "autoscaling" / "adapter.yaml").read_text())["externalRules"]
    (job,) = yaml.safe_load((KUBERNETES / "autoscaling" / "scrape.yaml").read_text())["scrape_configs"]
    assert rule.keys() == {"seriesQuery", "resources", "name", "metricsQuery"}, "what prometheus-adapter knows"
    name = asked["external"]["metric"]["name"]
    assert name == rule["name"]["as"] == exported_name("idle/no_groups")
    metric = find_metric("idle/no_groups")
    assert metric is not None
    assert metric.unit == "share", "the autoscaler's target, 100m, is a tenth"
    (label,) = rule["resources"]["overrides"]
    assert rule["seriesQuery"] == f'{{__name__="{name}",{label}!=""}}'
    assert "<<.Series>>{<<.LabelMatchers>>}" in rule["metricsQuery"]
    kept, labelled = job["relabel_configs"]
    assert labelled == {"source_labels": ["__meta_kubernetes_namespace"], "target_label": label}
    learner = objects("learner")["Service"]
    (port,) = learner["spec"]["ports"]
    assert kept["regex"] == f"async-rl;{learner['metadata']['name']};{port['name']};true"
