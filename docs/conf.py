"""Sphinx: the documentation as a site, by `make site`."""

project = "Carpool"
extensions = ["myst_parser", "sphinxcontrib.mermaid"]
exclude_patterns = ["carpool_docs"]
html_theme = "furo"
html_title = "Carpool"
myst_heading_anchors = 4  # links to headings as on GitHub
myst_fence_as_directive = ["mermaid"]
