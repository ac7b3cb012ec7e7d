"""Collecting reads what is there, says what is not, and never stops for a damaged file."""

import dataclasses
import json
import math

import pytest
from probekit import learnable_store
from reportkit import PROBE, make_row, scored, write_results

from epcache import ProbeConfig, fit_probes, open_store
from epcache.errors import ConfigError, DataError
from epcache.report.collect import clean, collect, head_name


def test_nothing_to_report_is_an_error_with_a_command(tmp_path):
    """An empty or missing folder says what to run."""
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=r"no results in .*epcache probe"):
            collect(folder)


def test_damaged_rows_are_an_error(tmp_path):
    """A row that cannot be read is not left out silently."""
    write_results(tmp_path, [make_row()], with_runs=False)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write("{half a row\n")
    with pytest.raises(DataError, match="line 2"):
        collect(tmp_path)


def test_damaged_runs_are_left_out_and_told(tmp_path):
    """A curve that cannot be read costs its curve, a config its numbers; the row stays."""
    rows = [make_row(seed=seed) for seed in range(4)]
    write_results(tmp_path, rows)
    runs = [tmp_path / "runs" / row.run for row in rows]
    (runs[0] / "curve.json").write_text('{"final": {"train_loss": [1.0,')
    (runs[1] / "config.json").write_text("[1, 2]")
    (runs[2] / "config.json").unlink()
    results = collect(tmp_path)
    assert len(results.entries) == 4
    assert set(results.curves) == {rows[3].run}
    assert [entry.config is None for entry in results.entries] == [False, True, True, False]
    assert len(results.problems) == 2
    assert "curve.json" in " ".join(results.problems)
    assert results.entries[2].macs is None
    assert results.entries[3].macs is not None


def test_no_number_becomes_none():
    """NaN and infinities, which JSON readers let through, count as not measured."""
    row = dataclasses.replace(make_row(), val_top1=math.nan, test_top5=math.inf, seconds=math.nan)
    cleaned = clean(row)
    assert (cleaned.val_top1, cleaned.test_top5, cleaned.seconds) == (None, None, 0.0)
    assert cleaned.test_top1 == row.test_top1
    assert clean(make_row()) == make_row()


def test_heads_are_named_by_what_differs(tmp_path):
    """Queries, width, options and tokens tell heads of one pooler apart; k-NN and linear too."""
    assert head_name(make_row()) == "ep M=32"
    assert head_name(make_row(tokens="all")) == "ep M=32 (all)"
    config = {"probe": {"dim_out": 96, "options": {"value": False}}}
    assert head_name(make_row(), config) == "ep M=32 O=96 value=False"
    plain = {**PROBE, "pooler": "gap"}
    assert head_name(make_row(k=20, temperature=0.07, **plain)) == "k-NN gap"
    assert head_name(make_row(method="ridge", l2=1.0, **plain)) == "ridge gap"


def test_best_come_first(tmp_path):
    """Scored rows are in order of what held-out data chose, heads in order of their best row."""
    rows = [scored(0.5), scored(0.7, num_queries=8), scored(0.9, num_queries=4, shots=16)]
    rows.append(make_row(test_top1=None, test_top1_best=None, test_top1_last=None, lr=9.0))
    results = collect(write_results(tmp_path, rows, with_runs=False))
    assert [entry.score for entry in results.scored] == [0.9, 0.7, 0.5]
    # of two heads that learnt from all of train the better, then what saw a part
    assert results.heads == ("ep M=8", "ep M=32", "ep M=4")


def test_stores_tell_where_tokens_come_from(tmp_path):
    """Provenance is the store's own; where it is gone the row's digest is what is left."""
    path = learnable_store(tmp_path / "store")
    store = open_store(path)
    folder = tmp_path / "results"
    config = ProbeConfig(pooler="gap", lr=0.1, epochs=2)
    fit_probes(store, [config], results_dir=folder, device="cpu")
    (facts,) = collect(folder).stores
    assert facts.provenance == store.provenance
    assert facts.splits == {"train": (61, 1), "val": (24, 1)}
    assert facts.layers == (0, 3)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    (facts,) = collect(folder).stores
    assert facts.path is None
    assert facts.task.digest == store.digest


def test_one_backbone_and_data_set_in_two_stores_are_two_tasks(tmp_path):
    """Stores of another precision or number of views are not mixed, and their names differ."""
    rows = [make_row(), make_row(digest="b" * 64)]
    results = collect(write_results(tmp_path, rows, with_runs=False))
    names = [task.name for task in results.tasks]
    assert sorted(names) == ["mae_vitb16 on imagenet1k (aaaaaaaa)",
                             "mae_vitb16 on imagenet1k (bbbbbbbb)"]  # fmt: skip


def test_attention_pictures_stay_in_their_folder(tmp_path):
    """A figure's name cannot lead out of the run's folder, and missing ones are left out."""
    row = make_row()
    write_results(tmp_path, [row])
    folder = tmp_path / "attention" / row.run
    folder.mkdir(parents=True)
    (folder / "gallery.png").write_bytes(b"x")
    names = ["gallery.png", "../../secret.png", "missing.png", "scatter.svg"]
    (folder / "attention.json").write_text(json.dumps({"run": row.run, "figures": names}))
    (tmp_path / "secret.png").write_bytes(b"x")
    (found,) = collect(tmp_path).attention
    assert [path.name for path in found.pictures] == ["gallery.png"]
    assert found.entry is not None
    assert found.entry.row == row
