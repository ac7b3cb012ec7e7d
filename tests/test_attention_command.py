"""``epcache attention``: what it prints, writes and refuses."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from extractkit import arguments, make_folder, run, run_json
from PIL import Image

import epcache
from epcache.pipelines.attention import crop_boxes
from epcache.results import read_rows, results_dir
from epcache.store.reader import open_store

PROBES = ("--lr", "0.01", "--epochs", "2", "--holdout", "0")
QUERY = {
    "query", "accuracy_drop", "entropy", "centroid", "off_centre", "complementarity",
    "centroid_in_box",
}  # fmt: skip


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("attention") / "images", num_train=24, num_val=9)


@pytest.fixture(scope="module")
def trained(images, tmp_path_factory):
    """A home with a store of all six layers and a run of each of four poolers on it."""
    home = tmp_path_factory.mktemp("home")
    store = home / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EPCACHE_HOME", str(home))
        run(*arguments(images, store))
        run("probe", store, "--pooler", "ep,gap", "--M", "4", *PROBES)
        run("probe", store, "--pooler", "vjepa", *PROBES)
        averaged = epcache.ProbeConfig(
            pooler="ep", num_queries=2, average_layers=3, lr=0.01, epochs=2, holdout=0
        )
        epcache.fit_probes(epcache.open_store(store), [averaged], device="cpu")
        rows = read_rows(results_dir())
    names = {row.pooler: row.run for row in rows if row.average_layers in (None, 1)}
    return home, store, {**names, "averaged": rows[-1].run}


@pytest.fixture
def home(trained, monkeypatch, tmp_path):
    """Each test has a copy of the results."""
    shutil.copytree(trained[0] / "results", tmp_path / "results")
    monkeypatch.setenv("EPCACHE_HOME", str(tmp_path))
    return tmp_path


def test_one_run(home, trained, capsys):
    """The JSON, which is also what is written; pictures of the names that it gives."""
    _, store, runs = trained
    found = run_json(capsys, "attention", store, "--run", runs["ep"], "--images", "3")
    folder = home / "results" / "attention" / runs["ep"]
    assert found.pop("folder") == str(folder)
    assert json.loads((folder / "attention.json").read_text()) == found
    assert (found["run"], found["pooler"], found["num_maps"]) == (runs["ep"], "ep", 4)
    assert (found["split"], found["num_images"], found["num_boxed"]) == ("val", 9, 0)
    assert [set(query) for query in found["queries"]] == [QUERY] * 4
    assert all(query["centroid_in_box"] is None for query in found["queries"])
    assert found["max_box_acc_v2"] is None
    assert found["max_box_acc_v1"] is None
    assert len(found["correlations"]["matrix"]) == len(found["correlations"]["measures"]) == 4
    assert found["figures"] == ["gallery.png", "scatter.png", "scatter.svg"]
    written = {path.name for path in folder.iterdir()}
    assert written == {"attention.json", *found["figures"]}
    with Image.open(folder / "gallery.png") as image:
        assert image.format == "PNG"
        assert np.asarray(image.convert("RGB")).std() > 10
    (row,) = [row for row in read_rows(results_dir()) if row.run == runs["ep"]]
    assert found["accuracy"] == pytest.approx(row.test_top1_best, abs=1e-6)


def test_the_best_attentive_run_is_the_default(home, trained, capsys):
    """Of the store's runs the one with maps that did best; the gap run never is."""
    _, store, runs = trained
    found = run_json(capsys, "attention", store, "--images", "0")
    attentive = [row for row in read_rows(results_dir()) if row.pooler != "gap"]
    best = max(attentive, key=lambda row: row.test_top1_best)
    assert found["run"] == best.run != runs["gap"]
    assert "gallery.png" not in found["figures"]


def test_many_queries_get_a_picture_of_each_image(home, trained, capsys):
    """Sixteen heads are grouped, and all shown for each image; files of an earlier call go."""
    _, _, runs = trained
    found = run_json(capsys, "attention", "--run", runs["vjepa"], "--images", "1")
    assert found["num_maps"] == 16
    assert found["figures"][:2] == ["gallery.png", "gallery-1.png"]
    folder = home / "results" / "attention" / runs["vjepa"]
    assert {path.name for path in folder.glob("gallery*")} == {"gallery.png", "gallery-1.png"}
    run("attention", "--run", runs["vjepa"], "--images", "0")
    assert list(folder.glob("gallery*")) == []


def test_runs_are_compared(home, trained, capsys):
    """Several runs give a table and a list; --out has a folder for each."""
    _, store, runs = trained
    both = f"{runs['ep']},{runs['vjepa']}"
    command = ("attention", store, "--run", both, "--run", runs["averaged"], "--images", "0")
    found = run_json(capsys, *command, "--out", home / "there")
    assert [one["run"] for one in found["runs"]] == [runs["ep"], runs["vjepa"], runs["averaged"]]
    assert {path.name for path in (home / "there").iterdir()} == {
        runs[name] for name in ("ep", "vjepa", "averaged")
    }
    averaged = found["runs"][2]
    (row,) = [row for row in read_rows(results_dir()) if row.run == runs["averaged"]]
    assert averaged["accuracy"] == pytest.approx(row.test_top1_best, abs=1e-6)
    run("attention", "--run", both, "--images", "0")
    out = capsys.readouterr().out
    assert "pooler" in out
    assert out.splitlines()[-1] == "next: epcache report"
    assert all(runs[name] in out for name in ("ep", "vjepa"))


