"""Folders are concepts: few modules in each, and no import cycles between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.structure.measures import MAX_MODULES, crowded_folders
from tests.structure.request_path import RequestPath, all_paths
from tests.structure.tree import PRODUCT, Tree, cycles

TREE = Tree.read(Path(__file__).parents[2])


def test_folder_has_few_modules() -> None:
    assert not crowded_folders(TREE), f"more than {MAX_MODULES} modules"


@pytest.mark.parametrize("package", [package for package in PRODUCT if TREE.of(package)])
def test_folders_of_a_package_form_no_import_cycle(package: str) -> None:
    assert not cycles(TREE.rooms(package))


def test_cycle_is_found() -> None:
    graph = {
        "a": frozenset({"b"}),
        "b": frozenset({"c"}),
        "c": frozenset({"b", "d"}),
        "d": frozenset[str](),
    }
    assert cycles(graph) == [("b", "c")]


def test_functions_of_the_current_request_path_exist() -> None:
    path = next(path for path in all_paths() if path.name == "current")
    assert not path.missing(TREE)


def test_missing_function_of_a_request_path_is_found() -> None:
    path = RequestPath("x", {"in": ("router.main:main", "router.main:absent"), "out": ("router.absent:main",)})
    assert path.missing(TREE) == ["router.main:absent", "router.absent:main"]
