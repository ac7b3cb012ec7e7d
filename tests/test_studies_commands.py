"""``epcache layerwise``, ``lowshot`` and ``sweep`` as a person or a script uses them."""

import json
import statistics
from pathlib import Path

import numpy as np
import pytest
from extractkit import run, run_json
from probekit import learnable_store

from epcache.cli.render_probe import COLUMNS, choose_columns
from epcache.cli.render_studies import spark
from epcache.pooled import pool_split
from epcache.results import Row, read_rows
from epcache.runs import RunFiles
from epcache.store.reader import open_store

QUICK = ("--epochs", "3", "--batch-size", "10", "--lr", "0.01")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EPCACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """Two backbones on one data set, with all four layers; the second lacks [CLS]."""
    root = tmp_path_factory.mktemp("stores")
    layers = {"layers": (0, 1, 2, 3)}
    learnable_store(root / "tiny", **layers)
    learnable_store(root / "headless", backbone="headless", num_prefix=0, seed=1, **layers)
    return root


def test_layerwise_has_a_curve_for_each_pooler(capsys, shelf, home):
    """Every layer and average once; the winner is the best on held-out images."""
    command = ("layerwise", shelf / "tiny", "--M", "4", *QUICK)
    result = run_json(capsys, *command)
    assert [(c["pooler"], c["num_queries"]) for c in result["curves"]] == [
        ("cls", None), ("gap", None), ("ep", 4),
    ]  # fmt: skip
    places = [(layer, 1) for layer in range(4)] + [(3, 2), (3, 4)]
    for curve in result["curves"]:
        points = curve["points"]
        assert [(p["layer"], p["average_layers"]) for p in points] == places
        best = max(points, key=lambda point: point["val_top1"])
        winner = curve["winner"]
        assert (winner["run"], winner["test_top1"]) == (best["run"], best["test_top1"])
        assert winner["over_last_layer"]["test"] == best["test_top1"] - points[3]["test_top1"]
        second = max((p for p in points if p is not best), key=lambda point: point["val_top1"])
        assert winner["over_second"]["test"] == best["test_top1"] - second["test_top1"]
    winners = [curve["winner"] for curve in result["curves"]]
    assert result["winner"] == max(winners, key=lambda winner: winner["val_top1"])
    assert result["best"]["run"] == result["winner"]["run"]
    assert len(result["results"]) == 18
    assert {c["pooler"] for c in result["convergence"]} == {"cls", "gap", "ep"}
    assert result["failures"] == []
    assert run_json(capsys, *command) == result  # from rows alone
    assert len(read_rows(home / "results")) == 18


def test_layerwise_says_who_wins(capsys, shelf):
    """A table by layer with the winners marked, and by how much."""
    run("layerwise", shelf / "tiny", "--pooler", "gap,cls", "--average", "3", *QUICK)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    rows = [line.split() for line in lines if line.split()[0] in ("0", "1", "2", "3", "1-3")]
    assert len(rows) == 5
    assert sum(row[1].endswith("*") for row in rows) == 1
    assert lines[-3].startswith("winner: ")
    assert "over the last layer" in lines[-3]
    assert "pass 1 of 5: layer 0" in err
    assert max(map(len, lines[:-2])) <= 80


def test_without_cls_its_curve_is_left_out(capsys, shelf):
    """And told; alone it is an error of one line."""
    command = ("layerwise", shelf / "headless", "--layers", "1,-1", "--average", "0", *QUICK)
    result = run_json(capsys, *command, "--pooler", "cls,gap")
    assert [c["pooler"] for c in result["curves"]] == ["gap"]
    assert [p["layer"] for p in result["curves"][0]["points"]] == [1, 3]
    run(*command, "--pooler", "cls", code=1)
    assert "has no [CLS] token; add --pooler gap or ep" in capsys.readouterr().err


