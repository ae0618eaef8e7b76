"""An engine behind its driver as a target: a separate process that speaks the protocol of `bench/peers/driver.py`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from inflight.bench.measures.processes import CoreMeter
from inflight.bench.measures.run import Run, Slo, measure
from inflight.bench.peers.driver import Request, Setup
from inflight.bench.targets.record import DriverRecord
from inflight.bench.targets.target import OnTokens, TargetError
from inflight.bench.workloads.plan import Workload
from inflight.common.guard import HAS_KERNEL_GUARD, guarded

# Loading, and compiling for the first time.
START_TIMEOUT_S = 900.0
# Without a token for so long, an engine is taken for dead. A static batch may compute for minutes before it speaks.
SILENCE_TIMEOUT_S = 600.0
STOP_GRACE_S = 15.0
# A line names every sequence of a step.
MAX_LINE_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Driver:
    """How a driver is started. `environment` stands in place of our own."""

    mode: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    setup: Setup
    log_file: Path


@asynccontextmanager
async def driven(driver: Driver, slo: Slo) -> AsyncIterator[DrivenTarget]:
    """Starts a driver, waits until its engine is ready, and ends it afterwards."""
    target = await DrivenTarget.start(driver, slo)
    try:
        yield target
    finally:
        await target.stop()


class DrivenTarget:
    """A running driver."""

    def __init__(self, driver: Driver, slo: Slo, process: asyncio.subprocess.Process) -> None:
        self.mode = driver.mode
        self.words: dict[str, str] = {}
        self._driver = driver
        self._slo = slo
        self._process = process
        # During a run a driver does not listen: it would end only after the last token.
        self._is_running = False

    @classmethod
    async def start(cls, driver: Driver, slo: Slo) -> Self:
        """Returns when the engine is ready.

        Raises:
            TargetError: it cannot run here, with the reason.
        """
        driver.log_file.parent.mkdir(parents=True, exist_ok=True)
        with driver.log_file.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                # Elsewhere the end of its stdin has to do.
                *(guarded(driver.command) if HAS_KERNEL_GUARD else driver.command),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=dict(driver.environment),
                start_new_session=True,
                limit=MAX_LINE_BYTES,
            )
        target = cls(driver, slo, process)
        try:
            await target._write([{"setup": asdict(driver.setup)}])
            answer = await target._read(START_TIMEOUT_S)
            if "failed" in answer:
                raise TargetError(f"{driver.mode}: {answer['failed']}")
            target.words = answer["ready"]
            target._signal(signal.SIGSTOP)
        except BaseException:
            await target.stop()
            raise
        return target

    @property
    def pid(self) -> int:
        """Its process id, and that of its process group."""
        return self._process.pid

    async def run(self, workload: Workload, round_number: int, on_tokens: OnTokens) -> Run:
        """Runs a workload to its end."""
        self._signal(signal.SIGCONT)
        meter = CoreMeter({self.mode: self._process.pid})
        requests = [
            asdict(Request(index, list(planned.prompt_ids), planned.output_tokens, planned.arrival_s))
            for index, planned in enumerate(workload.requests)
        ]
        begin = {"run": {"requests": len(requests), "concurrency": workload.concurrency}}
        await self._write([begin, *requests])
        await self._write([{"go": True}])
        record = DriverRecord(workload)
        self._is_running = True
        while "done" not in (line := await self._read(SILENCE_TIMEOUT_S)):
            on_tokens(record.take(line))
        self._is_running = False
        cores = meter.stop()
        # Between its runs vLLM keeps a third of a core busy with waiting: it would slow down the next target.
        self._signal(signal.SIGSTOP)
        return self._as_run(record, line["done"], round_number, cores)

    def _as_run(
        self, record: DriverRecord, done: Mapping[str, Any], round_number: int, cores: Mapping[str, float]
    ) -> Run:
        outcomes, figures = record.outcomes(), dict(done["figures"])
        samples = record.samples(done["at_s"], self._driver.setup.seats)
        num_steps = figures.pop("num_steps", None)
        return Run(
            mode=self.mode,
            round=round_number,
            measures=measure(outcomes, samples, None if num_steps is None else int(num_steps), self._slo),
            samples=tuple(samples),
            errors=tuple(dict.fromkeys(outcome.error for outcome in outcomes if outcome.error is not None)),
            cores=cores,
            figures=figures,
        )

    async def stop(self) -> None:
        """Closes its stdin, which ends an idle driver, and kills whatever is left of it and its children."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.close()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(0 if self._is_running else STOP_GRACE_S):
                    await self._process.wait()
        finally:
            self._signal(signal.SIGKILL)
        await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        """To the driver and all that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    async def _write(self, lines: Sequence[Mapping[str, Any]]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("".join(json.dumps(line) + "\n" for line in lines).encode())
            await self._process.stdin.drain()
        except ConnectionError:
            raise await self._died() from None

    async def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise TargetError(f"{self.mode} was silent for {timeout_s:.0f} s; see {self._driver.log_file}") from None
        if not line:
            raise await self._died()
        values: dict[str, Any] = json.loads(line)
        return values

    async def _died(self) -> TargetError:
        # Its output ends a little before its log does.
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                await self._process.wait()
        last = last_words(self._driver.log_file)
        return TargetError(f"{self.mode} ended{f': {last}' if last else ''}; see {self._driver.log_file}")


def last_words(log_file: Path) -> str:
    """Returns the last line that an engine wrote before it ended."""
    try:
        lines = log_file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
