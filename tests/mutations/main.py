"""The check that the tests detect bugs: applies deliberate mutations, one at a time, and runs a tier of the tests.

Each mutation runs in a copy of the tree. The tests that probably detect it run first; the whole tier runs only where
they pass. The first failure ends a run. A tree without a mutation must pass the same tests.

    python -m tests.mutations.main --tier fast --only 3 7
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutations.catalogue import MUTATIONS, Mutation

REPOSITORY = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "run")
# Less than these are a failure: of twenty mutations, as many may survive as there are beyond that.
MAX_SURVIVORS = {"fast": 2, "all": 0}
# A mutation may make a test wait for something that never comes.
TEST_TIMEOUT_S = 60
TESTS_PASSED, TESTS_FAILED, NO_TESTS = 0, 1, 5
FAILED_TEST = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.MULTILINE)


class MutationError(Exception):
    """The catalogue does not fit the sources, or a run of tests did not come to a result. The text says what."""


@dataclass(frozen=True, slots=True)
class Tier:
    """What `make test` or `make test-all` selects, and its profile of Hypothesis."""

    markers: str
    profile: str


TIERS = {"fast": Tier("not slow and not lint", "short-unshrunk"), "all": Tier("not lint", "fixed-unshrunk")}


def mutated(mutation: Mutation, source: str) -> str:
    """Returns the source with the mutation. Raises `MutationError` unless its place is there exactly once."""
    count = source.count(mutation.old)
    if count != 1:
        raise MutationError(f"{mutation.file}: found {count} times instead of once: {mutation.old!r}")
    return source.replace(mutation.old, mutation.new)


def check_catalogue() -> None:
    """Raises `MutationError` where a mutation or its tests are not in the tree."""
    for mutation in MUTATIONS:
        path = REPOSITORY / mutation.file
        if not path.exists():
            raise MutationError(f"{mutation.file} does not exist")
        mutated(mutation, path.read_text(encoding="utf-8"))
        for test in mutation.tests:
            if not (REPOSITORY / test).exists():
                raise MutationError(f"{test} does not exist")


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of the sources and tests, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(REPOSITORY, tree, ignore=LEFT_OUT, symlinks=True)
        yield tree


def first_failure(tree: Path, tier: Tier, tests: Sequence[str], *options: str) -> str | None:
    """Runs tests in the tree. Returns the name of one that fails, or None where all pass."""
    # The copy comes before the tree that is installed in the environment.
    environment = os.environ | {"PYTHONPATH": str(tree), "HYPOTHESIS_PROFILE": tier.profile}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", tier.markers]
    done = subprocess.run(
        [*command, "--timeout", str(TEST_TIMEOUT_S), *options, *tests],
        cwd=tree, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode in (TESTS_PASSED, NO_TESTS):
        return None
    found = FAILED_TEST.search(done.stdout)
    if done.returncode != TESTS_FAILED or found is None:
        raise MutationError(f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    return found[1]


def detection(tree: Path, mutation: Mutation, tier: Tier, workers: int) -> str | None:
    """Returns the test that detects the mutation, or None where it survives the tier."""
    path = tree / mutation.file
    source = path.read_text(encoding="utf-8")
    path.write_text(mutated(mutation, source), encoding="utf-8")
    try:
        return first_failure(tree, tier, mutation.tests) or first_failure(
            tree, tier, (), "-n", str(workers), "--dist", "loadfile", "--no-loadscope-reorder"
        )
    finally:
        path.write_text(source, encoding="utf-8")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=TIERS, default="fast", help="the tests to run")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers of mutations; all without it")
    parser.add_argument("--workers", type=int, default=3, help="tests side by side where the whole tier runs")
    parser.add_argument("--check", action="store_true", help="only check that each mutation has its place")
    return parser.parse_args(arguments)


def run(tier_name: str, numbers: Sequence[int], workers: int) -> int:
    """Reports each mutation. Returns how many survived."""
    tier, survivors = TIERS[tier_name], 0
    chosen = [(number, MUTATIONS[number - 1]) for number in numbers]
    with copied_tree() as tree:
        tests = sorted({test for _, mutation in chosen for test in mutation.tests})
        failure = first_failure(tree, tier, tests)
        if failure is not None:
            raise MutationError(f"{failure} fails without a mutation")
        for number, mutation in chosen:
            began_s = time.monotonic()
            found = detection(tree, mutation, tier, workers)
            survivors += found is None
            result = f"detected by {found}" if found else "SURVIVED"
            print(f"{number:2} {time.monotonic() - began_s:5.0f} s  {mutation.breaks}: {result}", flush=True)
    print(f"tier {tier_name}: {len(chosen) - survivors} of {len(chosen)} mutations detected")
    return survivors


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 where too many mutations survive, 2 where the catalogue is wrong."""
    options = parse(arguments)
    try:
        check_catalogue()
        if options.check:
            return 0
        survivors = run(options.tier, options.only or range(1, len(MUTATIONS) + 1), options.workers)
    except MutationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return int(survivors > MAX_SURVIVORS[options.tier])


if __name__ == "__main__":
    sys.exit(main())
