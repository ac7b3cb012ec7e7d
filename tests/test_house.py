"""The house stays in order: imports point one way, and the light parts stay light."""

import ast
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"epcache": "epcache", "cli": "epcache.cli", "pipelines": "epcache.pipelines"}


def imports_of(path):
    """Modules of epcache that a file imports, at the top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] == "epcache"}


def files(folder):
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("epcache", ("epcache.cli", "epcache.pipelines")),
        ("pipelines", ("epcache.cli",)),
        (
            "epcache/store",
            ("epcache.backbone", "epcache.manifest", "epcache.dataset", "epcache.plan"),
        ),
        ("epcache/poolers", ("epcache.store", "epcache.backbone", "epcache.probe")),
    ],
)
def test_imports_point_one_way(folder, forbidden):
    """The library knows no command, and the store knows no backbone."""
    assert files(folder)
    for path in files(folder):
        wrong = [name for name in imports_of(path) if name.startswith(forbidden)]
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


@pytest.mark.parametrize("folder", ["epcache", "pipelines"])
def test_the_library_prints_nothing(folder):
    """Printing belongs to the commands."""
    for path in files(folder):
        for node in ast.walk(ast.parse(path.read_text())):
            called = getattr(getattr(node, "func", None), "id", "")
            assert called != "print", f"{path.relative_to(ROOT)}:{node.lineno} prints"


@pytest.mark.parametrize(
    "statement",
    [
        "import epcache",
        "import epcache.cli.main",
        "import epcache.manifest; epcache.manifest.list_datasets()",
        "import epcache.store.reader, epcache.store.verify",
    ],
)
def test_light_parts_import_neither_torch_nor_zarr(statement):
    """``--help``, listings and reading a store start at once."""
    check = f"{statement}; import sys; print({{'torch', 'timm', 'zarr'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_no_file_and_no_function_is_too_long():
    """A file fits a sitting and a function a screen, so that a newcomer finds the way."""
    for folder in FOLDERS:
        for path in files(folder):
            text = path.read_text()
            assert text.count("\n") <= 420, f"{path.relative_to(ROOT)} is too long"
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef):
                    lines = (node.end_lineno or 0) - node.lineno
                    assert lines <= 110, f"{path.relative_to(ROOT)}: {node.name} is too long"


def test_readme_shows_what_its_sources_say():
    """The generated tables of README.md are current."""
    script = runpy.run_path(str(ROOT / "scripts" / "readme_tables.py"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert script["render"](readme) == readme
    assert "<!-- bench -->" in readme
    assert "| extract all layers |" in readme


def test_readme_links_lead_somewhere():
    """Every file that README.md names exists."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]+)\)", readme)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link
