"""Sphinx: MyST pages, an API section from docstrings, and their examples as doctests."""

from importlib.metadata import version as _version

project = "moekit"
author = "the moekit authors"
copyright = author
release = _version("moekit")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
templates_path = ["_templates"]

autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
napoleon_google_docstring = False
napoleon_use_rtype = False
# A carrier is shown both where it is defined and in the package that exports it.
suppress_warnings = ["ref.python"]

html_theme = "alabaster"
html_theme_options = {"description": "Functions that train Mixture-of-Experts models", "page_width": "70em"}
