"""The worst single call of a script, by Redis' slow log."""

from __future__ import annotations

from collections.abc import Mapping

from bench.ledger.server import MAX_SLOW_CALLS, Server

LEAST_US = 100


class Slowest:
    """Keeps the worst call so far and lets Redis log only what could be worse.

    So the log, which forgets, never holds many. On leaving, Redis' options are what they were.
    """

    def __init__(self, server: Server, names: Mapping[str, str]) -> None:
        self._server = server
        self._names = names
        self._logged = max((call.number for call in server.slow_calls()), default=-1)
        self._max_former = server.set_option("slowlog-max-len", str(MAX_SLOW_CALLS))
        self._threshold_former = server.set_option("slowlog-log-slower-than", str(LEAST_US))
        self.us = 0.0
        self.script = ""

    def look(self) -> None:
        """Takes what was logged since the last look."""
        new = [call for call in self._server.slow_calls() if call.number > self._logged and call.sha in self._names]
        if not new:
            return
        worst = max(new, key=lambda call: call.us)
        self._logged = max(call.number for call in new)
        if worst.us > self.us:
            self.us, self.script = worst.us, self._names[worst.sha]
            self._server.set_option("slowlog-log-slower-than", str(int(worst.us)))

    def close(self) -> None:
        """Puts the options back."""
        self._server.set_option("slowlog-log-slower-than", self._threshold_former)
        self._server.set_option("slowlog-max-len", self._max_former)
