"""What an engine is to the service: it takes commands and publishes `EngineOutput`.

`inflight.executor.engine.engine.Engine` and `inflight.executor.vllm.engine.VllmEngine` implement it. Neither torch nor
the package of an engine is needed to import this.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from inflight.executor.scheduler.sequence import Constraint, FinishReason, Sequence


class ServedEngine(Protocol):
    """An engine. Its results, the answer to each command included, come through the `publish` that it was made with."""

    @property
    def num_steps(self) -> int:
        """Steps since the start."""
        ...

    @property
    def expected_step_s(self) -> float:
        """The seconds that the step in flight is expected to take; 0 if that is not known."""
        ...

    def submit(self, sequence: Sequence, time_left_ms: int | None = None) -> None:
        """Offers a sequence with a deadline `time_left_ms` from now."""
        ...

    def mark_prepared(self, sequence: Sequence, error: str = "") -> None:
        """Makes a submitted sequence eligible to board now that it `is_ready`, or ends it with an error."""
        ...

    def cancel(self, request_id: str, attempt: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Ends a sequence if this attempt is still held."""
        ...

    def drain(self) -> None:
        """Refuses every further submit."""
        ...

    def list_sequences(self) -> None:
        """Requests the list of held sequences."""
        ...


class Grammars(Protocol):
    """Compiles grammars for an engine."""

    def find(self, key: bytes) -> Any:
        """Returns the compiled grammar with this key; None if it has to be compiled first."""
        ...

    def compile(self, constraint: Constraint) -> Future[Any]:
        """Starts to compile. The result may be a `GrammarError`."""
        ...

    def close(self) -> None:
        """Ends what is being compiled."""
        ...
