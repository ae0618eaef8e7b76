"""Translation of the errors of stacks, models and targets into one line for the user of a command."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from inflight.bench.targets.target import TargetError
from inflight.bench.workloads.plan import WorkloadError
from inflight.cli.call_errors import in_words
from inflight.cli.console import EXIT_FAILURE, EXIT_USAGE, CommandError
from inflight.common.model_source import ModelError
from inflight.errors import InflightError
from inflight.local.stack import StackError


async def with_command_errors(command: Coroutine[Any, Any, int], address: str | None = None) -> int:
    """Runs a command. `address` is the router that it talks to, None for a stack of its own."""
    try:
        return await command
    except StackError as error:
        raise CommandError(str(error), EXIT_USAGE if error.is_setting else EXIT_FAILURE) from None
    except (ModelError, WorkloadError) as error:
        raise CommandError(str(error), EXIT_USAGE) from None
    except TargetError as error:
        raise CommandError(str(error)) from None
    except InflightError as error:
        raise CommandError(in_words(error, address or "the stack")) from None