def test_tables_of_one_run(home, trained, capsys):
    """Queries by what they are worth, then the correlations, then what was written."""
    _, store, runs = trained
    run("attention", store, "--run", runs["ep"], "--images", "0")
    out = capsys.readouterr().out.splitlines()
    header = next(i for i, line in enumerate(out) if line.startswith("query"))
    drops = [float(line.split()[1]) for line in out[header + 1 : header + 5]]
    assert drops == sorted(drops, reverse=True)
    assert any(line.startswith("correlation") for line in out)
    assert out[-2].endswith(str(home / "results" / "attention" / runs["ep"]))


def test_boxes_from_a_file(home, trained, images, capsys):
    """Boxes of some images: those are scored, pictures prefer them, and stderr says how many."""
    _, store, runs = trained
    val = images / "val"
    paths = sorted(path.relative_to(images).as_posix() for path in val.rglob("*.png"))[:5]
    lines = [f"{path},10,5,40,35" for path in paths] + [
        f"{paths[0]},0,0,20,20",
        f"{paths[1]},0,0,1,1",
    ]
    boxes = home / "boxes.csv"
    boxes.write_text("path,x0,y0,x1,y1\n" + "\n".join(lines) + "\n")
    command = ("attention", store, "--run", runs["ep"], "--boxes", boxes, "--images", "2")
    found = run_json(capsys, *command)
    assert found["num_boxed"] == 5
    assert all(0 <= query["centroid_in_box"] <= 1 for query in found["queries"])
    assert 0 <= found["max_box_acc_v2"] <= 1
    assert 0 <= found["max_box_acc_v1"] <= 1
    assert found["correlations"]["measures"][-1] == "centroid_in_box"
    run(*command)
    done = capsys.readouterr()
    assert "boxes: 5 of 9 images show one; 1 have boxes outside of the crop" in done.err
    assert "MaxBoxAcc" in done.out
    assert "in box" in done.out


def test_boxes_of_the_store(capsys):
    """What the data set brings is carried through the crop; undecodable rows are left out."""
    reader = SimpleNamespace(
        valid=np.array([True, False, True]),
        boxes=np.array([[0, 0, 50, 100], [1, 1, 2, 2], [90, 10, 150, 60]], float),
        sizes=np.array([[100, 100], [0, 0], [200, 100]]),
    )
    transform = {"image_size": 50, "crop_pct": 1.0, "interpolation": "bicubic"}
    store = SimpleNamespace(provenance={"transform": transform}, __getitem__=None)
    store = type("S", (), {"provenance": store.provenance, "__getitem__": lambda s, name: reader})()
    told = SimpleNamespace(message=lambda text: None)
    first, second = crop_boxes(store, "val", None, told)
    np.testing.assert_allclose(first, [[0, 0, 0.5, 1]])
    np.testing.assert_allclose(second, [[0.4, 0.1, 1, 0.6]])
    reader.boxes = None
    assert crop_boxes(store, "val", None, told) is None


def test_without_its_images(home, trained, images, capsys):
    """A store whose images are gone still has its maps, over grey, and says so."""
    _, store, runs = trained
    images.rename(images.with_name("elsewhere"))
    try:
        run("attention", store, "--run", runs["ep"], "--images", "1", "--json")
    finally:
        images.with_name("elsewhere").rename(images)
    assert "maps are drawn over grey" in capsys.readouterr().err
    assert (home / "results" / "attention" / runs["ep"] / "gallery.png").exists()


def test_a_store_that_moved(home, trained, capsys):
    """The run remembers where its store was; named, it may be anywhere."""
    _, store, runs = trained
    moved = store.with_name("moved")
    store.rename(moved)
    try:
        run("attention", "--run", runs["ep"], code=1)
        assert f"run {runs['ep']} was trained there: name the store's folder" in (
            capsys.readouterr().err
        )
        assert run_json(capsys, "attention", moved, "--run", runs["ep"], "--images", "0")
    finally:
        moved.rename(store)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--run", "nothing"), "no run nothing in"),
        (("--run", "GAP"), "pooler gap has no attention maps"),
        (("--boxes", "nothing.csv"), "boxes nothing.csv cannot be read"),
        (("--split", "half"), "split 'half' is not in store"),
        (("--images", "-1"), "--images -1: expected 0 or more"),
        (("--device", "nonsense"), "--device nonsense"),
    ],
)
def test_wrong_options_are_one_line(home, trained, capsys, options, message):
    """Each says what is wrong with which value, and nothing is written."""
    _, store, runs = trained
    run("attention", store, *[runs["gap"] if part == "GAP" else part for part in options], code=1)
    err = capsys.readouterr().err.strip().splitlines()
    assert message in err[-1]
    assert not (home / "results" / "attention").exists()


def test_another_store_or_no_run(home, trained, images, tmp_path, capsys):
    """A run belongs to its store; a store without runs says how to make one."""
    _, _, runs = trained
    other = tmp_path / "other"
    run(*arguments(images, other, "--limit", "8"))
    run("attention", other, "--run", runs["ep"], code=1)
    assert f"run {runs['ep']} was trained on store" in capsys.readouterr().err
    run("attention", other, code=1)
    assert f"epcache probe {other} --pooler ep" in capsys.readouterr().err
    assert open_store(other).digest
    run("attention", other, "--run", " ", code=2)
