"""The page: sections of text, tables and pictures in one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from string import Template

import epcache
from epcache.report.board import best_of_kinds, board, commands
from epcache.report.canvas import Picture
from epcache.report.collect import Entry, Results, Task, averaged
from epcache.report.exhibits import attention_section, store_section
from epcache.report.formats import Table, escape, short, to_html
from epcache.report.published import Beside
from epcache.report.tables import head_text, layer_text, train_text

MOST_CARDS = 6


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page."""

    name: str
    title: str
    body: str
    """HTML; nothing where there is no data."""
    command: str
    """What would fill it."""


def make_page(
    results: Results,
    tables: Mapping[str, Table],
    pictures: Mapping[str, Picture],
    beside: Sequence[Beside],
) -> str:
    """The whole file."""
    sections = _sections(results, tables, pictures, beside)
    filled = [section for section in sections if section.body]
    missing = [section for section in sections if not section.body]
    title = _title(results)
    return _template("page.html").substitute(
        title=escape(title),
        style=_file("style.css"),
        script=_file("page.js"),
        lead=_lead(results),
        contents="\n".join(
            f'<li><a href="#{section.name}">{escape(section.title)}</a></li>' for section in filled
        ),
        sections="\n".join(_section(section) for section in filled) + _missing(missing),
        footer=_footer(results),
    )


def _sections(
    results: Results,
    tables: Mapping[str, Table],
    pictures: Mapping[str, Picture],
    beside: Sequence[Beside],
) -> list[Section]:
    def part(*names: str) -> str:
        """Pictures and tables of these names, in this order, those that there are."""
        found = []
        for name in names:
            if name in pictures:
                found.append(_picture(pictures[name]))
            elif name in tables:
                found.append(_table(tables[name], has_title=len(names) > 1))
        return "\n".join(found)

    return [
        Section(
            name="results", title="Results", body=board(results, beside), command="epcache probe"
        ),
        Section(
            name="published", title="Published numbers", body=part("published"),
            command="epcache extract --dataset imagenet1k --backbone mae_vitb16",
        ),
        Section(
            name="cost", title="Cost", body=part("params", "macs", "costs"),
            command="epcache probe --pooler ep,gap,aim",
        ),
        Section(
            name="layers", title="Layers", body=part("layers") and part("layers", "layer_winners"),
            command="epcache layerwise",
        ),
        Section(
            name="shots", title="Few images", body=_shots(results, part("shots")),
            command="epcache lowshot",
        ),
        Section(
            name="rates", title="Learning rates", body=part("rates"),
            command="epcache probe --lr 0.001,0.01,0.1",
        ),
        Section(
            name="training", title="Training", body=part("training", "convergence"),
            command="epcache probe",
        ),
        Section(
            name="backbones", title="Backbones", body=part("ranks", "flips"),
            command="epcache layerwise STORE OTHER_STORE",
        ),
        Section(
            name="attention", title="Attention",
            body=attention_section(results, tables), command="epcache attention",
        ),
        Section(
            name="stores", title="Stores", body=store_section(results), command="epcache extract"
        ),
        Section(
            name="commands", title="Commands", body=commands(results), command="epcache probe"
        ),
    ]  # fmt: skip


def _shots(results: Results, body: str) -> str:
    """With where the subsets' indices are kept."""
    if not body or not results.subsets:
        return body
    where = results.subsets[0].parent
    return (
        f'{body}\n<p class="note">The indices of {_plural(len(results.subsets), "subset")} are '
        f"kept in <code>{escape(where)}</code>.</p>"
    )


def _section(section: Section) -> str:
    return (
        f'<section id="{section.name}" aria-labelledby="{section.name}-title">\n'
        f'<h2 id="{section.name}-title">{escape(section.title)}</h2>\n{section.body}\n</section>'
    )


def _missing(sections: Sequence[Section]) -> str:
    """One line for each section that has nothing to show."""
    if not sections:
        return ""
    items = "\n".join(
        f"<li>{escape(section.title)}: <code>{escape(section.command)}</code></li>"
        for section in sections
    )
    return (
        '\n<section aria-labelledby="more-title"><h2 id="more-title">Not measured yet</h2>\n'
        f"<p>These parts of the page have no data. The command beside each fills it.</p>\n"
        f"<ul>\n{items}\n</ul></section>"
    )


