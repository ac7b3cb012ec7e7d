"""``epcache knn``, ``linear`` and ``poolers``: what they print, write and refuse."""

import dataclasses

import numpy as np
import pytest
from extractkit import arguments, make_folder, run, run_json
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from epcache.order import stratified_holdout
from epcache.pooled import pool_split
from epcache.results import read_rows, results_dir
from epcache.store.reader import open_store

PARAMS = {
    "cls": 769_000, "gap": 769_000, "ep": 1_383_400, "mhca": 1_949_416, "aim": 1_949_416,
    "abmilp": 1_360_361, "simpool": 1_950_184, "delf": 1_361_897, "cae": 3_134_440,
    "vjepa": 7_857_640, "vit_block": 7_854_568, "siglip": 7_854_568, "clip": 3_284_200,
    "cait": 7_860_712, "coca": 1_805_032, "cbam": 842_828,
}  # fmt: skip
"""Printed in published logs or counted by hand at D=768, C=1000."""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A store of 60 training images, two of them undecodable, and 30 of the evaluation split."""
    root = tmp_path_factory.mktemp("features")
    folder = make_folder(root / "images", num_train=60, num_val=30, bad=(4, 9))
    run(*arguments(folder, root / "store", "--max-bad", "10%"))
    return root / "store"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Each test has results of its own."""
    monkeypatch.setenv("EPCACHE_HOME", str(tmp_path / "home"))


def features_of(path, pooler):
    """Raw features of train and the evaluation split, in float64."""
    store = open_store(path)
    sets = [pool_split(store[s], layer=-1, pooler=pooler, norm=None) for s in ("train", "val")]
    return [part for pooled in sets for part in (pooled.features.astype(float), pooled.labels)]


@pytest.mark.parametrize("pooler", ["cls", "gap"])
def test_knn_is_scikit_learns(path, capsys, pooler):
    """Both accuracies are those of an independent k-NN on the same vectors."""
    result = run_json(capsys, "knn", path, "--pooler", pooler, "--k", "5", "--norm", "none")
    (row,) = result["results"]
    train, labels, test, test_labels = features_of(path, pooler)

    def accuracy(fit, fit_labels, rows, row_labels):
        model = KNeighborsClassifier(
            5, metric="cosine", algorithm="brute", weights=lambda d: np.exp((1 - d) / 0.07)
        )
        return np.mean(model.fit(fit, fit_labels).predict(rows) == row_labels)

    alone = np.arange(len(train))
    left_out = [
        accuracy(train[alone != i], labels[alone != i], train[[i]], labels[[i]]) for i in alone
    ]
    assert row["val_top1"] == pytest.approx(np.mean(left_out))
    assert row["test_top1"] == pytest.approx(accuracy(train, labels, test, test_labels))
    assert row["test_top1"] == row["test_top1_best"] == row["test_top1_last"]


def test_logistic_is_scikit_learns(path, capsys):
    """Held-out and test accuracy of one C are those of scikit-learn's fits."""
    result = run_json(
        capsys, "linear", path, "--pooler", "gap", "--method", "logistic", "--l2", "0.5",
        "--norm", "none", "--holdout", "20%",
    )  # fmt: skip
    (row,) = result["results"]
    train, labels, test, test_labels = features_of(path, "gap")
    kept, held = stratified_holdout(labels, share=0.2, seed=0)
    model = LogisticRegression(C=0.5, tol=1e-8, max_iter=5000)
    assert row["val_top1"] == np.mean(
        model.fit(train[kept], labels[kept]).predict(train[held]) == labels[held]
    )
    assert row["test_top1"] == np.mean(model.fit(train, labels).predict(test) == test_labels)
    assert (row["method"], row["l2"], row["num_params"]) == ("logistic", 0.5, 64 * 3 + 3)


def test_knn_rows(path, capsys):
    """A row for each pooler, k and temperature, with everything that tells them apart."""
    result = run_json(capsys, "knn", path, "--k", "3,7", "--temperature", "0.07,0.2")
    rows = result["results"]
    assert [(r["pooler"], r["k"], r["temperature"]) for r in rows] == [
        (p, k, t) for p in ("cls", "gap") for k in (3, 7) for t in (0.07, 0.2)
    ]
    assert len({row["run"] for row in rows}) == 8
    assert {(r["layer"], r["train_images"], r["dim_out"]) for r in rows} == {(5, 58, 64)}
    assert [r["tokens"] for r in rows] == ["cls"] * 4 + ["patch"] * 4
    assert result["digest"] == open_store(path).digest
    assert result["store"] == str(path)
    assert result["best"] == max(rows, key=lambda row: row["val_top1"])
    assert not {"method", "l2"} & set(rows[0])