def test_several_backbones_are_ranked(capsys, shelf):
    """One command for both stores; k-NN is added, ranks are those of the accuracies."""
    stores = (shelf / "tiny", shelf / "headless")
    result = run_json(capsys, "layerwise", *stores, "--layers", "last", "--M", "4", *QUICK)
    assert [each["store"] for each in result["stores"]] == [str(store) for store in stores]
    (ranks,) = result["ranks"]
    assert (ranks["dataset"], list(ranks["ranks"])) == ("zoo", ["knn", "linear", "ep"])
    for each in result["stores"]:
        rows = [row for row in each["results"] if row["test_top1"] is not None]
        rows = [row for row in rows if "average_layers" not in row]
        backbone = rows[0]["backbone"]
        best = max((r for r in rows if r["pooler"] != "ep"), key=lambda row: row["val_top1"])
        assert ranks["accuracies"]["linear"][backbone] == best["test_top1"]
    run("layerwise", *stores, "--layers", "last", "--M", "4", *QUICK)
    done = capsys.readouterr()
    assert "backbones on zoo, all of train: accuracy and rank" in done.out
    assert "flip: " in done.err or "no pair changes places" in done.err


LOWSHOT = ("--shots", "1,4,40", "--shares", "10%", "--seeds", "2", "--M", "4", *QUICK)


def test_lowshot_is_mean_and_deviation_over_subsets(capsys, shelf, home):
    """Of the row that held-out images choose for each seed; the same command then only reads."""
    command = ("lowshot", shelf / "tiny", "--pooler", "gap,ep", *LOWSHOT)
    result = run_json(capsys, *command)
    cells = result["summary"]
    names = {"gap", "ep M=4", "knn gap", "ridge gap", "logistic gap"}
    sizes = [(1, None), (4, None), (40, None), (None, 0.1)]
    assert {(c["classifier"], c["shots"], c["share"]) for c in cells} == {
        (name, *size) for name in names for size in sizes
    }
    for cell in cells:
        rows = [
            row
            for row in result["results"]
            if Row.from_json(row).classifier == cell["classifier"].split(" M=")[0]
            and (row["shots"], row.get("share")) == (cell["shots"], cell["share"])
        ]
        best = [
            max((r for r in rows if r["seed"] == seed), key=lambda row: row["val_top1"])
            for seed in (0, 1)
        ]
        assert cell["top1"] == [row["test_top1"] for row in best]
        assert cell["mean"] == pytest.approx(statistics.mean(cell["top1"]))
        assert cell["std"] == pytest.approx(np.std(cell["top1"], ddof=1))
        assert cell["train_images"] == {1: 3, 4: 12, 40: 60, None: 6}[cell["shots"]]
    assert run_json(capsys, *command) == result
    assert len(read_rows(home / "results")) == len(result["results"])
    err = run_lines(capsys, *command)
    assert "3 of 3 classes have fewer than 40 training images: all of theirs are taken" in err
    assert "the subset is all of train and leaves no image to choose by: 10%" in err


def run_lines(capsys, *command):
    capsys.readouterr()
    run(*command)
    return capsys.readouterr().err


def test_subsets_are_kept_and_nested(capsys, shelf, home):
    """Rows and paths of each; none of what chooses; the smaller within the larger."""
    result = run_json(
        capsys, "lowshot", shelf / "tiny", "--pooler", "gap,ep", "--methods", "none", *LOWSHOT
    )
    store = open_store(shelf / "tiny")
    samples = store["train"].samples()
    evaluation = {sample.path for sample in store["val"].samples()}
    kept = {}
    for about in result["subsets"]:
        data = json.loads(Path(about["file"]).read_text())
        assert data["digest"] == store.digest
        assert data["paths"] == [samples[row].path for row in data["rows"]]
        assert not set(data["paths"]) & (evaluation | set(data["held_out_paths"])) or (
            data["shots"] == 40
        )
        kept[data["name"]] = data
    assert len(kept) == 8
    for data in kept.values():
        for name in data["contains"]:
            assert set(kept[name]["rows"]) <= set(data["rows"])
    prefix = f"zoo-{store.digest[:8]}"
    assert kept[f"{prefix}-4shots-seed1"]["contains"] == [f"{prefix}-1shot-seed1"]