def _title(results: Results) -> str:
    backbones = list(dict.fromkeys(task.backbone for task in results.tasks))
    datasets = list(dict.fromkeys(task.dataset for task in results.tasks))
    return f"Probing {_some(backbones, 'backbones')} on {_some(datasets, 'data sets')}"


def _some(names: Sequence[str], what: str) -> str:
    if len(names) > 2:
        return f"{len(names)} {what}"
    return " and ".join(short(name, 40) for name in names)


def _lead(results: Results) -> str:
    """What was measured, and the best of each task."""
    rows = results.rows
    heads = {entry.head for entry in results.entries}
    layers = {(row.backbone, row.layer) for row in rows}
    num_trained = sum(row.recipe is not None for row in rows)
    what = f"{_plural(len(heads), 'head')} at {_plural(len(layers), 'layer')}"
    if len(results.scored) == len(rows):
        text = f"{_plural(len(rows), 'row')}: {what}, all scored on the evaluation split."
    else:
        text = (
            f"{len(rows):,} rows, {num_trained:,} of them trained probes: {what}, "
            f"{len(results.scored):,} scored on the evaluation split. The others lost the choice "
            "of rate on held-out training images."
        )
    cards = [card for task in results.tasks if (card := _card(results, task))]
    more = len(cards) - MOST_CARDS
    note = f'<p class="note">And {more} more, in the table below.</p>' if more > 0 else ""
    return (
        f'<p class="lead">{text}</p>\n'
        '<ul class="cards" aria-label="What held-out data chooses, top-1 in %">\n'
        + "\n".join(cards[:MOST_CARDS])
        + f"\n</ul>{note}{_problems(results)}"
    )


def _card(results: Results, task: Task) -> str:
    """What held-out data chooses of each kind of head."""
    lines = "".join(
        f"<li><span>{escape(kind)}</span> <b>{100 * (entry.score or 0):.2f}</b> "
        f"<small>{escape(head_text(entry))}, {_details(entry)}</small></li>"
        for kind, entry in best_of_kinds(results, task).items()
    )
    if not lines:
        return ""
    return f'<li><p class="where">{escape(short(task.name, 60))}</p><ul>{lines}</ul></li>'


def _details(entry: Entry) -> str:
    row = entry.row
    parts = [f"layer{'s' * (averaged(row) > 1)} {layer_text(row)}"]
    if row.num_params is not None:
        parts.append(f"{row.num_params:,} parameters")
    if not entry.is_whole:
        parts.append(f"{train_text(row)} of train")
    return escape(", ".join(parts))


def _problems(results: Results) -> str:
    if not results.problems:
        return ""
    shown = [f"<li>{escape(problem)}</li>" for problem in results.problems[:5]]
    more = len(results.problems) - len(shown)
    rest = f"<li>and {more} more</li>" if more else ""
    return (
        '<details class="note"><summary>Files that could not be read, and are left out: '
        f"{len(results.problems)}</summary><ul>{''.join(shown)}{rest}</ul></details>"
    )


def _picture(picture: Picture) -> str:
    files = " ".join(
        f'<a href="figures/{escape(path.name)}">{path.suffix[1:].upper()}</a>'
        for path in picture.files
    )
    return (
        f"<figure>\n<h3>{escape(picture.title)}</h3>\n"
        f'<div class="wide">{picture.wide}</div>\n<div class="narrow">{picture.narrow}</div>\n'
        f"<figcaption>{escape(picture.caption)} {files}</figcaption>\n</figure>"
    )


def _table(table: Table, *, has_title: bool) -> str:
    title = f"<h3>{escape(table.title)}</h3>\n" if has_title else ""
    return title + to_html(table)


def _footer(results: Results) -> str:
    versions = sorted({str(row.epcache_version) for row in results.rows})
    return (
        f"<p>Made by epcache {escape(epcache.__version__)} from {escape(results.folder)}; rows by "
        f"version {escape(', '.join(versions))}. Figures and tables lie beside this page in "
        "<code>figures/</code> and <code>tables/</code>.</p>"
    )


def _plural(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _template(name: str) -> Template:
    return Template(_file(name))


def _file(name: str) -> str:
    return (resources.files("epcache.report") / name).read_text(encoding="utf-8")
