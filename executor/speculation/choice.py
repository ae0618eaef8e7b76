"""Choice of the proposer for the sequences of an executor."""

from __future__ import annotations

import logging
from collections.abc import Callable

from inflight.executor.native.build import BuildFailure
from inflight.executor.speculation.proposer import NgramProposer, Proposer
from inflight.executor.speculation.suffix import AutomatonLibrary, SuffixProposer

log = logging.getLogger(__name__)

PROPOSERS = ("ngram", "suffix")


def choose_proposer(name: str) -> Callable[[], Proposer]:
    """Returns what makes the proposer of a sequence. `suffix` without a compiler is `ngram`, which is logged."""
    if name == "ngram":
        return NgramProposer
    if name != "suffix":
        raise ValueError(f"a proposer is one of {', '.join(PROPOSERS)}, not {name!r}")
    library = AutomatonLibrary.load()
    if isinstance(library, BuildFailure):
        log.warning("drafts are looked up by n-grams, because %s", library.reason)
        return NgramProposer
    return lambda: SuffixProposer(library)
