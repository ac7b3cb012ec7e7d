"""Rows survive crashes and newer versions; the best is chosen on held-out data."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from storekit import temporary_dir

from epcache.errors import DataError
from epcache.results import ROWS, Row, append_rows, best_row, read_rows, run_name

BASE = {
    "backbone": "tiny", "dataset": "zoo", "digest": "00", "layer": 3, "norm": "final",
    "tokens": "patch", "views": 1, "pooler": "ep", "train_images": 60, "seconds": 1.5,
    "device": "cpu", "precision": "float32", "epcache_version": "0.1.0",
}  # fmt: skip


def row(run="a", **values):
    return Row(**{"run": run, **BASE, **values})


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.none() | st.floats(0, 1), st.none() | st.integers(1)),
        max_size=8,
    )
)
def test_rows_are_read_as_they_were_written(values):
    """Whatever is appended comes back; of one run the last counts, in its own place."""
    rows = [row(run, val_top1=val, num_queries=m) for run, val, m in values]
    with temporary_dir() as folder:
        for one in rows:
            append_rows([one], folder)
        last = {one.run: number for number, one in enumerate(rows)}
        assert read_rows(folder) == [rows[number] for number in sorted(last.values())]


def test_a_line_that_was_being_written_does_not_count(tmp_path):
    """After a crash in the middle of a line the whole ones are there, and appending goes on."""
    append_rows([row("a"), row("b")], tmp_path)
    path = tmp_path / ROWS
    whole = path.read_bytes()
    for cut in (len(whole) - 1, len(whole) - 30):
        path.write_bytes(whole[:cut])
        assert [one.run for one in read_rows(tmp_path)] == ["a"]


def test_a_damaged_line_is_named(tmp_path):
    """With what to do about it."""
    append_rows([row("a")], tmp_path)
    with (tmp_path / ROWS).open("a") as file:
        file.write("{}\n")
    append_rows([row("b")], tmp_path)
    with pytest.raises(DataError, match=r"damaged in line 2 .* delete that line to go on"):
        read_rows(tmp_path)


def test_fields_of_a_newer_version_are_left_out(tmp_path):
    """A row with more fields than this version knows is still read."""
    data = {**row().to_json(), "invented_later": 1}
    (tmp_path / ROWS).write_text(json.dumps(data) + "\n")
    assert read_rows(tmp_path) == [row()]


def test_json_has_the_fields_that_others_read():
    """Exactly the documented ones; those of k-NN and linear rows only there."""
    documented = [
        "run",
        "backbone",
        "dataset",
        "digest",
        "layer",
        "norm",
        "tokens",
        "views",
        "pooler",
        "num_queries",
        "dim_out",
        "num_params",
        "recipe",
        "optimizer",
        "lr",
        "weight_decay",
        "batch_size",
        "epochs",
        "seed",
        "shots",
        "train_images",
        "val_top1",
        "test_top1",
        "test_top1_best",
        "test_top1_last",
        "best_epoch",
        "test_top5",
        "seconds",
        "device",
        "precision",
        "epcache_version",
    ]
    assert list(row().to_json()) == documented
    assert list(row(average_layers=4).to_json()) == [*documented, "average_layers"]
    assert list(row(share=0.01).to_json()) == [*documented, "share"]
    assert list(row(k=10, temperature=0.07).to_json()) == [*documented, "k", "temperature"]
    assert list(row(method="ridge", l2=1.0).to_json()) == [*documented, "method", "l2"]


def test_best_is_chosen_on_held_out_data():
    """Never by the evaluation split where something was held out; the first of equals."""
    rows = [
        row("a", val_top1=0.5, test_top1_best=0.9),
        row("b", val_top1=0.6, test_top1_best=0.1),
        row("c", val_top1=0.6),
        row("d", test_top1_best=1.0),
    ]
    assert best_row(rows) is rows[1]
    assert best_row([rows[3], row("e", test_top1_best=0.5)]) is rows[3]
    assert best_row([]) is None


def test_what_to_report_is_the_chosen_epoch():
    """Or the best one, where nothing was held out; a probe that was not chosen has nothing."""
    assert row(val_top1=0.5, test_top1=0.6, test_top1_best=0.7).score == 0.6
    assert row(test_top1_best=0.7).score == 0.7
    assert row(val_top1=0.5).score is None


def test_run_names_depend_on_all_and_only_on_values():
    """Order of keys does not matter, every value does."""
    one = run_name({"a": 1, "b": [0.1, None]})
    assert one == run_name({"b": [0.1, None], "a": 1})
    assert len({one, run_name({"a": 2, "b": [0.1, None]}), run_name({"a": 1, "b": [0.1]})}) == 3
    assert len(one) == 12


def test_two_processes_append_at_once(tmp_path):
    """No line is torn or lost."""
    children = []
    for child in range(3):
        pid = os.fork()
        if pid == 0:
            for number in range(20):
                append_rows([row(f"{child}-{number}")], tmp_path)
            os._exit(0)
        children.append(pid)
    for pid in children:
        assert os.waitpid(pid, 0)[1] == 0
    assert len(read_rows(tmp_path)) == 60


@given(cut=st.integers(0, 400))
def test_a_torn_line_costs_nothing_that_comes_later(cut):
    """What a full disk left of a line goes with the next append; every whole row stays."""
    with temporary_dir() as folder:
        append_rows([row("a"), row("b")], folder)
        whole = (folder / ROWS).read_bytes()
        (folder / ROWS).write_bytes(whole + whole[:cut].split(b"\n")[0])
        append_rows([row("c")], folder)
        assert [row.run for row in read_rows(folder)] == ["a", "b", "c"]
        assert (folder / ROWS).read_bytes().startswith(whole)


@pytest.mark.parametrize("line", ["null", "5", "[1]", '{"run": 1}'])
def test_a_line_that_is_no_row_is_named(tmp_path, line):
    """Its number is told, in one line."""
    append_rows([row("a")], tmp_path)
    with (tmp_path / ROWS).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match="damaged in line 2"):
        read_rows(tmp_path)


@pytest.mark.parametrize(("field", "value"), [("layer", "abc"), ("shots", 1.5), ("pooler", None)])
def test_a_field_of_another_kind_is_no_row(field, value):
    """Types are those of the annotations; a whole number is a float too."""
    data = row("a").to_json()
    assert Row.from_json({**data, "seconds": 3}).seconds == 3
    with pytest.raises(TypeError, match=field):
        Row.from_json({**data, field: value})
