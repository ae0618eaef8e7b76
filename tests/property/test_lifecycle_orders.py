"""Events in any order: each request ends once, no attempt is sent twice and no call is open at the end.

Every order for two requests, two routers and one executor with one seat, with one or two failures or choices of clients
at any time; and random orders of larger systems with many of them. `tests.support.lifecycle.world` is the system.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.lifecycle.world import Action, World, new_world

# What no pause, lease or audit is needed after.
UNREPAIRED = ("leave", "cancel", "preempt")
# More calls of one request with its key. Not those with its resume token: here they can come before any executor has
# the request, and end it then.
READ = ("repeat",)
# One failure or choice of a client, or two, in any place of the order.
QUICK = (
    (),
    ("leave a",),
    ("cancel a",),
    ("preempt a",),
    ("unlink r0",),
    ("grace r0",),
    ("lost r0",),
    ("unanswered r0",),
    ("crash r0",),
    ("stop r0",),
    ("leave a", "lost r0"),
    ("leave a", "unanswered r0"),
    ("cancel a", "lost r0"),
    ("cancel a", "unanswered r0"),
    ("preempt a", "leave a"),
    ("preempt a", "unanswered r0"),
    ("stop r0", "lost r0"),
)
LONG = (
    ("executor",),
    ("empty",),
    ("repeat a r1",),
    ("resume a r1",),
    ("leave a", "unlink r0"),
    ("unanswered r0", "unlink r0"),
    ("crash r0", "repeat a r1"),
    ("crash r0", "resume a r1"),
    ("stop r0", "repeat a r1"),
    # Two and three readers with one key on two routers.
    ("repeat a r1", "repeat a r0"),
    ("resume a r1", "repeat a r0"),
)
# Another request would multiply the orders by twenty.
ALONE = (("repeat a r1", "repeat a r0"),)


def begun(*faults: str) -> World:
    """Both requests have come: `a` can be repeated, `b` not, which `ALONE` does without."""
    world = new_world(*faults)
    world.arrive("a", "r0", digest=True)
    if faults not in ALONE:
        world.arrive("b", "r1", digest=False)
    return world


def explore(first: World) -> int:
    """Takes every order of steps to its end. Returns the number of different worlds."""
    seen = {first.key()}
    pending: list[tuple[World, tuple[Action, ...]]] = [(first, ())]
    is_only_read = all(fault.startswith(READ) for fault in first.faults)
    is_repaired = not all(fault.startswith(UNREPAIRED) for fault in first.faults)
    while pending:
        world, path = pending.pop()
        assert is_repaired or ("timer",) not in world.actions(), f"an audit has to settle what is left after {path}"
        if world.is_at_rest():
            _check(world.check_end, path)
            if is_only_read:
                _check(lambda world=world: world.check_read("a"), path)
        for action in world.actions():
            following = world.copy()
            _check(lambda world=following, action=action: world.step(action), (*path, action))
            key = following.key()
            if key not in seen:
                seen.add(key)
                pending.append((following, (*path, action)))
    return len(seen)


def _check(work: object, path: tuple[Action, ...]) -> None:
    try:
        work()  # type: ignore[operator]
    except Exception as error:
        steps = "".join(f"\n  {action}" for action in path)
        raise AssertionError(f"{error!r} after{steps}") from error


@pytest.mark.parametrize("faults", QUICK, ids=" + ".join)
def test_every_order_of_two_requests_ends_well(faults: tuple[str, ...]) -> None:
    assert explore(begun(*faults)) > 20


@pytest.mark.slow
@pytest.mark.parametrize("faults", LONG, ids=" + ".join)
def test_every_one_of_many_orders_ends_well(faults: tuple[str, ...]) -> None:
    assert explore(begun(*faults)) > 1000


MANY = (
    *("leave a", "leave b", "leave c", "leave d", "cancel a", "cancel b", "cancel c", "preempt a", "preempt b"),
    *("repeat a r1", "repeat a r2", "repeat a r0", "repeat c r0", "resume a r1", "resume b r2", "resume c r0"),
    *("unlink r0", "unlink r1", "unlink r2", "grace r0", "grace r1", "lost r0", "lost r1", "lost r2"),
    *("unanswered r0", "unanswered r1", "unanswered r2", "crash r0", "crash r1", "stop r0", "stop r2"),
    *("executor", "executor", "empty"),
)


@settings(max_examples=examples(400), deadline=None)
@given(
    st.lists(st.sampled_from(MANY), max_size=8),
    st.integers(1, 3),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.randoms(use_true_random=False),
)
def test_random_orders_of_a_larger_system_end_well(
    faults: list[str], num_seats: int, repeatable: list[bool], random: object
) -> None:
    world = new_world(*faults, num_routers=3, num_seats=num_seats)
    for number, (name, digest) in enumerate(zip("abcd", repeatable, strict=True)):
        world.arrive(name, f"r{number % 3}", digest=digest)
    path: list[Action] = []
    while not world.is_at_rest():
        path.append(random.choice(world.actions()))  # type: ignore[attr-defined]
        _check(lambda: world.step(path[-1]), tuple(path))
    _check(world.check_end, tuple(path))
