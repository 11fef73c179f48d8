"""Makes pages of the guides: `guides/*.py` are scripts in jupytext's percent format, and become notebooks.

Sphinx executes the notebooks. They are the files that readers download, or open in Colab and Kaggle from where the site
is published, so each begins with a cell that installs the package, which is not executed here. Guides that start their
own script again cannot be notebooks: their pages show the script, and what it prints.
"""

import hashlib
import os
import pathlib
import re
import subprocess
import sys

import jupytext
import nbformat
from repository_address import ADDRESS

ROOT = pathlib.Path(__file__).parents[2]
GUIDES = ROOT / "guides"
PAGES = ROOT / "docs" / "guides"

PUBLISHED = f"/{ADDRESS.removeprefix('https://github.com/')}/blob/gh-pages/_sources/guides"

LOGGED = re.compile(r"\[Gloo\]|absl::InitializeLog|^(\[\d+\] )?[IWE]0000 ")

KAGGLE = "https://kaggle.com/kernels/welcome?src="
LAUNCH = f"""\
<a class="launch" href="https://colab.research.google.com/github{PUBLISHED}/NAME.ipynb">Open in Colab</a>
<a class="launch" href="{KAGGLE}https://github.com{PUBLISHED}/NAME.ipynb">Open in Kaggle</a>
"""
INSTALL = f"""\
# Only in Colab and Kaggle: installs a wheel that was uploaded, or else the repository.
EXTRAS = "EXTRAS_OF_GUIDE"  # for GPUs: "EXTRAS_OF_GUIDE,cuda12"; for TPUs: "EXTRAS_OF_GUIDE,tpu"
WHEELS = !find /kaggle/input "$PWD" -name "keras_dist-*.whl" 2>/dev/null
SOURCE = f"file://{{WHEELS[0]}}" if WHEELS else "git+{ADDRESS}"
!pip install -q "keras-dist[{{EXTRAS}}] @ {{SOURCE}}"
"""
RUN_SCRIPT = f"""\
!git clone -q {ADDRESS} && pip install -q "./{ADDRESS.rpartition("/")[2]}[checkpoint,guides]"
!python {ADDRESS.rpartition("/")[2]}/guides/NAME.py
"""


def is_script(source: str) -> bool:
    """Returns whether a guide starts its own file, which a notebook does not have."""
    return "__file__" in source


def as_notebook(name: str, source: str) -> nbformat.NotebookNode:
    """Returns a guide as a notebook with links to Colab and Kaggle, whose second cell installs the package."""
    notebook = jupytext.reads(source, fmt="py:percent")
    title, _, text = notebook.cells[0].source.partition("\n")
    notebook.cells[0].source = f"{title}\n\n{LAUNCH.replace('NAME', name)}{text}"
    extras = "guides,checkpoint,hub" if "import keras_hub" in source else "guides"
    cell = INSTALL.replace("EXTRAS_OF_GUIDE", extras)
    install = nbformat.v4.new_code_cell(cell, metadata={"tags": ["skip-execution", "hide-cell"]})
    notebook.cells.insert(1, install)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # the same at each build, so that outputs of an earlier one are used
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
        "language_info": {"name": "python", "pygments_lexer": "ipython3"},
    }
    return notebook


def as_page(name: str, source: str, output: str) -> str:
    """Returns a page with a script and what it prints."""
    title, _, text = source.removeprefix('"""').partition('"""')[0].partition("\n")
    return f"""# {title.rstrip(".")}
{text.partition("Run: ")[0]}
This guide is a script and not a notebook, because it starts its own file as other processes.
Download {{download}}`{name}.py <../../guides/{name}.py>`, and run `python {name}.py`. In a new notebook of
<a class="launch" href="https://colab.new">Colab</a> or
<a class="launch" href="https://www.kaggle.com/code/new">Kaggle</a>, run this cell:

```ipython3
{RUN_SCRIPT.replace("NAME", name)}```

## What it prints

```text
{output.rstrip()}
```

## The script

```python
{source.rstrip()}
```
"""


def output_of(guide: pathlib.Path, folder: pathlib.Path) -> str:
    """Returns what a guide prints, without the lines that the libraries for processes and TensorFlow log.

    Runs it, unless the folder has the output of the same script from an earlier build.
    """
    kept = folder / "printed" / f"{guide.stem}-{hashlib.sha256(guide.read_bytes()).hexdigest()[:16]}.txt"
    if not kept.exists():
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, guide]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(f"{guide} failed:\n{done.stdout}")
        kept.parent.mkdir(exist_ok=True, parents=True)
        kept.write_text("".join(line for line in done.stdout.splitlines(keepends=True) if not LOGGED.search(line)))
    return kept.read_text()


def write_pages(app) -> None:
    PAGES.mkdir(exist_ok=True)
    for guide in sorted(GUIDES.glob("*.py")):
        source = guide.read_text()
        if not is_script(source):
            nbformat.write(as_notebook(guide.stem, source), PAGES / f"{guide.stem}.ipynb")
            continue
        output = "(not executed)" if app.config.nb_execution_mode == "off" else output_of(guide, app.outdir.parent)
        (PAGES / f"{guide.stem}.md").write_text(as_page(guide.stem, source, output))


def link_pages(app, name: str, source: list[str]) -> None:
    """Lets links to guides in the repository lead to their pages."""

    def page(match: re.Match) -> str:
        suffix = "md" if is_script((GUIDES / f"{match[1]}.py").read_text()) else "ipynb"
        return f"](guides/{match[1]}.{suffix})"

    source[0] = re.sub(r"\]\(\.\./guides/(\w+)\.py\)", page, source[0])


def setup(app):
    app.connect("builder-inited", write_pages)
    app.connect("source-read", link_pages)
    return {"parallel_read_safe": True}
