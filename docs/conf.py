"""Settings of the manual, which `make docs` builds with Sphinx and MyST-NB.

The source folder is the whole repository, not docs/ alone. So the manual shows the notebooks, the
benchmarks and the project's own texts where they lie, and Sphinx checks the links between them.
"""

import json
import re
from importlib import import_module
from importlib.metadata import version as version_of
from pathlib import Path
from types import ModuleType

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx

import optax_lsdp

# Where Colab finds the notebooks folder: the one address to fill in when the repository has one.
COLAB = "https://colab.research.google.com/github/OWNER/optax_lsdp/blob/main"

project = "optax_lsdp"
author = "The optax_lsdp authors"
copyright = f"2026, {author}"
release = version = version_of("optax-lsdp")

root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "notebooks/*.ipynb",
    "benchmarks/**.md",
    "*.md",
]
exclude_patterns = ["docs/_build", "**/.*", ".*", "build", "dist"]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
nb_execution_mode = "off"  # notebooks show their committed outputs, which the tests compute again
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # the same anchors as on code hosts
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints = "none"  # docstrings name types and shapes
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
python_maximum_signature_line_length = 72
add_module_names = False
nitpick_ignore_regex = [  # types without a page here
    ("py:class", r"Stopped|PyTree|(jax|collections|typing|numpy|optax)\..*"),
]
suppress_warnings = ["mystnb.unknown_mime_type"]
toc_object_entries_show_parents = "hide"

html_theme = "sphinx_book_theme"
html_title = "optax_lsdp"
html_static_path = ["_static"]
html_css_files = ["manual.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "navbar_persistent": [],  # the sidebar has the search field
    "show_navbar_depth": 1,
    "use_download_button": False,
    "use_fullscreen_button": False,
}
html_math_renderer = "mathml"  # nothing is loaded from elsewhere


def public_names() -> dict[str, str]:
    """Return how docstrings name public things, and their full names in the reference."""
    names = {
        name: f"optax_lsdp.{name}"
        for name in optax_lsdp.__all__
        if not isinstance(getattr(optax_lsdp, name), ModuleType)
    }
    folders = sorted({path.parent.name for path in Path(optax_lsdp.__file__).parent.glob("*/*.py")})
    for folder in folders:
        if folder == "cli":
            continue
        for name in import_module(f"optax_lsdp.{folder}").__all__:
            full = names.get(name, f"optax_lsdp.{folder}.{name}")
            names.setdefault(name, full)
            names[f"{folder}.{name}"] = names[f"optax_lsdp.{folder}.{name}"] = full
    return names


NAMES = public_names()


def link_names(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]):
    """Turn the backquotes of a docstring into links where they hold a public name, else into code.

    Our docstrings are plain text with Markdown's backquotes. Examples stay as they are. What
    reStructuredText would read as markup in the rest of the text is escaped.
    """
    pattern = re.compile(r"(`[^`]+`|^ *>>>.*?(?:\n\s*\n|\Z))", re.DOTALL | re.MULTILINE)
    parts = pattern.split("\n".join(lines))
    for index, part in enumerate(parts):
        if part.lstrip().startswith(">>>"):
            continue
        if index % 2:
            inner = part.strip("`")
            full = NAMES.get(inner.removeprefix("lsdp."), name)
            code = f"``{' '.join(inner.split())}``"
            parts[index] = code if full == name else f":py:obj:`{inner} <{full}>`"
        else:
            parts[index] = re.sub(r"(?<=\w)_(?=\W|$)", r"\\_", part.replace("|", r"\|"))
    lines[:] = "".join(parts).split("\n")
    if what in ("attribute", "property"):
        lines[:0] = ["..", ""]  # a comment: else napoleon takes words before a colon for a type


def skip_fields(app: Sphinx, what: str, name: str, thing: object, skip: bool, options: object):
    """Leave out the fields of named tuples, which `Attributes:` describes."""
    return True if type(thing).__name__ == "_tuplegetter" else None


def add_colab_button(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put a button above each notebook that opens it in Colab."""
    if not docname.startswith("notebooks/"):
        return
    notebook = json.loads(source[0])
    button = f'<a class="colab" href="{COLAB}/{docname}.ipynb">Open in Colab</a>'
    cell = {"cell_type": "markdown", "metadata": {}, "source": button}
    if notebook.get("nbformat_minor", 0) >= 5:
        cell["id"] = "colab"
    notebook["cells"].insert(1, cell)
    source[0] = json.dumps(notebook)


def unlink_folders(app: Sphinx, docname: str, source: list[str]) -> None:
    """Turn links to folders into code: the manual has no pages for folders, as code hosts do."""
    here = Path(app.env.doc2path(docname)).parent

    def shown(match: re.Match) -> str:
        return f"`{match[2]}`" if (here / match[2]).is_dir() else match[0]

    source[0] = re.sub(r"\[([^\]]+)\]\(([\w./-]+)\)", shown, source[0])


def show_math(self, node: nodes.Element) -> None:
    """Write mathematics as MathML, which browsers show without a script."""
    text = node.astext().replace("−", "-")
    is_block = isinstance(node, nodes.math_block)
    self.body.append(latex2mathml.tex2mathml(text, as_block=is_block))
    raise nodes.SkipNode


def add_front_page(app: Sphinx, exception: Exception | None) -> None:
    """Let the root of the built folder lead to the manual's first page."""
    if exception is None and app.builder.format == "html":
        page = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html">'
        (Path(app.outdir) / "index.html").write_text(f"{page}\n", encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Register what is above."""
    app.connect("autodoc-process-docstring", link_names, priority=100)  # before napoleon
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("source-read", add_colab_button)
    app.connect("source-read", unlink_folders)
    app.connect("build-finished", add_front_page)
    app.add_html_math_renderer("mathml", (show_math, None), (show_math, None))
