"""The generated pages are what their sources give, and the site builds without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.contract.test_imports import REPOSITORY
from tools.reference.main import DOCS, pages
from tools.reference.settings_page import settings_classes

SVG = "{http://www.w3.org/2000/svg}"


def test_generated_pages_are_fresh() -> None:
    stale = [name for name, text in pages().items() if (DOCS / name).read_text(encoding="utf-8") != text]
    assert not stale, "run `make docs-reference`"


def test_every_setting_is_in_the_reference() -> None:
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    for package, settings in settings_classes():
        section = page.partition(f"\n## {package.capitalize()}\n")[2].partition("\n## ")[0]
        assert set(re.findall(r"`INFLIGHT_(\w+)` \|", section)) == {name.upper() for name in settings.model_fields}


@pytest.mark.parametrize("picture", sorted((DOCS / "pictures").glob("*.svg")), ids=lambda path: path.name)
def test_picture_says_what_it_shows_and_has_a_dark_side(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    title, description = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None
    assert title.text
    assert description is not None
    assert len(description.text or "") > 100
    assert root.get("aria-labelledby") == "title desc"
    text = picture.read_text(encoding="utf-8")
    is_screenshot = "Generated with Rich" in text  # terminals have one theme
    assert is_screenshot or "prefers-color-scheme: dark" in text


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-n", "-W", "--keep-going", "-c", "docs", "-b", "html"]
    built = subprocess.run([*command, ".", str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "index.html").exists()
    assert (tmp_path / "docs" / "concepts.html").exists()