def test_rows_are_written_and_repeat_by_name(path, capsys):
    """rows.jsonl holds what was printed; the same command again replaces its rows."""
    command = ("linear", path, "--pooler", "gap", "--method", "ridge,ridge")
    first = run_json(capsys, *command)["results"]
    again = run_json(capsys, *command)["results"]
    assert [row["run"] for row in first] == [row["run"] for row in again]
    rows = read_rows(results_dir())
    assert [row.to_json() for row in rows] == again
    assert len(rows) == 1
    for option in (("--seed", "1"), ("--holdout", "30%"), ("--layer", "2"), ("--norm", "none")):
        (row,) = run_json(capsys, *command, *option)["results"]
        assert row["run"] != first[0]["run"], option
    assert len(read_rows(results_dir())) == 5


def test_both_methods_by_default(path, capsys):
    """Logistic regression and ridge for each pooler, each with its own choice of penalty."""
    rows = run_json(capsys, "linear", path)["results"]
    assert [(r["pooler"], r["method"]) for r in rows] == [
        (p, m) for p in ("cls", "gap") for m in ("logistic", "ridge")
    ]
    for row in rows:
        assert row["l2"] > 0
        assert row["val_top1"] is not None
        assert row["seed"] == 0
        assert not {"k", "temperature"} & set(row)


def test_more_neighbours_than_images_are_clipped_with_a_note(path, capsys):
    """Neighbours 100 and 200 of 58 images are one row of k 58, and stderr says so."""
    run("knn", path, "--pooler", "gap", "--k", "10,100,200", "--json")
    err = capsys.readouterr().err
    assert "k 200 is more than the 58 training images; 58 is used" in err
    assert [row.k for row in read_rows(results_dir())] == [10, 58]


def test_held_out_share_instead_of_one(path, capsys):
    """--holdout takes a share; 0 leaves both selected accuracies null, as nothing was selected."""
    command = ("knn", path, "--pooler", "gap", "--k", "5")
    loo = run_json(capsys, *command)["results"][0]
    part = run_json(capsys, *command, "--holdout", "20%")["results"][0]
    none = run_json(capsys, *command, "--holdout", "0")["results"][0]
    assert len({row["run"] for row in (loo, part, none)}) == 3
    assert part["test_top1"] == loo["test_top1"] == none["test_top1_best"]
    assert round(part["val_top1"] * 12, 6) == round(part["val_top1"] * 12)
    assert none["val_top1"] is None
    assert none["test_top1"] is None


def test_many_images_are_not_left_out_one_by_one(path, capsys, monkeypatch):
    """Beyond the limit a tenth is held out, which is a result of its own name, and it is told."""
    monkeypatch.setattr("epcache.pipelines.features.LOO_ROWS", 57)
    run("knn", path, "--pooler", "gap", "--k", "5", "--json")
    assert "58 training images: 10% are held out" in capsys.readouterr().err
    asked = run_json(capsys, "knn", path, "--pooler", "gap", "--k", "5", "--holdout", "10%")
    assert asked["results"][0]["run"] == read_rows(results_dir())[0].run


@pytest.fixture
def headless(path, monkeypatch):
    """The same store, of a backbone without [CLS]."""
    from epcache.store.spec import StoreSpec

    real = StoreSpec.from_json

    def without_prefix(data):
        spec = real(data)
        layers = {n: dataclasses.replace(s, num_prefix=0) for n, s in spec.layers.items()}
        return dataclasses.replace(spec, layers=layers)

    monkeypatch.setattr(StoreSpec, "from_json", without_prefix)
    monkeypatch.setattr("epcache.store.reader.Store.__init__", init_without_digest)
    return path


def init_without_digest(store, path, root):
    """Open a store whose spec was changed on purpose."""
    from epcache.store.reader import ShardCache, StoreSpec

    store.path, store.spec, store.digest = path, StoreSpec.from_json(root["spec"]), root["digest"]
    store.provenance, store.tokens, store._shards = root["provenance"], root["tokens"], ShardCache()


