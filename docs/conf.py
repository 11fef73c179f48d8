"""How Sphinx builds the documentation. Run: pip install -e ".[docs]" && make -C docs html"""

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE / "_extensions"))

from repository_address import ADDRESS

import keras_dist

project = "keras_dist"
author = "the authors of keras_dist"
version = release = keras_dist.__version__

extensions = [
    "sphinx.ext.autodoc",
    "docstrings",  # before napoleon, which reads what it writes
    "sphinx.ext.napoleon",
    "sphinx.ext.githubpages",  # lets GitHub publish folders such as _sources
    "sphinx_copybutton",
    "myst_nb",
    "guide_pages",
    "repository_address",
    "home_picture",
    "narrow_pages",
]
exclude_patterns = ["_build", "_extensions"]

# Pages are Markdown that GitHub shows, too, with anchors of headings as GitHub makes them.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

# Docstrings are Google style.
add_module_names = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
napoleon_custom_sections = ["Source"]
napoleon_use_ivar = True

# Guides are executed, each in a kernel of its own, when they or this package have changed.
nb_execution_mode = "cache"
nb_execution_timeout = -1  # none: a cell takes several times as long while tests run
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_output_stderr = "remove"

html_theme = "sphinx_book_theme"
html_title = "keras_dist"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "repository_url": ADDRESS,
    "use_repository_button": True,
    "show_toc_level": 2,
    "use_download_button": True,
    "use_fullscreen_button": False,
    "home_page_in_toc": True,
    "navbar_persistent": [],  # the side bar has the search
}
copybutton_exclude = ".linenos, .gp, .go"
