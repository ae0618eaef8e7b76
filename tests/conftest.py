"""The tiers of tests, and what every test may ask for: a real Redis, started once per worker, and an unused pool."""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

# Kernels run under Triton's interpreter, on tensors of the CPU. It is chosen when triton is imported, which
# transformers may do at any time; `make test-gpu` chooses the GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
# OpenMP threads wait for each other by spinning. Workers of pytest-xdist share the cores, so each of them, and what it
# starts, uses one thread.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from inflight.local.redis_server import PrivateRedis
from inflight.router.ledger.connection import connect_node
from inflight.router.ledger.keys import PoolKeys
from tests.support.ledger.store_pool import SETTINGS, START_MS, StorePool

# The repository's root is a folder of modules for pytest. Under these names a module would be loaded a second time.
for folder in ("bench", "common", "executor", "gateway", "router"):
    sys.modules[folder] = None  # type: ignore[assignment]

TESTS = Path(__file__).parent
# Left to `make test-all`: systems of several processes, chaos, browsers, other programs, Triton's interpreter, fuzzing,
# and virtual time by the hour. A single long test in another file has the mark `slow` itself.
SLOW = (
    "chaos/",
    "dashboards/",
    "deploy/test_built_images.py",
    "deploy/test_exercise.py",
    "fuzz/test_call_sequences.py",
    "fuzz/test_client_api.py",
    "fuzz/test_constraints.py",
    "fuzz/test_frames_to_an_executor.py",
    "fuzz/test_gateway_bodies.py",
    "fuzz/test_hostile_executor.py",
    "fuzz/test_kserve_api.py",
    "gpu/",
    "integration/test_board_cluster.py",
    "integration/test_board_layout.py",
    "integration/test_board_page.py",
    "integration/test_local_stack.py",
    "integration/test_refused_tools.py",
    "integration/test_reservations.py",
    "kernels/",
    "simulation/",
    "stack/",
    "vllm/test_client_suite.py",
    "vllm/test_real_vllm.py",
)
# Run by `make lint`: what only reads sources and pages.
LINT = (
    "contract/test_code_map.py",
    "contract/test_docs_name_what_is_there.py",
    "contract/test_docs_reference.py",
    "contract/test_documented_tests.py",
    "contract/test_folders.py",
    "contract/test_imports.py",
    "contract/test_kserve_page.py",
    "contract/test_protos.py",
    "contract/test_settings_are_read.py",
    "contract/test_statuses.py",
    "contract/test_style.py",
    "contract/test_sync_client.py",
    "contract/test_troubleshooting.py",
)

# Files that share a stack of SmolLM2, which starts in 20 to 30 seconds of processor time: one worker takes them all.
SHARED_STACKS = {
    "stack": ("chat", "exactness", "gateway", "responses", "structured_output", "tools"),
    "default_stack": ("bfcl", "documented_examples"),
}
UNIT_OF_FILE = {f"tests/stack/test_{name}.py": stack for stack, names in SHARED_STACKS.items() for name in names}
UNIT_OF_FILE |= {f"tests/vllm/test_{name}.py": "vllm" for name in ("client_suite", "real_vllm")}

# `fixed` tries the same examples in every run, `short` a quarter of them, and `explore` looks for new ones.
# The other two only ask whether a property fails (`tests/mutations`): they do not look for the smallest example.
# None has the phase `explain`: before Python 3.12 its tracing makes shrinking so slow that a timeout hides the failure.
# On a busy machine any example may take long.
BUSY = (HealthCheck.too_slow,)
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
for name, num_examples in (("fixed", 100), ("short", 25)):
    settings.register_profile(
        name,
        derandomize=True,
        deadline=None,
        max_examples=num_examples,
        phases=PHASES,
        suppress_health_check=BUSY,
    )
    settings.register_profile(f"{name}-unshrunk", settings.get_profile(name), phases=(Phase.explicit, Phase.generate))
