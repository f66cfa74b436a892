"""How Sphinx builds these pages: `make docs`."""

from __future__ import annotations

import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish
from sphinx.transforms import SphinxTransform

import aiolock

project = "aiolock"
author = "the aiolock developers"
project_copyright = author
version = release = aiolock.__version__

REPOSITORY = "https://github.com/python-aiolock/python-aiolock"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
# Classes and types of the inside are named in docstrings and signatures, but have no page of their own.
nitpicky = False

# Who looks for `once`, or for "who holds", means these words; the search box drops them otherwise.
SearchEnglish.stopwords = SearchEnglish.stopwords - {"once", "who"}

html_theme = "furo"
html_title = f"aiolock {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["pages.css"]


class BothThemes(SphinxTransform):
    """Pages name the light picture, `x-light.svg`, which is what other viewers show; here `x-dark.svg` stands beside it."""

    default_priority = 500

    def apply(self, **_: object) -> None:
        for image in list(self.document.findall(nodes.image)):
            uri = image["uri"]
            dark = uri.replace("-light.svg", "-dark.svg")
            if dark != uri and (Path(self.document["source"]).parent / dark).is_file():
                other = image.deepcopy()
                other["uri"] = dark
                image["classes"].append("only-light")
                other["classes"].append("only-dark")
                image.parent.insert(image.parent.index(image) + 1, other)


def signature(
    _: Sphinx, what: str, __: str, value: object, ___: object, arguments: str | None, ____: str | None
) -> tuple[str, None] | None:
    """Show the constructor of a class only where its docstring explains the parameters: the others are made by methods."""
    return ("", None) if arguments and what == "class" and ":param" not in (value.__doc__ or "") else None


def elsewhere(_: Sphinx, __: str, source: list[str]) -> None:
    """Have links to Markdown outside of this folder, which has no page here, lead to the repository."""
    source[0] = re.sub(r"\]\((?:\.\./)+(benchmarks/[^)]*\.md\b)", rf"]({REPOSITORY}/blob/main/\1", source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", elsewhere)
    app.connect("autodoc-process-signature", signature)
    app.add_transform(BothThemes)
