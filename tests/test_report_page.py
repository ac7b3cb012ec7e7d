"""The page is one file that needs nothing else, works without scripts, and takes any name."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from PIL import Image
from reportkit import make_row, make_rows, scored, write_results

from epcache.pipelines.report import ReportRequest, report
from epcache.report import board

EVIL = """x"><script>alert(1)</script>&'$title%_#{}\\|`"""
VOID = {"meta", "link", "img", "br", "input", "hr", "use", "path", "rect", "stop"}


class Page(HTMLParser):
    """Tags, attributes and ids of a page; elements that are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.sources, self.tags, self.stack = [], [], [], [], []
        self.rows, self.scripts = [], 0
        self.feed(text)
        assert self.stack == [], self.stack

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found[key] for key in ("href", "xlink:href") if key in found]
        self.sources += [found["src"]] if "src" in found else []
        if tag == "tr" and "data-backbone" in found:
            self.rows.append(found)
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.stack.pop()

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.stack.pop() == tag


def page_of(tmp_path, rows, **options):
    write_results(tmp_path / "results", rows, **options)
    written = report(ReportRequest(results=tmp_path / "results"))
    return written.report.read_text(), written


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A page of everything: two backbones on ImageNet, an analysed run."""
    folder = tmp_path_factory.mktemp("whole")
    rows = [row for row in make_rows() if row.dataset == "imagenet1k" and
            row.backbone != "clip_vitl14" and row.pooler in ("ep", "gap") and
            row.num_queries != 8]  # fmt: skip
    run = next(row.run for row in rows if row.pooler == "ep" and row.test_top1)
    analysed = folder / "results" / "attention" / run
    analysed.mkdir(parents=True)
    Image.new("RGB", (40, 30), "red").save(analysed / "gallery.png")
    (analysed / "scatter.png").write_bytes(b"no picture")
    measures = {
        "run": run, "pooler": "ep", "num_maps": 2, "accuracy": 0.5, "complementarity": math.nan,
        "queries": [{"query": 0, "accuracy_drop": 0.01, "entropy": None}],
        "correlations": {"measures": ["entropy", "drop"], "matrix": [[1, -0.5], [-0.5, 1]]},
        "figures": ["gallery.png", "scatter.png"], "definitions": {"entropy": "How even."},
    }  # fmt: skip
    (analysed / "attention.json").write_text(json.dumps(measures))
    return page_of(folder, rows)


def test_page_needs_nothing_else(whole):
    """No address is outside: links stay in the page or its folder, and pictures are data."""
    text, written = whole
    page = Page(text)
    beside = {f"figures/{path.name}" for path in written.figures}
    for link in page.links:
        assert link[0] == "#" or link in beside, link
    assert page.sources
    assert all(source.startswith("data:image/") for source in page.sources)
    assert "link" not in page.tags
    assert "iframe" not in page.tags
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    assert "@import" not in style
    assert "url(" not in style
    assert not re.search(r"(fetch|import|XMLHttpRequest)\(", text)


def test_ids_are_one_of_a_kind_and_links_meet_them(whole):
    """Two pictures, each twice, share no id, and every link within the page has its end."""
    page = Page(whole[0])
    assert len(page.ids) == len(set(page.ids))
    ends = {link[1:] for link in page.links if link.startswith("#")}
    assert ends <= set(page.ids)
    used = set(re.findall(r"url\(#([^)]+)\)", whole[0]))
    assert used
    assert used <= set(page.ids)


def test_all_sections_are_there(whole):
    """Every part of the report has its place and its picture."""
    text, written = whole
    for name in ("results", "published", "cost", "layers", "shots", "rates", "training",
                 "backbones", "attention", "stores", "commands"):  # fmt: skip
        assert f'<section id="{name}"' in text, name
        assert f'<a href="#{name}">' in text, name
    names = {path.stem for path in written.figures}
    assert names == {"params", "macs", "layers", "shots", "rates", "training", "ranks"}
    assert all(path.stat().st_size > 1000 for path in written.figures)
    tables = {path.name for path in written.tables}
    for name in ("leaderboard", "layers", "shots", "rates", "ranks", "published", "attention"):
        assert {f"{name}.csv", f"{name}.md", f"{name}.tex"} <= tables
    assert "rows.csv" in tables


