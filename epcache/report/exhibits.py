"""Sections that show files: attention pictures with their measures, and the stores."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from epcache.report.collect import AttentionRun, Results, StoreFacts
from epcache.report.formats import NONE, Table, escape, short, to_html
from epcache.report.tables import finite, mapping
from epcache.store.files import format_bytes

KINDS = {"gallery": "Maps over images", "scatter": "Measures of the queries"}
"""Pictures that are shown at once, by the stem of their name."""
MOST_RUNS, MOST_PICTURES = 6, 3
"""Of attention: runs that show pictures, and folded pictures of each."""
TIMES = "\N{MULTIPLICATION SIGN}"
PIXELS = 1800
"""Longest side of a picture inside the page; the file beside it is as it was."""


def attention_section(results: Results, tables: Mapping[str, Table]) -> str:
    """Table of runs, then each with its pictures; empty where nothing was analysed."""
    if not results.attention:
        return ""
    ordered = sorted(
        results.attention,
        key=lambda each: (not each.pictures, -(finite(each.measures.get("accuracy")) or 0)),
    )
    shown = ordered[:MOST_RUNS]
    parts = [to_html(tables["attention"])] if "attention" in tables else []
    parts += [_attention_run(each) for each in shown]
    if len(results.attention) > len(shown):
        parts.append(
            f'<p class="note">Pictures of {len(results.attention) - len(shown)} more runs lie in '
            f"{escape(results.folder / 'attention')}.</p>"
        )
    return "\n".join(parts)


def _attention_run(each: AttentionRun) -> str:
    head = each.entry.head if each.entry else str(each.measures.get("pooler", "probe"))
    where = f": {each.entry.task.name}" if each.entry else ""
    title = f"{head}{where}, run {each.run}"
    main = [path for path in each.pictures if path.stem in KINDS]
    single = [path for path in each.pictures if path.stem not in KINDS][:MOST_PICTURES]
    parts = [f"<h3>{escape(title)}</h3>", *(_img(path, title) for path in main)]
    if folded := "".join(_img(path, title) for path in single):
        parts.append(f"<details><summary>Image by image</summary>{folded}</details>")
    parts += [_query_table(each), _correlations(each)]
    return "\n".join(part for part in parts if part)


def _img(path: Path, title: str) -> str:
    """A picture with its caption; empty where the file is damaged."""
    uri = data_uri(path)
    if not uri:
        return ""
    text = escape(f"{KINDS.get(path.stem, 'The map of each query')} of {title}")
    return (
        f'<figure><div class="shot" tabindex="0" role="region" aria-label="{text}">'
        f'<img src="{uri}" alt="{text}" loading="lazy"></div><figcaption>{text}</figcaption>'
        "</figure>"
    )


def data_uri(path: Path) -> str:
    """A picture as part of the page, made smaller where it is large; empty where it is damaged."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            shrunk = picture.convert("RGB")
            shrunk.thumbnail((PIXELS, PIXELS))
    except (OSError, ValueError, UnidentifiedImageError, Image.DecompressionBombError):
        return ""
    forms = []
    for kind, options in (("png", {"optimize": True}), ("jpeg", {"quality": 88})):
        data = io.BytesIO()
        shrunk.save(data, kind, **options)
        forms.append((kind, data.getvalue()))
    kind, best = min(forms, key=lambda form: len(form[1]))
    return f"data:image/{kind};base64,{base64.b64encode(best).decode()}"


def _query_table(each: AttentionRun) -> str:
    """One line a query, folded."""
    found = [q for q in each.measures.get("queries") or () if isinstance(q, dict)]
    if not found:
        return ""
    kinds = {
        "accuracy_drop": ("accuracy drop, points", 100, "+.2f"), "entropy": ("entropy", 1, ".3f"),
        "off_centre": ("off centre", 1, ".3f"), "complementarity": ("complementarity", 1, ".3f"),
        "centroid_in_box": ("centroid in box, %", 100, ".1f"),
    }  # fmt: skip
    names = [n for n in kinds if any(finite(q.get(n)) is not None for q in found)]
    heads = "".join(f'<th scope="col" class="n">{kinds[name][0]}</th>' for name in names)
    rows = []
    for query in found:
        cells = ""
        for name in names:
            value, (_, factor, form) = finite(query.get(name)), kinds[name]
            cells += f'<td class="n">{NONE if value is None else format(factor * value, form)}</td>'
        rows.append(f"<tr><td>{escape(query.get('query'))}</td>{cells}</tr>")
    definitions = mapping(each.measures, "definitions")
    told = "".join(
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(definitions[name])}</dd>"
        for name in names
        if name in definitions
    )
    return (
        f"<details><summary>{len(found)} quer{'y' if len(found) == 1 else 'ies'}: measures of "
        f'each</summary><div class="scroll tall" tabindex="0" role="region" '
        f'aria-label="Queries"><table><thead><tr><th scope="col">query</th>{heads}</tr></thead>'
        f'<tbody>{"".join(rows)}</tbody></table></div><dl class="facts">{told}</dl></details>'
    )


