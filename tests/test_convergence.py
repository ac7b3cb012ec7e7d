"""Epochs to a share of the final accuracy, counted by hand."""

import json

from hypothesis import given
from hypothesis import strategies as st
from test_results import row

from epcache.convergence import best_convergence, convergence, epochs_to_share


@given(st.lists(st.floats(0, 1), min_size=1), st.floats(0.01, 1))
def test_it_is_the_first_epoch_that_gets_there(curve, share):
    """No earlier one does, and the last always does."""
    found = epochs_to_share(curve, share)
    assert 1 <= found <= len(curve)
    assert curve[found - 1] >= share * curve[-1]
    assert all(top1 < share * curve[-1] for top1 in curve[: found - 1])


def test_the_final_training_counts(tmp_path):
    """Of rows that were scored and have a curve; of each pooler the best is taken."""
    for name, curve in (("a", [0.1, 0.6, 0.98, 1.0]), ("b", [0.5, 0.5, 0.5, 0.5]), ("c", None)):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        final = None if curve is None else {"test_top1": curve}
        (folder / "curve.json").write_text(json.dumps({"select": None, "final": final}))
    scored = {"test_top1": 0.9, "test_top1_best": 0.9, "epochs": 4}
    rows = [
        row("a", val_top1=0.5, **scored),
        row("b", val_top1=0.7, **scored),
        row("c", val_top1=0.9, **scored),
        row("d", val_top1=0.6, pooler="gap", **scored),
        row("e", val_top1=0.9, epochs=4),
    ]
    found = convergence(rows, tmp_path)
    assert [(each.run, each.epochs_to_share, each.epochs) for each in found] == [
        ("a", 3, 4),
        ("b", 1, 4),
    ]
    assert found[0].final_top1 == 1.0
    assert [each.run for each in best_convergence(rows[:2], tmp_path)] == ["b"]
    assert [each.epochs_to_share for each in convergence(rows, tmp_path, share=0.99)] == [4, 1]
