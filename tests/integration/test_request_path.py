"""The list of files that a request passes on its way in, against a traced call."""

from __future__ import annotations

from tests.structure.request_path import all_paths
from tests.structure.trace import trace


async def test_list_has_every_module_of_the_router_that_a_request_enters(redis_url: str) -> None:
    path = next(path for path in all_paths() if path.name == "current")
    traced = await trace(redis_url)
    assert "router.api.service" in traced
    assert not set(traced) - set(path.modules("in")) - set(path.left_out)
    # Credentials and conversations are on the list; this call has neither.
    assert set(path.modules("in")) - set(traced) == {"router.auth.authenticator"}