def test_without_cls_only_gap(headless, capsys):
    """The default leaves [CLS] out and says so; asking for it is one line of error."""
    run("knn", headless, "--k", "5", "--json")
    assert "has no [CLS] token: gap only" in capsys.readouterr().err
    assert [row.pooler for row in read_rows(results_dir())] == ["gap"]
    run("knn", headless, "--pooler", "cls", code=1)
    err = capsys.readouterr().err.strip()
    assert len(err.splitlines()) == 1
    assert "has no [CLS] token; use gap" in err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("knn", "--pooler", "ep"), "expected one of cls, gap"),
        (("knn", "--k", "0"), "got 0"),
        (("knn", "--k", "5", "--temperature", "-1"), "got -1.0"),
        (("knn", "--layer", "99"), "layer 99 is not in store"),
        (("knn", "--norm", "some"), "--norm some: expected one of"),
        (("knn", "--holdout", "1.5"), "expected a share in [0, 1)"),
        (("linear", "--holdout", "1%"), "holds out none"),
        (("linear", "--method", "svm"), "expected some of logistic, ridge"),
        (("linear", "--l2", "1"), "choose one with --method"),
        (("linear", "--holdout", "0"), "give one --method and one --l2"),
        (("linear", "--device", "nonsense"), "--device nonsense"),
    ],
)
def test_wrong_options_are_one_line(path, capsys, command, message):
    """Each says what is wrong with which value, and nothing is written."""
    name, *options = command
    run(name, path, *options, code=1)
    err = capsys.readouterr().err.strip()
    assert message in err
    assert len(err.splitlines()) == 1
    assert read_rows(results_dir()) == []


def test_numbers_that_are_none_are_usage_errors(path, capsys):
    """``--k ten`` exits 2, as any option of the wrong type."""
    run("knn", path, "--k", "ten", code=2)
    assert "expected whole numbers" in capsys.readouterr().err
    run("linear", path, "--l2", "1,x", code=2)
    assert "expected numbers" in capsys.readouterr().err


def test_tables_come_best_first(path, capsys):
    """The table is sorted by held-out accuracy; the end names the file and the next step."""
    run("knn", path, "--k", "3,9")
    out = capsys.readouterr().out.splitlines()
    assert str(path) in out[0]
    header = next(i for i, line in enumerate(out) if line.startswith("pooler"))
    held = [float(line.split()[3]) for line in out[header + 1 : header + 5]]
    assert held == sorted(held, reverse=True)
    assert out[-2] == f"wrote 4 rows to {results_dir() / 'rows.jsonl'}"
    assert out[-1] == f"next: epcache linear {path}"
    run("linear", path, "--pooler", "gap", "--method", "ridge", "--holdout", "0", "--l2", "2")
    done = capsys.readouterr()
    assert "alpha 2" in done.out
    assert "wrote 1 row to" in done.out
    assert "held-out" not in done.out
    assert "nothing was held out" in done.err


def test_poolers_count_what_was_published(capsys):
    """Parameters of every pooler with its classifier, and EP's multiply-adds, to the last one."""
    found = {p["name"]: p for p in run_json(capsys, "poolers")["poolers"]}
    assert {name: p["num_params"] for name, p in found.items()} == PARAMS
    assert all(set(p) == {"name", "num_params", "macs", "macs_published"} for p in found.values())
    ep = found["ep"]
    assert round(ep["macs_published"] / 1e6, 1) == 121.3
    assert round(ep["macs"] / 1e6, 1) == 11.0


def test_poolers_of_other_widths(capsys):
    """D=1024 and D=384 as published; a width that a pooler cannot have is null and told."""

    def params(dim):
        found = run_json(capsys, "poolers", "--dim", dim)["poolers"]
        return {pooler["name"]: pooler["num_params"] for pooler in found}

    wide = params(1024)
    assert (wide["cls"], wide["ep"], wide["aim"]) == (1_025_000, 2_106_344, 3_123_176)
    assert params(384)["ep"] == 544_744
    run("poolers", "--dim", 100, "--classes", 10, "--grid", "16x12")
    done = capsys.readouterr()
    assert "pooler ep: num_queries=32 does not divide dim_out=100" in done.err
    assert "16 x 12 tokens of width 100" in done.err
    run("poolers", "--grid", "14x", code=2)
    run("poolers", "--dim", "0", code=1)