settings.register_profile("explore", deadline=None, print_blob=True, phases=PHASES, suppress_health_check=BUSY)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# Of each log of a test that has failed.
LOG_LINES = 20

_pool_numbers = itertools.count()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Imports no file of a tier that `-m` leaves out: each worker would import all of them."""
    if not collection_path.is_relative_to(TESTS):
        return None
    path = collection_path.relative_to(TESTS).as_posix() + "/" * collection_path.is_dir()
    left_out = config.option.markexpr.split(" and ")
    tiers = (SLOW if "not slow" in left_out else ()) + (LINT if "not lint" in left_out else ())
    return True if path.startswith(tiers) else None


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of each tier by their path."""
    for item in items:
        path = item.path.relative_to(TESTS).as_posix()
        if path.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
        if path.startswith(LINT):
            item.add_marker(pytest.mark.lint)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distributes whole files among the workers, and those that share a stack together."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    scheduling = LoadFileScheduling(config, log)
    file_of = scheduling._split_scope
    scheduling._split_scope = lambda test: UNIT_OF_FILE.get(file_of(test), file_of(test))
    return scheduling


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """After a failure, which leaves sockets and event loops open, a warning about one of them that is collected during
    another test does not fail that test. The report has the ends of the logs of the test's processes."""
    report = yield
    if report.failed:
        report.sections += last_words(item)
        item.config.addinivalue_line("filterwarnings", "ignore::pytest.PytestUnraisableExceptionWarning")
    return report


def last_words(item: pytest.Item) -> Iterator[tuple[str, str]]:
    """The ends of the logs in the folders of the test and of its stacks."""
    arguments = getattr(item, "funcargs", {}).values()
    folders = {one for one in arguments if isinstance(one, Path) and one.is_dir()}
    folders |= {one.options.run_dir for one in arguments if hasattr(getattr(one, "options", None), "run_dir")}
    for path in sorted({path for folder in folders for path in folder.rglob("*.log") if path.is_file()}):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        yield f"end of {path.name}", "\n".join(lines[-LOG_LINES:])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports the test modules without collections of garbage, and excludes for good what they make. All of it stays,
    and the collector would go through it again and again: a tenth of the time of the imports."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateRedis]:
    """A real Redis that nothing else uses."""
    with PrivateRedis.start(tmp_path_factory.mktemp("redis") / "redis.log") as server:
        yield server


@pytest.fixture(scope="session")
def redis_url(redis_server: PrivateRedis) -> str:
    """Its URL for a router: the user may do no more than docs/security.md says that a router needs."""
    return redis_server.url


@pytest.fixture(scope="session")
def redis_admin_url(redis_server: PrivateRedis) -> str:
    """Its URL for tests that look at, change or measure Redis itself."""
    return redis_server.admin_url


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread for torch."""
    from tests.support.device.torch_threads import torch_threads  # imports torch, which takes seconds

    with torch_threads(1):
        yield


@pytest.fixture
def one_seed_and_thread() -> Iterator[None]:
    """One thread and the random numbers of seed 0 for torch."""
    import torch  # few tests need it, and it takes seconds to import

    from tests.support.device.torch_threads import torch_threads

    with torch.random.fork_rng(devices=[]), torch_threads(1):
        torch.manual_seed(0)
        yield


@pytest.fixture
def pool() -> str:
    """A pool that no other test of the session has used."""
    return f"pool-{next(_pool_numbers)}"


@pytest.fixture
async def store_pool(redis_url: str, redis_admin_url: str, pool: str) -> AsyncIterator[StorePool]:
    """A pool of the ledger, with a clock that stands still."""
    redis, routers_redis = connect_node(redis_admin_url, SETTINGS), connect_node(redis_url, SETTINGS)
    store_pool = StorePool(redis, routers_redis, PoolKeys(pool))
    await store_pool.set_clock(START_MS)
    yield store_pool
    await redis.aclose()
    await routers_redis.aclose()
