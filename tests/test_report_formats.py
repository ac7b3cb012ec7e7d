"""A table says the same in CSV, Markdown, LaTeX and HTML, whatever stands in it."""

import csv
import html
import io
import re

from hypothesis import given
from hypothesis import strategies as st

from epcache.report.formats import (
    MOST_PRINTED,
    Column,
    Table,
    latex,
    one_line,
    short,
    to_csv,
    to_html,
    to_latex,
    to_markdown,
    write_table,
)

NASTY = r"""a_b & 5% of $x^2$ #1 {q} ~ \cmd <b>"|`*[1]`</b>"""
COLUMNS = (Column(name="name", label="name"), Column(name="top1", label="top-1, %", kind="percent"))


def table(*rows):
    return Table(name="t", title="T", caption="C.", columns=COLUMNS, rows=rows)


@given(st.lists(st.tuples(st.text(), st.none() | st.floats(0, 1)), max_size=5))
def test_csv_reads_back(rows):
    """CSV holds raw values: text as it was, fractions in full, nothing for nothing."""
    text = to_csv(table(*rows))
    read = list(csv.reader(io.StringIO(text, newline="")))
    assert read[0] == ["name", "top1"]
    assert len(read) == len(rows) + 1
    for (name, top1), (shown, number) in zip(rows, read[1:], strict=True):
        assert shown == name.replace("\r", " ")
        assert (float(number) if number else None) == top1


@given(st.text())
def test_markdown_keeps_its_cells(name):
    """No text breaks a row: every line of the table has its two cells."""
    lines = [line for line in to_markdown(table((name, 0.5))).split("\n") if line.startswith("|")]
    assert len(lines) == 3
    for line in lines:
        assert len(re.findall(r"(?<!\\)\|", line)) == 3


@given(st.text())
def test_latex_has_no_bare_specials(text):
    """Every special letter is escaped: nothing of the text can be read as a command."""
    escaped = latex(text)
    bare = re.sub(r"\\(text[a-z]+\{\}|ensuremath\{(\\pm|-)\}|[{}&%$#_])", "", escaped)
    bare = bare.replace("{[}", "").replace("{]}", "")
    assert not re.search(r"[\\{}&%$#_~^\n]", bare), escaped


def test_latex_is_a_booktabs_table():
    """Rules, alignment, label and percentages are there, and rows end as rows do."""
    text = to_latex(table((NASTY, 0.84031), ("plain", None)))
    assert r"\begin{tabular}{lr}" in text
    for rule in ("toprule", "midrule", "bottomrule"):
        assert text.count(rf"\{rule}") == 1
    assert r" & 84.03 \\" in text
    assert r"plain & -- \\" in text
    assert r"\label{tab:epcache-t}" in text
    assert text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}")


def test_html_escapes():
    """Markup in a name is text in the page."""
    text = to_html(table((NASTY, 0.5)))
    assert "<b>" not in text
    assert html.escape(NASTY) in text
    assert '<td class="n">50.00</td>' in text


def test_long_tables_are_cut_for_people_only(tmp_path):
    """The CSV has all rows; the other forms say what they leave out."""
    long = table(*(("a", 0.1) for _ in range(MOST_PRINTED + 5)))
    paths = {path.suffix: path.read_text() for path in write_table(long, tmp_path)}
    assert paths[".csv"].count("\n") == MOST_PRINTED + 6
    assert paths[".tex"].count("10.00") == MOST_PRINTED
    for text in (paths[".md"], paths[".tex"], to_html(long)):
        assert f"The first {MOST_PRINTED} of {MOST_PRINTED + 5} rows" in text


def test_names_are_shortened_in_the_middle():
    """Both ends of a long name stay, and control characters go."""
    assert short("vit_large_patch16_224.mae", 12) == "vit_la…4.mae"
    assert short("short", 12) == "short"
    assert len(short("x" * 99, 20)) == 20
    assert one_line("a\x00b\n\tc\u2028d") == "a b c d"
