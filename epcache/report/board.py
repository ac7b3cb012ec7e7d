"""The leaderboard, which sorts and filters, and the command of every row."""

from __future__ import annotations

from collections.abc import Sequence

from epcache.report.canvas import number
from epcache.report.collect import Entry, Results, Task, best_entry
from epcache.report.formats import NONE, escape, short
from epcache.report.published import Beside
from epcache.report.tables import head_text, layer_text, train_text

MOST_ROWS = 500
"""Of the leaderboard and of the commands: a page with more is slow. The CSV has all."""

COLUMNS = (
    ("head", False, "Head", ""),
    ("test", True, "Test", "chosen on held-out"),
    ("best", True, "Best epoch", "as published tables"),
    ("val", True, "Held-out", ""),
    ("layer", True, "Layer", ""),
    ("train", True, "Train", ""),
    ("params", True, "Params", ""),
    ("macs", True, "MACs", "an image"),
    ("epochs", True, "Epochs", ""),
    ("lr", True, "lr", ""),
    ("seed", True, "Seed", ""),
    ("backbone", False, "Backbone", ""),
    ("dataset", False, "Data set", ""),
    ("run", False, "Run", "its command"),
)
"""Name, whether it sorts as a number, label, and a small line below."""


def board(results: Results, beside: Sequence[Beside]) -> str:
    """The table with its filters; empty where no row was scored."""
    if not results.scored:
        return ""
    kept = best_of_each(results, MOST_ROWS)
    anchors = anchors_of(results)
    best = {
        entry.row.run for task in results.tasks for entry in best_of_kinds(results, task).values()
    }
    rows = [_row(entry, anchors, is_best=entry.row.run in best) for entry in kept]
    rows += [_published_row(each) for each in beside]
    heads = "".join(
        f'<th scope="col"{" class=n" if is_number else ""}'
        f"{' aria-sort=descending' if name == 'test' else ''}>{label}"
        f"{f' <small>{below}</small>' if below else ''}</th>"
        for name, is_number, label, below in COLUMNS
    )
    cut = (
        f" Of {len(results.scored):,} scored rows {MOST_ROWS} are shown, the best of each backbone "
        "and data set; <code>tables/leaderboard.csv</code> has all."
        if len(results.scored) > MOST_ROWS
        else ""
    )
    dagger = (
        " †: nothing was held out; the last epoch counts, which nothing chose."
        if any(entry.row.test_top1 is None for entry in kept)
        else ""
    )
    return (
        "<p><b>Test</b> is top-1 accuracy on the evaluation split, in percent, at the rate and "
        "epoch that held-out training images chose. <b>Best epoch</b> is the best epoch on the "
        "evaluation split itself, which is what published tables print. Marked at the left: what "
        "held-out data chooses of the k-NN, linear and attentive heads of a backbone and data set."
        f"{dagger}{cut}</p>\n"
        + FILTERS
        + '<div class="scroll tall" tabindex="0" role="region" aria-label="Leaderboard">'
        f'<table class="board"><thead><tr>{heads}</tr></thead>\n<tbody>\n'
        + "\n".join(rows)
        + "\n</tbody></table></div>\n"
        '<p class="caption shown" role="status"></p>'
    )


FILTERS = """<div class="filters" hidden>
<label>Search <input type="search" placeholder="ep M=8, layer, run …"></label>
<label>Backbone <select name="backbone"><option value="">any</option></select></label>
<label>Data set <select name="dataset"><option value="">any</option></select></label>
<label>Pooler <select name="pooler"><option value="">any</option></select></label>
<label>Of train <select name="train"><option value="">any part</option></select></label>
</div>
"""


def best_of_each(results: Results, most: int) -> list[Entry]:
    """So many scored rows, as many of each task as there are; in order of their score."""
    places: dict[Task, int] = {}
    ranked = []
    for place, entry in enumerate(results.scored):
        places[entry.task] = places.get(entry.task, 0) + 1
        ranked.append((places[entry.task], place))
    kept = sorted(place for _, place in sorted(ranked)[:most])
    return [results.scored[place] for place in kept]


KINDS = ("k-NN", "linear", "attentive")


def kind_of(entry: Entry) -> str:
    """One of `KINDS`: what is asked of tokens."""
    row = entry.row
    if row.k is not None:
        return "k-NN"
    return "linear" if row.method is not None or row.pooler in ("cls", "gap") else "attentive"


def best_of_kinds(results: Results, task: Task) -> dict[str, Entry]:
    """Of each kind what held-out data chooses; of all of train, unless there are only subsets."""
    entries = [entry for entry in results.scored if entry.task == task and entry.score is not None]
    whole = [entry for entry in entries if entry.is_whole] or entries
    found = {kind: best_entry([e for e in whole if kind_of(e) == kind]) for kind in KINDS}
    return {kind: entry for kind, entry in found.items() if entry is not None}


