"""Sphinx: MyST pages, an API section from docstrings, and their examples as doctests."""

import pkgutil
from importlib.metadata import version as installed_version

import moekit

project = "moekit"
author = "the moekit authors"
copyright = author
release = installed_version("moekit")

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
# Packages show what they re-export; modules what they define.
packages = [m.name for m in pkgutil.walk_packages(moekit.__path__, "moekit.") if m.ispkg]
autosummary_context = {"packages": ["moekit", *packages]}
# An example finds the names of its own module (see _templates) and these.
doctest_global_setup = "import torch\nfrom tensordict import TensorDict\nimport moekit as mk"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "signature"
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_preprocess_types = True  # takes the shape in Float[Tensor, "*n d"] for a literal
# A carrier is shown both where it is defined and in the package that exports it.
suppress_warnings = ["ref.python"]

html_theme = "alabaster"
html_theme_options = {"description": "Functions that train Mixture-of-Experts models", "page_width": "70em"}
