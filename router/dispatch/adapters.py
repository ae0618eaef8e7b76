"""The LoRA adapters of a model: the names that clients use, and the content that each name currently means.

Executors report the name and the content hash of each adapter that they can serve. During a rollout, executors may
report different contents for one name. A request gets one of these contents when it is admitted, and keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from inflight.common.errors import FieldViolation, Reason, RequestError
from inflight.v1 import executor_pb2

MAX_LISTED_NAMES = 32


@dataclass(frozen=True, slots=True)
class Adapter:
    """The content that new requests for a name get. `num_executors` executors serve it. `num_resident` of them have it
    in a slot."""

    name: str
    hash: str
    rank: int
    num_executors: int
    num_resident: int


def adapters_of(reports: Iterable[executor_pb2.Report]) -> dict[str, Adapter]:
    """Returns the adapters by name, ordered by name.

    If a name has several contents, the one that most executors serve without draining is chosen. Ties are decided by
    the number of all executors that serve the content, then by the larger hash, so that routers with the same reports
    make the same choice.
    """
    found: dict[str, dict[str, list[tuple[bool, executor_pb2.AdapterStatus]]]] = {}
    for report in reports:
        for status in report.adapters:
            found.setdefault(status.name, {}).setdefault(status.hash, []).append((not report.draining, status))
    return {name: _most_served(found[name]) for name in sorted(found)}


def _most_served(contents: dict[str, list[tuple[bool, executor_pb2.AdapterStatus]]]) -> Adapter:
    def order(adapter_hash: str) -> tuple[int, int, str]:
        serving = contents[adapter_hash]
        return sum(accepts for accepts, _ in serving), len(serving), adapter_hash

    statuses = [status for _, status in contents[max(contents, key=order)]]
    first = statuses[0]
    return Adapter(first.name, first.hash, first.rank, len(statuses), sum(status.resident for status in statuses))


def unknown_adapter(model: str, name: str, known: Iterable[str]) -> RequestError:
    """Returns the error for a name that no executor of the model reports."""
    names = sorted(known)
    listed = ", ".join(names[:MAX_LISTED_NAMES]) + (", …" if len(names) > MAX_LISTED_NAMES else "") or "none"
    return RequestError(
        Reason.UNKNOWN_ADAPTER,
        f"adapter_id: model {model} has no adapter {name[:100]!r}; its adapters: {listed}",
        (FieldViolation("adapter_id", f"there is no adapter {name[:100]!r} of {model}; its adapters: {listed}"),),
    )
