"""Lines of product, benchmarks and tests in commits, and the product files that differ between two commits.

    python -m tools.code_size [BEFORE] [AFTER]         default: HEAD

The product is what a release runs: router, executor, common, gateway, inflight. What is generated does not count. Lines
include blank lines and comments, as `wc -l` counts them.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Sequence

PRODUCT = ("common", "executor", "gateway", "inflight", "router")
OTHERS = ("bench", "tests")
COUNTED = (".py", ".lua")
# A change of the product is made in these, and in the sources of the protocols.
SOURCES = (*COUNTED, ".cpp", ".h", ".proto", ".html", ".js", ".css")
# By protoc, and from the asynchronous client.
GENERATED = re.compile(r"inflight/(v1|kserve)/|inflight/sync(_stream)?\.py$")


def git(*arguments: str) -> bytes:
    """Returns the output of a command of git; exits with its error."""
    done = subprocess.run(("git", *arguments), capture_output=True, check=False)
    if done.returncode:
        sys.exit(f"error: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def part_of(path: str) -> str:
    """Returns the folder at the top that a path is in."""
    return path.partition("/")[0]


def lines_of(commit: str) -> Counter[str]:
    """Returns the lines of Python and Lua by folder at the top. Links are not followed, so no file counts twice."""
    lines: Counter[str] = Counter()
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as archive:
        for member in archive:
            if member.isfile() and member.name.endswith(COUNTED) and not GENERATED.match(member.name):
                file = archive.extractfile(member)
                assert file is not None
                lines[part_of(member.name)] += file.read().count(b"\n")
    return lines


def changed_product_files(before: str, after: str) -> list[str]:
    """Returns the product's files that differ, without generated ones. A renamed file counts once, by its new name."""
    paths = git("diff", "--name-only", "--find-renames", before, after).decode().splitlines()
    return [
        path
        for path in paths
        if part_of(path) in (*PRODUCT, "protos") and path.endswith(SOURCES) and not GENERATED.match(path)
    ]


def table(commits: Sequence[str]) -> list[str]:
    """Returns a row of figures for each folder, and for the product as a whole."""
    counted = [lines_of(commit) for commit in commits]
    rows = [(part, [lines[part] for lines in counted]) for part in PRODUCT]
    rows.append(("product", [sum(lines[part] for part in PRODUCT) for lines in counted]))
    rows += [(part, [lines[part] for lines in counted]) for part in OTHERS]
    head = f"{'lines':<10}" + "".join(f"{commit[:12]:>14}" for commit in commits)
    return [head, *(f"{part:<10}" + "".join(f"{number:>14,}" for number in numbers) for part, numbers in rows)]


def main(argv: Sequence[str]) -> int:
    """Prints the lines of one or two commits, and of two also the files that differ."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.code_size",
        description="Lines of the code, and the product files that differ between two commits.",
    )
    parser.add_argument("before", nargs="?", default="HEAD", help="a commit, branch or tag; default: HEAD")
    parser.add_argument("after", nargs="?", help="another one to compare with")
    given = parser.parse_args(argv)
    commits = [given.before] if given.after is None else [given.before, given.after]
    print("\n".join(table(commits)))
    if given.after is not None:
        files = changed_product_files(*commits)
        print(f"\nproduct files that differ: {len(files)}")
        print("\n".join(f"  {path}" for path in files))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
