"""How Sphinx makes a site of the pages under docs/.

The pages are plain Markdown that reads as well where the repository is browsed, so the source folder is the repository:
a relative link to a report, a .proto file or another page means the same in both places. `make docs` runs it, and takes
every warning for an error: a page in no table of contents, a link or an anchor that leads nowhere.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

project = "inflight"
release = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["version"]
author = "the inflight authors"
copyright = author

extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "bench/reports/*.md", "bench/workloads/README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
# Folders that are large, and never hold a page.
exclude_patterns = [".[a-z]*/**", "build/**", "dist/**", "run/**", "protos/**", "**/__pycache__"]

# `page.md#a-heading`, as the repository's browser names headings.
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]
html_theme = "furo"
html_title = f"inflight {release}"
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_extra_path = ["site/index.html"]  # sends the bare address to the first page
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}

# `make docs-links` asks the outside world; addresses in examples do not exist.
linkcheck_ignore = [r"https?://localhost.*", r"https?://127\..*", r"https?://[^/]*\.example(\..*)?/?.*"]
linkcheck_timeout = 20