def test_lowshot_classifiers_are_fitted_on_the_subset_alone(capsys, shelf):
    """Ridge of one penalty is the closed-form fit to the kept rows, whatever chose."""
    run_json(capsys, "lowshot", shelf / "tiny", "--pooler", "gap", "--methods", "none",
             "--shots", "4", "--shares", "0", "--seeds", "1", *QUICK)  # fmt: skip
    result = run_json(
        capsys, "linear", shelf / "tiny", "--method", "ridge", "--l2", "2", "--shots", "4",
        "--pooler", "gap", "--norm", "none",
    )  # fmt: skip
    (row,) = result["results"]
    store = open_store(shelf / "tiny")
    from epcache.subset import choose_rows

    part = choose_rows(store["train"], shots=4, holdout=0.1)
    train, test = (
        pool_split(store[name], layer=-1, pooler="gap", norm=None) for name in ("train", "val")
    )

    def accuracy(fit, judge, judge_labels):
        features, labels = fit.features.astype(float), np.eye(3)[fit.labels]
        centred = features - features.mean(0)
        weight = np.linalg.solve(centred.T @ centred + 2 * np.eye(16), centred.T @ labels)
        scores = (judge - features.mean(0)) @ weight + labels.mean(0)
        return np.mean(scores.argmax(1) == judge_labels)

    fit, held = train.of_rows(part.rows), train.of_rows(part.held)
    assert row["train_images"] == 12
    assert row["val_top1"] == pytest.approx(accuracy(fit, held.features, held.labels))
    assert row["test_top1"] == pytest.approx(accuracy(fit, test.features, test.labels))


SPEC = """
    epochs = 2
    batch_size = 10
    [[grid]]
    pooler = ["ep", "gap"]
    M = [2, 4, 5]
    layer = [0, -1]
    lr = [0.01, 0.1]
    [[grid]]
    method = ["knn", "ridge"]
    pooler = ["gap"]
    k = 3
"""


def test_a_sweep_reports_what_failed_and_does_the_rest(capsys, shelf, home, tmp_path):
    """Exit 1 with the failures in JSON and on stderr; a rerun trains nothing again."""
    (tmp_path / "spec.toml").write_text(SPEC)
    command = ("sweep", tmp_path / "spec.toml", shelf / "tiny")
    result = run_json(capsys, *command, code=1)
    assert [f["what"] for f in result["failures"]] == ["ep M=5, layer 0", "ep M=5, layer 3"]
    assert "does not divide dim_out=16" in result["failures"][0]["reason"]
    counts = {}
    for row in result["results"]:
        name = Row.from_json(row).classifier
        counts[name] = counts.get(name, 0) + 1
    assert counts == {"ep": 8, "gap": 4, "knn gap": 1, "ridge gap": 1}
    err = run_lines_failing(capsys, *command)
    assert "select" not in err
    assert "2 of what was asked for failed" in err
    assert len(read_rows(home / "results")) == 14


def run_lines_failing(capsys, *command):
    run(*command, code=1)
    return capsys.readouterr().err


def test_a_dry_run_says_what_shares_a_pass(capsys, shelf, home, tmp_path):
    """Counts, bytes and an estimate; nothing is trained, and what is done is counted."""
    (tmp_path / "spec.toml").write_text(SPEC.replace(", 5]", "]"))
    command = ("sweep", tmp_path / "spec.toml", shelf / "tiny", "--dry-run")
    plan = run_json(capsys, *command)
    assert not (home / "results").exists()
    assert (plan["probes"], plan["done"], plan["passes"], plan["features"]) == (12, 0, 2, 2)
    (store,) = plan["stores"]
    for each in store["passes"]:
        assert each["probes"] == ["ep M=2 x 2", "ep M=4 x 2", "gap x 2"]
        # tokens of 60 + 24 images of 6 tokens, and one vector an image for gap
        assert each["token_bytes"] in (84 * 7 * 16 * 4, 84 * (6 * 2 + 4) * 16)
        assert each["in_memory"]
        assert each["seconds"] > 0
    assert plan["estimated_seconds"] == sum(each["seconds"] for each in store["passes"])
    run("sweep", tmp_path / "spec.toml", shelf / "tiny")
    again = run_json(capsys, *command)
    assert (again["probes"], again["done"]) == (12, 12)
    assert again["estimated_seconds"] < plan["estimated_seconds"]
    run(*command)
    done = capsys.readouterr()
    assert "layer 0, patch tokens" in done.out
    assert "estimate" in done.err


