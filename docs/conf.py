"""Sphinx: the pages beside this file, the notebooks, and the reference.

The source directory is the root of the project, so that links between pages,
notebooks and scripts are the same here and where the files are read as they are.
Build with `scripts/docs`.
"""

import inspect
import pathlib
import re

import optax_unitnorm

project = "optax-unitnorm"
html_title = "optax-unitnorm"
html_theme = "furo"
html_show_copyright = False
html_show_sphinx = False

root_doc = "docs/index"
include_patterns = ["docs/*.md", "benchmarks/*.md", "notebooks/*.ipynb"]
# Not entered: environments and build folders hold thousands of files.
exclude_patterns = [".*", "build", "examples", "scripts", "tests"]
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
suppress_warnings = ["toc.empty_glob"]  # a page that is not written yet
nb_execution_mode = "off"  # shown with the outputs they were committed with
myst_heading_anchors = 3

add_module_names = False
autodoc_preserve_defaults = True
autodoc_typehints = "none"  # most are Any: what fits is said in words
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Guarantees"]


def check_reference_is_whole() -> None:
    """Refuses a reference that leaves a public name out."""
    text = (pathlib.Path(__file__).parent / "api.md").read_text()
    shown = set(re.findall(r"^\.\. auto(?:function|class):: (\w+)$", text, re.M))
    public = {
        name
        for name, member in vars(optax_unitnorm).items()
        if not name.startswith("_") and not inspect.ismodule(member)
    }
    if shown != public:
        raise ValueError(f"docs/api.md and the package differ: {shown ^ public}.")


check_reference_is_whole()