def test_pictures_follow_the_theme(whole):
    """No colour of the light theme is left in a picture: each is a variable of the style sheet."""
    text, _ = whole
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 14
    variables = set(re.findall(r"(--\w+):", re.search(r"<style>(.*?)</style>", text, re.S)[1]))
    for picture in pictures:
        assert not re.search(r"#[0-9a-f]{6}\b", picture)
        assert set(re.findall(r"var\((--\w+)\)", picture)) <= variables
        assert 'role="img" aria-label="' in picture


def test_published_rows_are_marked(whole):
    """A published number stands in the column of its protocol, and is never called ours."""
    text, _ = whole
    rows = re.findall(r'<tr class="published".*?</tr>', text)
    mae = [row for row in rows if "mae_vitb16" in row and "ep M=32" in row]
    assert len(mae) == 1
    assert ">published<" in mae[0]
    assert "best epoch" in mae[0]
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", mae[0])
    assert cells[:3] == ["\N{EN DASH}", "75.50", "\N{EN DASH}"]


def test_names_are_text(tmp_path):
    """Markup, templates and commands in names of backbones and data sets stay text."""
    rows = [scored(0.5 + layer / 50, layer=layer, backbone=EVIL, dataset=EVIL, pooler=EVIL)
            for layer in (1, 2)]  # fmt: skip
    text, written = page_of(tmp_path, rows, with_runs=False)
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert len([tag for tag in Page(text).tags if tag == "script"]) == 1
    svg = next(path for path in written.figures if path.name == "layers.svg").read_text()
    assert "<script" not in svg


def test_one_row_is_enough(tmp_path):
    """A single row gives a page; what is missing is named with the command that fills it."""
    text, written = page_of(tmp_path, [make_row(dataset="zoo", backbone="tiny")], with_runs=False)
    page = Page(text)
    assert len(page.rows) == 1
    assert "69.00" in text
    for command in ("epcache layerwise", "epcache lowshot", "epcache attention"):
        assert f"<code>{command}" in text
    assert 'id="layers"' not in text
    assert {path.stem for path in written.figures} == {"params"}


def test_unscored_rows_alone(tmp_path):
    """Rows that nothing scored yet give a page as well."""
    row = make_row(test_top1=None, test_top1_best=None, test_top1_last=None, dataset="zoo")
    text, _ = page_of(tmp_path, [row, replace(row, run="other", lr=0.1)], with_runs=False)
    assert 'id="rates"' in text
    assert 'class="board"' not in text


def test_many_rows_are_cut_and_told(tmp_path, monkeypatch):
    """The page draws the best rows and says so; the tables have all."""
    monkeypatch.setattr(board, "MOST_ROWS", 20)
    rows = [scored(i / 100, seed=i, dataset="zoo") for i in range(50)]
    # far behind all the others, and all the same the best of its own backbone
    rows += [scored(0.01, seed=i, dataset="zoo", backbone="weak", digest="b" * 64)
             for i in range(10)]  # fmt: skip
    text, written = page_of(tmp_path, rows, with_runs=False)
    page = Page(text)
    assert len(page.rows) == 20
    assert sum(row["data-backbone"] == "weak" for row in page.rows) == 10
    assert "Of 60 scored rows 20 are shown" in text
    assert text.count("<pre>") == 20
    csv = next(path for path in written.tables if path.name == "leaderboard.csv")
    assert csv.read_text().count("\n") == 61


def test_same_results_give_the_same_page(tmp_path):
    """Nothing in it depends on the day or on chance."""
    rows = [scored(0.5, layer=layer, dataset="zoo") for layer in (1, 2)]
    text, _ = page_of(tmp_path, rows, with_runs=False)
    again = report(ReportRequest(results=tmp_path / "results"))
    assert again.report.read_text() == text
