"""Prometheus queries of the dashboard and the alerts, and the metrics that docs/metrics.md promises."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "deploy" / "dashboards"
DOCS = REPOSITORY / "docs" / "metrics.md"


@dataclass(frozen=True, slots=True)
class Query:
    """An expression, and where it is."""

    where: str
    text: str


@dataclass(frozen=True, slots=True)
class Asked:
    """A metric that a query reads, and the labels that it selects or groups by."""

    metric: str
    labels: frozenset[str]


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels, its rows left out."""
    dashboard = json.loads((FOLDER / "inflight.json").read_text(encoding="utf-8"))
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def panel_queries(interval: str = "1m") -> list[Query]:
    """Of every panel, with Grafana's variables filled in as for *All*."""
    return [
        Query(panel["title"], _filled(target["expr"], interval)) for panel in panels() for target in panel["targets"]
    ]


def rules() -> list[dict[str, Any]]:
    """The recording and alerting rules."""
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    """The alerting rules, with the expressions of recorded series in the place of their names."""
    recorded = {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}
    found = [dict(rule) for rule in rules() if "alert" in rule]
    for rule in found:
        rule["expr"] = re.sub(r"\b\w+(:\w+)+\b", lambda name: f"({recorded[name[0]]})", rule["expr"])
    return found


def queries() -> list[Query]:
    """All of them."""
    return [*panel_queries(), *(Query(rule["alert"], rule["expr"]) for rule in alerts())]


def _filled(expression: str, interval: str) -> str:
    return re.sub(r"\$(namespace|model)", ".*", expression.replace("$__rate_interval", interval))


def selectors_of(expression: str) -> list[dict[str, str]]:
    """The labels and values that each selector of an expression matches."""
    selectors, _ = _read(expression)
    return [{matcher.name: matcher.value for matcher in selector.matchers.matchers} for selector in selectors]


def asked_by(query: Query) -> list[Asked]:
    """What a query reads. Labels that it groups by count for every metric in it. Raises ValueError where it is none."""
    selectors, grouped = _read(query.text)
    return [
        Asked(selector.name, frozenset({matcher.name for matcher in selector.matchers.matchers} | grouped))
        for selector in {str(selector): selector for selector in selectors}.values()
    ]


def _read(expression: str) -> tuple[list[Any], set[str]]:
    """The selectors of an expression, and the labels that it groups by."""
    selectors: list[Any] = []
    grouped: set[str] = set()

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            selectors.append(node)
        elif isinstance(node, promql_parser.MatrixSelector):
            selectors.append(node.vector_selector)
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            grouped.update(node.modifier.labels)
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    return selectors, grouped


def documented() -> dict[str, frozenset[str]]:
    """Every metric of the documentation with its labels."""
    text = DOCS.read_text(encoding="utf-8")
    found = dict(_rows(text))
    vllm = text[text.index("vLLM's names, all") :].split("\n\n")[0]
    found |= {name: frozenset({"model_name"}) for name in re.findall(r"`(vllm:\w+)`", vllm)}
    found["vllm:cache_config_info"] |= {"block_size", "num_gpu_blocks"}
    found["vllm:spec_decode_num_accepted_tokens_per_pos_total"] |= {"position"}
    return found


def _rows(text: str) -> Iterator[tuple[str, frozenset[str]]]:
    labels: frozenset[str] = frozenset()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) != 6 or cells[2] not in ("counter", "gauge", "histogram"):
            continue
        same = labels if cells[3].startswith("the same") else frozenset()
        # What stands in parentheses is no label.
        labels = same | frozenset(re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", cells[3])))
        for name in re.findall(r"`([\w:]+)`", cells[1]):
            yield name, labels
        labels = same or labels
