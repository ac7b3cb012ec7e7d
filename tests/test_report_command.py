"""``epcache report``: what it prints, writes and refuses."""

import json

import pytest
from extractkit import run, run_json
from reportkit import make_row, scored, write_results


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Results in the default place."""
    monkeypatch.setenv("EPCACHE_HOME", str(tmp_path / "home"))
    rows = [scored(0.5, dataset="zoo"), scored(0.6, layer=3, dataset="zoo")]
    return write_results(tmp_path / "home" / "results", rows, with_runs=False)


def test_json_names_all_files(results, capsys):
    """One object with the page, the figures and the tables, which all are there."""
    found = run_json(capsys, "report")
    assert set(found) == {"report", "figures", "tables"}
    assert found["report"] == str(results / "report" / "report.html")
    for path in [found["report"], *found["figures"], *found["tables"]]:
        assert (results / path).is_file()
    assert {path.rsplit(".", 1)[1] for path in found["figures"]} == {"png", "svg"}
    assert {path.rsplit(".", 1)[1] for path in found["tables"]} == {"csv", "md", "tex"}


def test_a_named_folder_and_place(results, tmp_path, capsys):
    """Results may lie anywhere, and the report may be written anywhere."""
    other = write_results(tmp_path / "other", [make_row(dataset="zoo")], with_runs=False)
    found = run_json(capsys, "report", other, "--out", tmp_path / "out")
    assert found["report"] == str(tmp_path / "out" / "report.html")
    assert not (other / "report").exists()
    assert not (results / "report").exists()


def test_a_person_sees_where_it_is(results, capsys):
    """The last lines say what was written and how to open it."""
    run("report")
    lines = capsys.readouterr().out.strip().splitlines()
    page = results / "report" / "report.html"
    assert lines[-2] == f"wrote {page}"
    assert lines[-1] == f"next: python -m webbrowser {page}"
    assert "params" in "\n".join(lines)


def test_files_of_an_earlier_report_go(results, capsys):
    """A figure that has no data any more is not left beside the new page."""
    run_json(capsys, "report")
    figures = results / "report" / "figures"
    assert (figures / "layers.png").exists()
    (figures / "mine.png").write_bytes(b"kept")
    row = json.loads((results / "rows.jsonl").read_text().splitlines()[0])
    (results / "rows.jsonl").write_text(json.dumps(row) + "\n")
    run_json(capsys, "report")
    assert not (figures / "layers.png").exists()
    assert not (results / "report" / "tables" / "layers.csv").exists()
    assert (figures / "mine.png").exists()


def test_nothing_to_report(tmp_path, capsys):
    """An empty folder is an error of one line with the command that makes results."""
    run("report", tmp_path, code=1)
    shown = capsys.readouterr().err
    assert len(shown.strip().splitlines()) == 1
    assert "epcache probe" in shown
    assert "epcache probe" in run_json(capsys, "report", tmp_path, code=1)["error"]


def test_damaged_files_are_told(results, capsys):
    """What cannot be read is named, and the report is written all the same."""
    row = json.loads((results / "rows.jsonl").read_text().splitlines()[0])
    path = results / "runs" / row["run"]
    path.mkdir(parents=True)
    (path / "config.json").write_text("{")
    run("report")
    shown = capsys.readouterr()
    assert f"left out: {path / 'config.json'}" in shown.err
    assert (results / "report" / "report.html").is_file()
