"""How Sphinx builds these pages: `make docs`."""

from __future__ import annotations

import aiolock

project = "aiolock"
author = "the aiolock developers"
project_copyright = author
version = release = aiolock.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "separated"
# Classes and types of the inside are named in docstrings and signatures, but have no page of their own.
nitpicky = False

html_theme = "furo"
html_title = f"aiolock {release}"
html_copy_source = False