def _correlations(each: AttentionRun) -> str:
    """A small matrix, shaded by size and sign."""
    part = mapping(each.measures, "correlations")
    names, matrix = part.get("measures"), part.get("matrix")
    if not isinstance(names, list) or not isinstance(matrix, list) or len(names) < 2:
        return ""
    lines = [line for line in matrix if isinstance(line, list)]
    if not any(finite(value) is not None for line in lines for value in line):
        return ""  # of a single query
    heads = "".join(f'<th scope="col" class="n">{_words(name)}</th>' for name in names)
    rows = "".join(
        f'<tr><th scope="row">{_words(name)}</th>{"".join(_correlation(v) for v in line)}</tr>'
        for name, line in zip(names, lines, strict=False)
    )
    return (
        "<details><summary>Correlations of the measures over queries</summary>"
        '<div class="scroll" tabindex="0" role="region" aria-label="Correlations"><table>'
        f"<thead><tr><td></td>{heads}</tr></thead><tbody>{rows}</tbody></table></div></details>"
    )


def _correlation(value: Any) -> str:
    number = finite(value)
    if number is None:
        return f'<td class="n">{NONE}</td>'
    tone = "--c0" if number >= 0 else "--c1"
    shade = round(45 * min(1.0, abs(number)))
    style = f"background:color-mix(in srgb, var({tone}) {shade}%, transparent)"
    return f'<td class="n" style="{style}">{number:+.2f}</td>'


def _words(name: Any) -> str:
    return escape(str(name).replace("_", " "))


def store_section(results: Results) -> str:
    """Where every store's tokens come from."""
    return "\n".join(_store(each) for each in results.stores)


def _store(each: StoreFacts) -> str:
    task = each.task
    facts: list[tuple[str, Any]] = [("digest", task.digest)]
    if each.path is None:
        facts.append(("store", "not there any more; this is what its rows say"))
        return _facts(f"{task.backbone} on {task.dataset}", facts)
    told = each.provenance
    backbone, dataset = mapping(told, "backbone"), mapping(told, "dataset")
    transform, grid = mapping(told, "transform"), each.tokens.get("grid")
    names = [backbone.get("timm_name") or backbone.get("name"), backbone.get("weights")]
    splits = ", ".join(
        f"{name} {rows:,} images" + (f" in {views} views" if views > 1 else "")
        for name, (rows, views) in each.splits.items()
    )
    layers = ", ".join(map(str, each.layers))
    facts += [
        ("backbone", ", ".join(str(name) for name in names if name)),
        ("weights", f"sha256 {backbone.get('weights_digest')}"),
        ("data set", f"{dataset.get('name')}, {len(dataset.get('classes') or ()):,} classes; "
                     f"manifest sha256 {dataset.get('digest')}"),
        ("splits", f"{splits}; trained on {dataset.get('train_split')}, scored on "
                   f"{dataset.get('eval_split')}"),
        ("transform", ", ".join(
            f"{name.replace('_', ' ')} {_listed(value)}" for name, value in transform.items())),
        ("precision", f"{told.get('precision')} forward, batches of {told.get('batch_size')}, "
                      "float16 tokens"),
        ("tokens", f"grid {_listed(grid)}, width {each.tokens.get('dim')}, layers {layers}"),
        ("norm", f"the protocol's choice: {backbone.get('norm_policy')}"),
        ("versions", ", ".join(
            f"{name} {version}" for name, version in
            {"epcache": told.get("epcache_version"), **mapping(told, "environment")}.items())),
        ("size", None if each.num_bytes is None else format_bytes(each.num_bytes)),
        ("store", str(each.path)),
        ("command", told.get("command")),
    ]  # fmt: skip
    return _facts(f"{task.backbone} on {task.dataset}", facts)


def _facts(title: str, facts: list[tuple[str, Any]]) -> str:
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts if value
    )
    return f'<h3>{escape(short(title, 80))}</h3>\n<dl class="facts">{items}</dl>'


def _listed(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f" {TIMES} ".join(f"{each}" for each in value)
    return str(value)
