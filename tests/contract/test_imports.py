"""Import rules between packages. Read from the source, so that an import inside a function counts too."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
# Folders of the repository. Those beside `inflight` are imported as `inflight.router` and so on.
PRODUCT = ("router", "executor", "common", "inflight", "gateway")
PACKAGES = (*PRODUCT, "bench")
EVERYWHERE = (*PACKAGES, "tools", "tests")
GENERATED = ("inflight.v1", "inflight.kserve")
# Files and all files in folders. What they import from our packages must be pure, too.
PURE = ("executor/scheduler", "executor/engine/standby.py", "executor/engine/deadlines.py", "router/lifecycle")
# The standard library without clocks, randomness and I/O.
PURE_LIBRARY = frozenset(
    {"__future__", "abc", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "heapq", "itertools"}
    | {"array", "base64", "math", "operator", "re", "struct", "types", "typing"}
)
# gRPC for the names of its status codes only.
PURE_ELSEWHERE = {"inflight.common.errors": frozenset({"grpc"})}


def sources(*packages: str) -> Iterator[Path]:
    """The files that are written by hand."""
    for package in packages:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            if not is_generated(".".join(path.relative_to(REPOSITORY).parts)):
                yield path


def package_of(module: str) -> str:
    """The folder of the repository that has a module: `router` for `inflight.router.main`. For a module of others its
    first name."""
    first, _, rest = module.partition(".")
    second = rest.partition(".")[0]
    return second if first == "inflight" and second in PACKAGES else first


def path_of(module: str) -> Path:
    return REPOSITORY.joinpath(*module.split(".")).with_suffix(".py")


@functools.cache
def parsed(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Full names of the modules that a file imports."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            names.add(node.module)
    return names


def importers(imported: str, *packages: str) -> set[str]:
    """Files of the packages that import a package. The generated messages belong to no package."""
    return {
        str(path.relative_to(REPOSITORY))
        for path in sources(*packages)
        if any(package_of(name) == imported and not is_generated(name) for name in imports_of(path))
    }


def is_generated(module: str) -> bool:
    return module.startswith(GENERATED)


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("router", "executor"),
        ("executor", "router"),
        ("common", "router"),
        ("common", "executor"),
        ("common", "inflight"),
        ("router", "inflight"),
        ("executor", "inflight"),
        # The gateway is a client of the router like any other.
        ("gateway", "router"),
        ("gateway", "executor"),
        ("router", "gateway"),
        ("executor", "gateway"),
        ("common", "gateway"),
        ("inflight", "gateway"),
        *((package, "tools") for package in PACKAGES),
        *((package, "tests") for package in (*PACKAGES, "tools")),
    ],
)
def test_package_does_not_import(package: str, forbidden: str) -> None:
    assert not importers(forbidden, package)


def test_torch_is_imported_only_under_executor_and_by_its_benchmarks() -> None:
    allowed = ("executor/", "bench/engine/", "bench/gpu/", "bench/peers/transformers_driver.py")
    assert not {path for path in importers("torch", *PACKAGES) if not path.startswith(allowed)}


def test_redis_is_imported_only_by_the_stores_and_the_local_stack() -> None:
    allowed = ("router/ledger/", "gateway/store/", "inflight/local/")
    assert not {path for path in importers("redis", *PACKAGES) if not path.startswith(allowed)}


def test_kserve_is_imported_only_by_the_router() -> None:
    """Its generated code registers the names that tritonclient's does, and a user's process may hold that."""
    importing = {
        str(path.relative_to(REPOSITORY))
        for path in sources(*PACKAGES)
        if any(name.startswith("inflight.kserve") for name in imports_of(path))
    }
    assert importing
    assert not {path for path in importing if not path.startswith("router/")}


def test_client_library_imports_no_server_no_command_and_little_of_common() -> None:
    """So that it can be installed, and loaded, without their packages."""
    common = {
        "inflight.common.rpc.addresses",
        "inflight.common.cancellation",
        "inflight.common.errors",
        "inflight.common.parameters",
        "inflight.common.rpc.options",
    }
    common.add("inflight.common.telemetry.trace_context")  # only in programs that have loaded OpenTelemetry
    forbidden = ("inflight.local", "inflight.cli", "inflight.tools")
    for path in (REPOSITORY / "inflight").glob("*.py"):
        imported = imports_of(path)
        assert {package_of(name) for name in imported}.isdisjoint({"router", "executor", "gateway", "bench"}), path.name
        assert not [name for name in imported if name.startswith(forbidden)], path.name
        assert {name for name in imported if package_of(name) == "common"} <= common, path.name


def test_client_loads_no_kserve_messages() -> None:
    program = "import sys, inflight.aio, inflight.sync; sys.exit(any('kserve' in name for name in sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, env=environment, check=True, timeout=60)


def pure_modules() -> list[str]:
    files = [file for path in PURE for file in (sorted((REPOSITORY / path).rglob("*.py")) or [REPOSITORY / path])]
    return [".".join(("inflight", *file.relative_to(REPOSITORY).with_suffix("").parts)) for file in files]


def test_pure_folders_import_nothing_with_effects() -> None:
    seen: set[str] = set()
    waiting = pure_modules()
    while waiting:
        module = waiting.pop()
        seen.add(module)
        imported = {name for name in imports_of(path_of(module)) if not is_generated(name)}
        ours = {name for name in imported if package_of(name) in PACKAGES}
        allowed = PURE_LIBRARY | PURE_ELSEWHERE.get(module, frozenset())
        assert {name.split(".")[0] for name in imported - ours} <= allowed, module
        waiting += ours - seen


def test_scheduler_runs_in_an_interpreter_without_torch() -> None:
    program = f"import sys, {', '.join(pure_modules())}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True, timeout=60)


@pytest.mark.parametrize("package", EVERYWHERE)
def test_package_files_are_empty(package: str) -> None:
    filled = {path for path in sources(package) if path.name == "__init__.py" and path.stat().st_size}
    assert filled <= {REPOSITORY / "inflight" / "__init__.py"}, "only the public API is in a package file"


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for path in sources(*EVERYWHERE)}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]
