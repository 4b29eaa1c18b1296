"""Alert rules and dashboard: they load, they fire, and they ask for what the services tell."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.metrics import families, series

ROOT = Path(__file__).resolve().parent.parent
PROMETHEUS, GRAFANA = ROOT / "deploy" / "prometheus", ROOT / "deploy" / "grafana"
RULES = PROMETHEUS / "alerts.yml"
DASHBOARD = GRAFANA / "dashboards" / "slackwater.json"
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())

# What Prometheus itself adds, and what prometheus_client tells of a process.
OTHERS = {"up", "process_cpu_seconds_total", "process_resident_memory_bytes"}
OF_TARGETS = {"job", "instance", "target", "le"}
WORDS = {"and", "or", "unless", "by", "on", "without", "group_left", "group_right", "bool"}
GROUPED = re.compile(r"\b(?:by|on|without|group_left)\s*\(([^)]*)\)")
MATCHERS = re.compile(r"([a-zA-Z_][a-zA-Z0-9_]*)?\{([^}]*)\}")
NAME = re.compile(r"(?<![\w$.])[a-zA-Z_][a-zA-Z0-9_]*(?!\w)(?!\s*\()")


def rules() -> list[dict[str, Any]]:
    found = yaml.safe_load(RULES.read_text())
    return [rule for group in found["groups"] for rule in group["rules"]]


def panels() -> list[tuple[str, str]]:
    """(title, expression) of every query of the dashboard."""
    found = json.loads(DASHBOARD.read_text())["panels"]
    return [(p["title"], t["expr"]) for p in found for t in p.get("targets", ())]


EXPRESSIONS = [(rule["alert"], rule["expr"]) for rule in rules()] + panels()


def names(expression: str) -> set[str]:
    """The series that a query asks for."""
    bare = re.sub(r'"[^"]*"', "", GROUPED.sub("", expression))
    bare = re.sub(r"\[[^\]]*\]", "", re.sub(r"\{[^}]*\}", "", bare))
    return set(NAME.findall(bare)) - WORDS


def labels(expression: str) -> set[str]:
    """The labels that a query names."""
    grouped = {label.strip() for m in GROUPED.findall(expression) for label in m.split(",")}
    matched = {
        label
        for _, inside in MATCHERS.findall(expression)
        for label in re.findall(r"([a-zA-Z_]\w*)\s*[=!]", re.sub(r'"[^"]*"', '""', inside))
    }
    return grouped | matched


@pytest.mark.parametrize(("what", "expression"), EXPRESSIONS)
def test_every_query_asks_for_figures_that_there_are(what: str, expression: str) -> None:
    """By their names, and by labels that they have."""
    known = {name: family for family in families().values() for name in series(family)}
    asked = names(expression)
    assert asked, f"{what} asks for nothing"
    assert asked <= set(known) | OTHERS
    has = {label for name in asked if name in known for label in known[name].labels}
    assert labels(expression) <= has | OF_TARGETS


def test_the_check_of_names_would_find_a_wrong_one() -> None:
    wrong = 'sum by (stage) (rate(slackwater_jbos{stage="x"}[5m])) > 1 and up'
    assert names(wrong) == {"slackwater_jbos", "up"}
    assert labels('a{b="c", d=~"e=f"} / on (g) h') == {"b", "d", "g"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    "arguments",
    [("check", "rules", "alerts.yml"), ("check", "config", "prometheus.yml"),
     ("test", "rules", "alerts.test.yml")],
    ids=" ".join,
)  # fmt: skip
def test_prometheus_takes_the_rules_and_each_fires_when_it_should(
    arguments: tuple[str, ...],
) -> None:
    """alerts.test.yml: a pool that is well raises none, one in trouble raises each."""
    said = subprocess.run(
        ["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stdout + said.stderr


def test_each_alert_is_tried_and_the_docs_say_what_to_do_about_it() -> None:
    tried = (PROMETHEUS / "alerts.test.yml").read_text()
    docs = (ROOT / "docs" / "operations.md").read_text()
    for rule in rules():
        assert re.search(rf"alertname: {rule['alert']}\n\s+exp_alerts", tried), rule["alert"]
        assert f"| `{rule['alert']}` |" in docs
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert {"summary", "description"} <= set(rule["annotations"])


def test_compose_brings_them_up_with_these_files_on_demand_only() -> None:
    """Prometheus looks up services that there are, on the port that they have."""
    services = COMPOSE["services"]
    for name in ("prometheus", "grafana"):
        assert services[name]["profiles"] == ["observe"]
        assert re.fullmatch(r".+:v?\d+\.\d+\.\d+", services[name]["image"])
        for volume in services[name]["volumes"]:
            source = volume.partition(":")[0]
            assert not source.startswith("./") or (ROOT / source).is_dir()
    [scraped] = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())["scrape_configs"]
    [found] = scraped["dns_sd_configs"]
    ours = {name for name in services if "slackwater" in services[name]["image"]}
    assert set(found["names"]) <= ours
    assert {"coordinator", "encode", "denoise", "decode", "gateway"} <= set(found["names"])
    for name in found["names"]:
        assert services[name]["environment"]["SLACKWATER_METRICS_PORT"] == found["port"]
    provided = yaml.safe_load(
        (GRAFANA / "provisioning" / "dashboards" / "slackwater.yml").read_text()
    )
    where = provided["providers"][0]["options"]["path"]
    assert f"./deploy/grafana/dashboards:{where}:ro" in services["grafana"]["volumes"]


def test_no_two_panels_of_the_dashboard_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    found = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in found}) == len(found)
    for panel in found:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