def test_stores_by_pattern(capsys, shelf, tmp_path):
    """A pattern in the file finds sealed stores; one that finds none is an error."""
    (tmp_path / "spec.toml").write_text(f'stores = "{shelf}/*"\nmethod = "knn"\npooler = "gap"')
    result = run_json(capsys, "sweep", tmp_path / "spec.toml")
    assert [each["store"] for each in result["stores"]] == [
        str(shelf / "headless"), str(shelf / "tiny"),
    ]  # fmt: skip
    assert list(result["ranks"][0]["ranks"]) == ["knn"]
    (tmp_path / "spec.toml").write_text(f'stores = "{shelf}/nothing*"')
    run("sweep", tmp_path / "spec.toml", code=1)
    assert "finds no sealed store" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        (("layerwise", "--layers", "9"), 1, "layer 9 is not in store"),
        (("layerwise", "--average", "5"), 1, "there are 4 layers up to layer 3"),
        (("layerwise", "--pooler", "epp"), 1, "did you mean ep"),
        (("lowshot", "--shots", "some"), 2, "expected whole numbers"),
        (("lowshot", "--seeds", "0"), 1, "--seeds 0: expected 1 or more"),
        (("lowshot", "--methods", "svm"), 1, "expected some of knn, ridge, logistic"),
        (("lowshot", "--shots", "0", "--shares", "0"), 1, "no subset is asked for"),
        (("lowshot", "--shares", "150%"), 1, "above 0 and at most 1"),
    ],
)
def test_mistakes_are_one_line(capsys, shelf, command, code, message):
    """Exit status, and a line that says what to do; nothing is trained."""
    name, *options = command
    run(name, shelf / "tiny", *options, code=code)
    err = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert message in err
    assert "select" not in err


def test_an_interrupted_study_goes_on(capsys, shelf, monkeypatch):
    """Stopped in the middle, the same command does the rest and gives the same numbers."""
    command = ("lowshot", shelf / "tiny", "--pooler", "gap", "--methods", "ridge",
               "--shots", "1,4", "--shares", "0", "--seeds", "2", *QUICK)  # fmt: skip
    written = []
    original = RunFiles.write

    def write(self, trained):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(trained.row.run)
        original(self, trained)

    with monkeypatch.context() as patch:
        patch.setattr(RunFiles, "write", write)
        run(*command, code=130)
        assert "Go on with the same command" in capsys.readouterr().err
    resumed = run_json(capsys, *command)
    trained = {row["run"] for row in resumed["results"] if row["epochs"]}
    assert set(written) < trained
    assert len(trained) == 4


def test_columns_fit_a_narrow_terminal():
    """What all rows share is told below the table; the run and the accuracies always stay."""
    base = {
        "backbone": "b", "dataset": "d", "digest": "0", "norm": "final", "tokens": "patch",
        "views": 1, "pooler": "vit_block", "train_images": 1, "seconds": 1.0, "device": "cpu",
        "precision": "float32", "epcache_version": "1", "num_params": 7_854_568, "dim_out": 768,
        "lr": 0.0003, "best_epoch": 10, "val_top1": 0.5, "test_top1": 0.5, "test_top1_best": 0.6,
    }  # fmt: skip
    rows = [
        Row(run=f"{n:012}", layer=n, seed=n, weight_decay=n / 10, epochs=5, num_queries=8, **base)
        for n in range(3)
    ]
    wide, same = choose_columns(rows, 200)
    assert [c.name for c in COLUMNS if c.always] == [c.name for c in wide if c.always]
    assert {"layer", "seed", "decay"} <= {column.name for column in wide}
    assert same == ["images all", "tokens patch", "norm final", "O 768", "epochs 5"]
    narrow, _ = choose_columns(rows, 80)
    cells = [[c.name, *(c.text(row) for row in rows)] for c in narrow]
    assert sum(max(map(len, column)) for column in cells) + 2 * (len(narrow) - 1) <= 80
    assert {"pooler", "layer", "val", "test", "run"} <= {column.name for column in narrow}


def test_a_bar_for_each_layer():
    """From the lowest to the highest; no accuracy is a gap."""
    assert spark([0.1, None, 0.45, 0.8]) == "▁ ▄█"
    assert spark([0.5, 0.5]) == "▁▁"
