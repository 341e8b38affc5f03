"""The notebooks: what is committed was run without an error, and runs again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def test_there_are_four():
    assert NOTEBOOKS == ["fedmeta_per", "own_flax_model", "second_order", "speakers"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_committed_notebook_was_run_from_first_to_last_and_shows_a_figure(name):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert all(output.output_type != "error" and output.get("name") != "stderr" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = "".join(output.get("text", "") for output in outputs)
    assert "/tmp/" not in text and "/home/" not in text
    assert notebook.cells[0].source.startswith("# ")


def run(name, folder, **environment):
    """The finished process that runs a notebook and writes it to a folder."""
    command = [sys.executable, str(FOLDER.parent / "tools" / "notebooks.py"), name, "--to", str(folder)]
    clean = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "MPLBACKEND")}
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**clean, **environment})


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in NOTEBOOKS if name != "speakers"])
def test_a_notebook_runs(name, tmp_path):
    done = run(name, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / f"{name}.ipynb").is_file()


@pytest.mark.long
def test_the_speakers_run_on_the_real_text_or_say_how_to_get_it(tmp_path):
    """With a prepared set the notebook runs; in an empty folder it ends at its first cell, with the reason."""
    from fedjax_meta.data.sources import data_folder

    if (data_folder(None) / "tiny_shakespeare").is_dir():
        done = run("speakers", tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
    done = run("speakers", tmp_path, FEDJAX_META_DATA_DIR=str(tmp_path / "empty"))
    assert done.returncode == 1
    assert "ValueError" in done.stderr and "tiny_shakespeare" in done.stderr
