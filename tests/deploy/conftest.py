"""Fixtures of the tests of deployment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from tests.deploy.images import Image, build, make_base, only_user, servers_to_build


@pytest.fixture(scope="module")
def images() -> Iterator[Mapping[str, Image]]:
    """The images by their targets, built from this working copy."""
    targets = (*servers_to_build(), "models")
    with only_user():
        make_base()
        for target in targets:
            build(target)
        mounted: dict[str, Image] = {}
        try:
            for target in targets:
                mounted[target] = Image.mount(target)
            yield mounted
        finally:
            for image in mounted.values():
                image.remove()
