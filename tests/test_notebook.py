"""The notebook runs from top to bottom, and its last cells show a report and take everything back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parent.parent / "examples" / "quickstart.ipynb"


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the kernel's own packages
def test_the_quickstart_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipykernel", reason="the notebook needs ipykernel: pip install '.[docs]'")
    nbclient = pytest.importorskip("nbclient", reason="the notebook needs nbclient: pip install '.[docs]'")
    import nbformat

    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    book = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells), "the notebook is committed without outputs"
    _kernel_of_this_python(tmp_path, monkeypatch)

    nbclient.NotebookClient(book, timeout=120, kernel_name="python3").execute()

    printed = [output for cell in book.cells for output in cell.get("outputs", [])]
    texts = "".join(output.get("text", "") for output in printed)
    assert "epoch 10: loss" in texts
    pages = [output["data"] for output in printed if output["output_type"] == "execute_result"]
    assert any("text/html" in page and "channels_last" in page["text/html"] for page in pages)


def _kernel_of_this_python(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `python3` be the interpreter of the tests, whatever kernels the machine has."""
    kernel = folder / "kernels" / "python3"
    kernel.mkdir(parents=True)
    command = f'{{"argv": ["{sys.executable}", "-m", "ipykernel_launcher", "-f", "{{connection_file}}"],'
    (kernel / "kernel.json").write_text(command + ' "display_name": "Python 3", "language": "python"}')
    monkeypatch.setenv("JUPYTER_PATH", str(folder))
