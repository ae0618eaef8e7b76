"""The size of the measured pool, and the names of its parts. Names have one length, so that commands have blanks."""

from __future__ import annotations

from dataclasses import dataclass

# An id as routers make them has 32 hexadecimal digits. An odd factor spreads the numbers over all of them.
ID_FACTOR = 0x9E3779B97F4A7C15F39CC0605CEDC835
ID_BITS = 128
# Blocks for each seat: about what a request of the mixed traffic needs, and more than the largest plain one needs.
MIXED_BLOCKS, PLAIN_BLOCKS = 90, 200


@dataclass(frozen=True, slots=True)
class PoolScale:
    """One point of the benchmark. Every executor has `seats`.

    With mixed traffic blocks are about as scarce as seats and reserved for likely outputs (`max_utilization`), some
    requests need a large part of an executor, some have deadlines that they miss, most share a prefix with others.
    Plain traffic is the best case: blocks enough for any seat, one size, deadlines that are far away.
    """

    queued: int
    executors: int
    seats: int = 32
    tenants: int = 100
    routers: int = 16
    is_mixed: bool = True

    @property
    def num_seats(self) -> int:
        return self.executors * self.seats

    @property
    def blocks(self) -> int:
        """The blocks of an executor."""
        return self.seats * (MIXED_BLOCKS if self.is_mixed else PLAIN_BLOCKS)


def request_id(number: int) -> bytes:
    """Returns the id of a request; no two numbers share one."""
    return b"%032x" % (number * ID_FACTOR % (1 << ID_BITS))


def executor_id(number: int) -> bytes:
    return b"executor-%05d:50061" % number


def router_id(number: int) -> str:
    """Returns the id of a router: host, port and what makes this start of it its own."""
    return f"router-{number:05d}:50051:{number * ID_FACTOR % (1 << 32):08x}"
