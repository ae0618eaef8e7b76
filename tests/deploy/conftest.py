"""Fixtures of the tests of deployment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from tests.deploy.images import Image, build, make_base, only_user

BUILT = ("router", "gateway", "executor-cpu", "models")


@pytest.fixture(scope="module")
def images() -> Iterator[Mapping[str, Image]]:
    """The images by their targets, built from this working copy."""
    with only_user():
        make_base()
        for target in BUILT:
            build(target)
        mounted: dict[str, Image] = {}
        try:
            for target in BUILT:
                mounted[target] = Image.mount(target)
            yield mounted
        finally:
            for image in mounted.values():
                image.remove()