def _row(entry: Entry, anchors: dict[str, str], *, is_best: bool) -> str:
    row = entry.row
    mark = "†" if row.test_top1 is None and entry.score is not None else ""
    link = escape(row.run)
    if row.run in anchors:
        link = f'<a href="#{anchors[row.run]}">{link}</a>'
    cells = [
        f"<td>{escape(short(head_text(entry), 48))}</td>",
        _percent(entry.score, "n main", mark),
        _percent(row.test_top1_best if row.epochs else None),
        _percent(row.val_top1),
        _number(row.layer, layer_text(row)),
        _number(row.train_images, train_text(row)),
        _number(row.num_params, None if row.num_params is None else f"{row.num_params:,}"),
        _number(entry.macs, None if entry.macs is None else number(entry.macs)),
        _number(row.epochs, None if row.epochs is None else str(row.epochs)),
        _number(row.lr, None if row.lr is None else f"{row.lr:g}"),
        _number(row.seed, None if row.seed is None else str(row.seed)),
        f"<td>{escape(short(row.backbone, 40))}</td>",
        f"<td>{escape(short(row.dataset, 40))}</td>",
        f"<td><code>{link}</code></td>",
    ]
    data = _data(row.backbone, row.dataset, row.pooler, train_text(row))
    return f"<tr{' class=best' if is_best else ''}{data}>{''.join(cells)}</tr>"


def _published_row(each: Beside) -> str:
    """A published number, marked as such, in the column of its protocol."""
    theirs = each.published
    note = f", {theirs.note}" if theirs.note else ""
    cells = [
        f'<td>{escape(theirs.head)} <span class="tag">published</span></td>',
        _percent(None),
        _percent(theirs.top1),
        _percent(None),
        *[_number(None, None)] * 7,
        f"<td>{escape(theirs.backbone)}</td><td>{escape(theirs.dataset)}</td>",
        f"<td>{escape(theirs.protocol + note)}</td>",
    ]
    return (
        f'<tr class="published"{_data(theirs.backbone, theirs.dataset, theirs.pooler, "all")}>'
        f"{''.join(cells)}</tr>"
    )


def commands(results: Results) -> str:
    """Every row's command, folded by backbone and data set."""
    anchors = anchors_of(results)
    shown = [entry for entry in _ordered(results) if entry.row.run in anchors]
    folds = []
    for task in results.tasks:
        own = [entry for entry in shown if entry.task == task]
        if own:
            items = "\n".join(_command(entry, anchors[entry.row.run]) for entry in own)
            folds.append(
                f"<details><summary>{escape(task.name)}: {len(own)} "
                f"command{'' if len(own) == 1 else 's'}</summary>\n"
                f'<ul class="commands">\n{items}\n</ul></details>'
            )
    left_out = len(results.entries) - len(shown)
    more = (
        f" {left_out:,} more rows are in <code>tables/rows.csv</code> only." if left_out > 0 else ""
    )
    return (
        "<p>Each command makes its run again, under the same name. A row of a sweep has the "
        f"command of that one probe: it gives the numbers that it had in company.{more}</p>\n"
        + "\n".join(folds)
    )


def anchors_of(results: Results) -> dict[str, str]:
    """An id within the page for each run whose command is shown."""
    return {entry.row.run: f"c{i}" for i, entry in enumerate(_ordered(results)[:MOST_ROWS])}


def _ordered(results: Results) -> list[Entry]:
    first = best_of_each(results, MOST_ROWS)
    known = {entry.row.run for entry in first}
    return [*first, *(entry for entry in results.entries if entry.row.run not in known)]


def _command(entry: Entry, anchor: str) -> str:
    row = entry.row
    score = "not scored" if entry.score is None else f"{100 * entry.score:.2f}%"
    return (
        f'<li id="{anchor}"><p><code>{escape(row.run)}</code> {escape(head_text(entry))}, layer '
        f"{layer_text(row)}, {score}</p><pre><code>{escape(entry.command)}</code></pre></li>"
    )


def _data(backbone: str, dataset: str, pooler: str, train: str) -> str:
    return (
        f' data-backbone="{escape(backbone)}" data-dataset="{escape(dataset)}"'
        f' data-pooler="{escape(pooler)}" data-train="{escape(train)}"'
    )


def _percent(value: float | None, classes: str = "n", mark: str = "") -> str:
    if value is None:
        return f'<td class="{classes}" data-v="">{NONE}</td>'
    return f'<td class="{classes}" data-v="{value:.6f}">{100 * value:.2f}{mark}</td>'


def _number(value: float | None, text: str | None) -> str:
    if value is None or text is None:
        return f'<td class="n" data-v="">{NONE}</td>'
    return f'<td class="n" data-v="{value}">{escape(text)}</td>'
