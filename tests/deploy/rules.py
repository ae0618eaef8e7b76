"""The PrometheusRule of the component `monitoring`, which is the alerts of deploy/dashboards in an operator's words:
kustomize reads nothing above its own folder. `python -m tests.deploy.rules` writes it again."""

from __future__ import annotations

import textwrap
from pathlib import Path

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "dashboards" / "alerts.yaml"
RULES = DEPLOY / "kubernetes" / "components" / "monitoring" / "rules.yaml"
HEADER = """\
# Made from deploy/dashboards/alerts.yaml by `python -m tests.deploy.rules`: change it there.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: inflight
  labels:
    app.kubernetes.io/name: inflight
spec:
"""


def rules_of(alerts: str) -> str:
    """The manifest for a file of alerts."""
    return HEADER + textwrap.indent(alerts[alerts.index("groups:\n") :], "  ")


if __name__ == "__main__":
    RULES.write_text(rules_of(ALERTS.read_text()))
