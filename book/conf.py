"""Sphinx's configuration. `python -m book.build` puts the pages together first; see book/build.py."""

import sphinxcontrib.katex as katex

project = "minivllm"
author = "the minivllm authors"
copyright = "2026, the minivllm authors; Apache License 2.0"
extensions = [
    "myst_nb",
    "sphinx_design",
    "sphinx_copybutton",
    "sphinx_togglebutton",
    "sphinxcontrib.katex",
]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
numfig = True

nb_execution_mode = "off"  # the notebooks come executed
nb_merge_streams = True
suppress_warnings = ["mystnb.unknown_mime_type"]

html_theme = "sphinx_book_theme"
html_title = "minivllm"
html_theme_options = {
    "navbar_persistent": [],  # else the theme shows a second, empty header with another search field
    "show_toc_level": 2,
    "use_fullscreen_button": False,
    "use_download_button": False,
}
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_show_sourcelink = False
katex_css_path = "katex/katex.min.css"
katex_prerender = False
assert katex.katex_version == "0.16.22", "book/_static/katex must be of the version that sphinxcontrib-katex ships"
