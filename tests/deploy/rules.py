"""The PrometheusRule and the dashboard of the component `monitoring`, which are those of deploy/dashboards: kustomize
reads nothing above its own folder. `python -m tests.deploy.rules` writes it again."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

DEPLOY = Path(__file__).parents[2] / "deploy"
ALERTS = DEPLOY / "dashboards" / "alerts.yaml"
DASHBOARD = DEPLOY / "dashboards" / "inflight.json"
RULES = DEPLOY / "kubernetes" / "components" / "monitoring" / "rules.yaml"
COPY = RULES.with_name("inflight.json")
# A metric or a recorded series in an expression.
METRIC = re.compile(r"(?<!record: )(?<![\w:])((?:inflight|gen_ai_server)_\w+|\w+(?::\w+)+)")
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
    """The manifest for a file of alerts, with every selector on the namespace `inflight`."""
    here = METRIC.sub(r'\1{namespace="inflight"}', alerts[alerts.index("groups:\n") :]).replace("}{", ",")
    return HEADER + textwrap.indent(here.replace('job=~".*inflight.*"', 'job="inflight/inflight"'), "  ")


if __name__ == "__main__":
    RULES.write_text(rules_of(ALERTS.read_text()))
    COPY.write_bytes(DASHBOARD.read_bytes())
