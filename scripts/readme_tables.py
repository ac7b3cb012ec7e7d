"""Fill the generated parts of README.md: the demo's output and this machine's figures.

    python scripts/readme_tables.py --bench figures.json   # epcache bench --json > figures.json
    python scripts/readme_tables.py --demo demo.txt        # epcache demo > demo.txt 2>&1
    python scripts/readme_tables.py --rows rows.jsonl      # of epcache probe, knn and linear
    python scripts/readme_tables.py                        # from what docs/ already has

The sources are kept in docs/, and a test holds that README.md shows what they say.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BENCH, DEMO = ROOT / "docs" / "bench.json", ROOT / "docs" / "demo.txt"
REAL = ROOT / "docs" / "real.json"
KINDS = {"knn": "k-NN", "logistic": "logistic regression", "ridge": "ridge"}


def bench_table(result: dict[str, Any]) -> str:
    """The figures as Markdown, with what they were measured on."""
    lines = [
        "| figure | ours | reference | ratio | target | n | the reference is |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for figure in result["figures"]:
        about = figure["what"] + (f" ({figure['note']})" if figure["note"] else "")
        lines.append(
            f"| {figure['name']} | {figure['ours']:.3g} {figure['unit']} | "
            f"{figure['reference']:.3g} {figure['unit']} | {figure['ratio']:.2f} | "
            f"{figure['target']} | {figure['num_repeats']} | {about} |"
        )
    hardware = ", ".join(f"{name} {value}" for name, value in result["hardware"].items())
    return "\n".join([*lines, "", f"`epcache bench` on {hardware}."])


def excerpt(demo: str) -> str:
    """The demo's output without its progress and without probes that lost."""
    dull = re.compile(
        r"(select|refit|pass|epoch) \d.*"  # progress
        r"|\d+/\d+ images.*"
        r"|(ep|gap|cls) +(patch|cls) .* - +- +\d+ +[0-9a-f]{12} *"  # rates that were not chosen
    )
    return "\n".join(line.rstrip() for line in demo.splitlines() if not dull.fullmatch(line))


def chosen(lines: list[str]) -> list[dict[str, Any]]:
    """Of every kind of head at the deepest layer the row that held-out data chose."""
    rows = [json.loads(line) for line in lines]
    layer = max(row["layer"] for row in rows)
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        is_whole = row["shots"] is None and not row.get("share") and not row.get("average_layers")
        if row["layer"] == layer and is_whole and row["test_top1"] is not None:
            queries = "" if row["num_queries"] is None else f" M={row['num_queries']}"
            kind = "knn" if "k" in row else row.get("method") or row["pooler"] + queries
            if kind not in best or row["val_top1"] > best[kind]["val_top1"]:
                best[kind] = {
                    **row,
                    "head": f"{KINDS[kind]} ({row['pooler']})" if kind in KINDS else kind,
                }
    return sorted(best.values(), key=lambda row: -row["test_top1"])


def probe_table(rows: list[dict[str, Any]]) -> str:
    """Test accuracies, best first."""
    first = rows[0]
    lines = [
        f"{first['backbone']}, layer {first['layer']}, {first['train_images']:,} training images:",
        "",
        "| head | trainable parameters | test, % | best epoch, % |",
        "|---|---:|---:|---:|",
    ]
    for row in rows:
        params = f"{row['num_params']:,}" if row["num_params"] else ""
        best = f"{100 * row['test_top1_best']:.2f}" if row["epochs"] else ""
        lines.append(f"| {row['head']} | {params} | {100 * row['test_top1']:.2f} | {best} |")
    return "\n".join(lines)


def fill(text: str, name: str, content: str) -> str:
    """Replace what stands between ``<!-- name -->`` and ``<!-- /name -->``."""
    opening, closing = f"<!-- {name} -->", f"<!-- /{name} -->"
    pattern = re.compile(f"{re.escape(opening)}.*?{re.escape(closing)}", re.DOTALL)
    return pattern.sub(lambda _: f"{opening}\n{content}\n{closing}", text)


def render(readme: str) -> str:
    """README.md as its sources say it."""
    demo = excerpt(DEMO.read_text(encoding="utf-8"))
    readme = fill(readme, "demo", f"```console\n$ epcache demo\n{demo}\n```")
    readme = fill(readme, "probe", probe_table(json.loads(REAL.read_text(encoding="utf-8"))))
    return fill(readme, "bench", bench_table(json.loads(BENCH.read_text(encoding="utf-8"))))


def main() -> None:
    """Take new sources where they are given, then write README.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bench", type=Path)
    parser.add_argument("--demo", type=Path)
    parser.add_argument("--rows", type=Path)
    options = parser.parse_args()
    if options.bench:
        result = json.loads(options.bench.read_text())
        BENCH.write_text(json.dumps(result, indent=1) + "\n")
    if options.demo:
        DEMO.write_text(options.demo.read_text())
    if options.rows:
        found = chosen(options.rows.read_text().splitlines())
        REAL.write_text(json.dumps(found, indent=1) + "\n")
    readme = ROOT / "README.md"
    readme.write_text(render(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
