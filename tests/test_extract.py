"""``epcache extract`` from the command line to the sealed store."""

import json
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from extractkit import (
    BACKBONE,
    arguments,
    assert_same_store,
    files_of,
    make_folder,
    run,
    run_json,
    started,
)
from PIL import Image

import epcache
from epcache.dataset import Preprocess
from epcache.store.journal import read_journal


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """A store from an uninterrupted run."""
    store = tmp_path_factory.mktemp("stores") / "whole"
    run(*arguments(folder, store))
    return store


def live_tokens(store, split, layer, folder):
    """What the backbone itself gives for the rows of a store, one image at a time."""
    backbone = epcache.load_backbone("test_vit", weights="random", image_size=32)
    preprocess = Preprocess(image_size=32)
    model = backbone._model
    patch, prefix = [], []
    for sample in store[split].samples():
        with Image.open(folder / sample.path) as image:
            crop = np.array(preprocess.eval_crop(image.convert("RGB")))
        pixels = torch.from_numpy(crop).permute(2, 0, 1)
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in (backbone.mean, backbone.std))
        with torch.inference_mode():
            tokens = model.patch_embed(((pixels / 255 - mean) / std)[None])
            tokens = model.norm_pre(model.patch_drop(model._pos_embed(tokens)))
            for block in model.blocks[: layer + 1]:
                tokens = block(tokens)
        prefix.append(tokens[0, : model.num_prefix_tokens].numpy())
        patch.append(tokens[0, model.num_prefix_tokens :].numpy())
    return np.stack(patch), np.stack(prefix)


@pytest.mark.parametrize("layer", [0, -1])
def test_cached_tokens_equal_the_live_backbone(whole, folder, layer):
    """Every row of every split holds what the backbone's own blocks give for that file."""
    store = epcache.open_store(whole)
    for split in store.splits:
        depth = store.resolve_layer(layer)
        patch, prefix = live_tokens(store, split, depth, folder)
        reader = store[split].layer(layer)
        np.testing.assert_allclose(reader.patch[:], patch, atol=2e-3 * np.abs(patch).max())
        np.testing.assert_allclose(reader.prefix[:], prefix, atol=2e-3 * np.abs(prefix).max())


def test_labels_follow_their_files(whole, folder):
    """The class folder of each row's file is its class, and labels are sorted class numbers."""
    store = epcache.open_store(whole)
    classes = ["ape", "bee", "cat"]
    for split, number in (("train", 23), ("val", 9)):
        samples = store[split].samples()
        assert sorted(sample.path for sample in samples) == sorted(
            path.relative_to(folder).as_posix() for path in (folder / split).rglob("*.png")
        )
        assert len(samples) == number
        for sample, label in zip(samples, store[split].labels, strict=True):
            assert sample.path.split("/")[1] == sample.class_name == classes[label]
            assert sample.label == label
        for sample, size in zip(samples, store[split].sizes.tolist(), strict=True):
            with Image.open(folder / sample.path) as image:
                assert image.size == tuple(size)


def test_rows_are_mixed(whole):
    """Rows are not stored in the order of their file names."""
    paths = [sample.path for sample in epcache.open_store(whole)["train"].samples()]
    assert paths != sorted(paths)


def test_json_says_what_design_promises(folder, tmp_path, capsys):
    """One JSON object with the documented fields, also for a run that has nothing to do."""
    out = tmp_path / "store"
    result = run_json(capsys, *arguments(folder, out))
    assert result["sealed"] is True
    assert result["store"] == str(out)
    assert result["layers"] == [0, 1, 2, 3, 4, 5]
    assert result["splits"] == {
        "train": {"num_images": 23, "quarantined": 0},
        "val": {"num_images": 9, "quarantined": 0},
    }
    assert result["tokens"] == {"grid": [2, 2], "num_patches": 4, "num_prefix": 1, "dim": 64}
    assert result["bytes"] == sum(
        len(data) for name, data in files_of(out).items() if "/layers/" in name and "/c/" in name
    )
    assert result["backbone"] == "test_vit"
    assert result["dataset"] == "imagefolder"
    assert result["images_per_second"] > 0
    again = run_json(capsys, *arguments(folder, out))
    assert {**again, "seconds": 0, "images_per_second": 0} == {
        **result, "seconds": 0, "images_per_second": 0
    }  # fmt: skip


def test_two_runs_give_the_same_bytes(whole, folder, tmp_path):
    """The same command elsewhere ends in the same store."""
    run(*arguments(folder, tmp_path / "again"))
    assert_same_store(whole, tmp_path / "again")


@pytest.mark.parametrize("tasks_before", [1, 3])
def test_a_killed_run_goes_on(whole, folder, tmp_path, tasks_before):
    """SIGKILL after some commits, start again: same bytes, and no committed shard is rewritten."""
    out = tmp_path / "store"
    with started(arguments(folder, out)) as process:
        wait_for_tasks(out, tasks_before, process)
        process.send_signal(signal.SIGKILL)
    before = read_journal(out)
    stamps = {name: (out / name).stat().st_mtime_ns for e in before.values() for name in e.files}
    run(*arguments(folder, out))
    assert_same_store(whole, out)
    assert stamps
    for name, stamp in stamps.items():
        assert (out / name).stat().st_mtime_ns == stamp, f"{name} was computed again"


@pytest.mark.slow
def test_kills_at_any_time_do_no_harm(whole, folder, tmp_path):
    """Killed again and again at arbitrary moments, the run still ends in the same bytes."""
    out = tmp_path / "store"
    rng = np.random.default_rng(0)
    for _ in range(8):
        with started(arguments(folder, out)) as process:
            while not out.exists() and process.poll() is None:
                time.sleep(0.01)
            time.sleep(float(rng.uniform(0, 0.5)))
            process.send_signal(signal.SIGKILL)
    run(*arguments(folder, out))
    assert_same_store(whole, out)


def wait_for_tasks(store, number, process):
    """Until the journal has so many lines; the run may end meanwhile."""
    while process.poll() is None:
        try:
            if (store / "journal.jsonl").read_bytes().count(b"\n") >= number:
                return
        except FileNotFoundError:
            pass
        time.sleep(0.002)


def test_ctrl_c_stops_cleanly(folder, tmp_path):
    """SIGINT: exit 130, a word on how to go on, nothing half-written; then it goes on."""
    out = tmp_path / "store"
    with started(arguments(folder, out, "--views", "12")) as process:
        wait_for_tasks(out, 2, process)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "same command" in stderr
    assert "--views 12" in stderr
    assert "Traceback" not in stderr
    assert not list(out.glob(".partial/*/*"))
    run(*arguments(folder, out, "--views", "12"))
    assert epcache.verify_store(out).ok


def test_a_second_run_is_refused_and_harmless(folder, tmp_path):
    """While one run writes, another into the same store stops with one line; the first finishes."""
    out = tmp_path / "store"
    command = arguments(folder, out, "--views", "12")
    with started(command) as first:
        wait_for_tasks(out, 1, first)
        first.send_signal(signal.SIGSTOP)  # hold it where it is while the other one tries
        with started(command) as second:
            _, stderr = second.communicate(timeout=60)
        first.send_signal(signal.SIGCONT)
        first.communicate(timeout=120)
    assert second.returncode == 1
    assert f"process {first.pid}" in stderr
    assert first.returncode == 0
    assert epcache.verify_store(out).ok


def test_ranks_share_the_work(whole, folder, tmp_path):
    """Two ranks at once make the store that one process makes."""
    out = tmp_path / "store"
    command = arguments(folder, out)
    with (
        started(command, RANK="0", WORLD_SIZE="2") as first,
        started(command, RANK="1", WORLD_SIZE="2") as second,
    ):
        for rank in (first, second):
            _, stderr = rank.communicate(timeout=120)
            assert rank.returncode == 0, stderr
    assert_same_store(whole, out)


def test_views_are_cached_for_training_only(folder, tmp_path):
    """View 0 is the evaluation crop, the others differ from it; the evaluation split has one."""
    run(*arguments(folder, tmp_path / "views", "--views", "3"))
    run(*arguments(folder, tmp_path / "plain"))
    views, plain = (epcache.open_store(tmp_path / name) for name in ("views", "plain"))
    assert views["train"].num_views == 3
    assert views["val"].num_views == 1
    tokens = [views["train"].layer(-1, view=view).patch[:] for view in range(3)]
    np.testing.assert_array_equal(tokens[0], plain["train"].layer(-1).patch[:])
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (tokens[one] != tokens[other]).any(axis=(1, 2)).all()


def test_layers_are_independent_of_each_other(whole, folder, tmp_path):
    """A layer has the same tokens whichever other layers are stored with it."""
    run(*arguments(folder, tmp_path / "some", "--layers", "2,-1"))
    some, all_layers = epcache.open_store(tmp_path / "some"), epcache.open_store(whole)
    assert some.layers == (2, 5)
    for layer in (2, 5):
        np.testing.assert_array_equal(
            some["train"].layer(layer).patch[:], all_layers["train"].layer(layer).patch[:]
        )


def test_limit_takes_the_first_rows_of_the_order(whole, folder, tmp_path):
    """``--limit`` stores a prefix of the full store's rows."""
    run(*arguments(folder, tmp_path / "few", "--limit", "5"))
    few, full = epcache.open_store(tmp_path / "few"), epcache.open_store(whole)
    assert few["train"].samples() == full["train"].samples()[:5]
    assert len(few["val"]) == 5
    np.testing.assert_allclose(
        few["train"].layer(-1).patch[:], full["train"].layer(-1).patch[:5], atol=1e-2
    )


def test_compressed_store_holds_the_same_tokens(whole, folder, tmp_path):
    """``--compress`` changes files, not values."""
    run(*arguments(folder, tmp_path / "small", "--compress"))
    small, full = epcache.open_store(tmp_path / "small"), epcache.open_store(whole)
    assert small.digest == full.digest
    for split in full.splits:
        for layer in full.layers:
            np.testing.assert_array_equal(
                small[split].layer(layer).patch[:], full[split].layer(layer).patch[:]
            )


def test_bad_images_are_set_aside(tmp_path, capsys):
    """A non-image keeps its row, marked invalid with path and reason; its tokens are zeros."""
    folder = make_folder(tmp_path / "images", bad=(4,))
    out = tmp_path / "store"
    result = run_json(capsys, *arguments(folder, out, "--max-bad", "5%"))
    assert result["splits"]["train"] == {"num_images": 23, "quarantined": 1}
    train = epcache.open_store(out)["train"]
    (row,) = np.flatnonzero(~train.valid)
    assert train.samples()[row].path == "train/bee/004.png"
    line = json.loads((out / "train/quarantine.jsonl").read_text())
    assert line == {
        "row": int(row),
        "path": "train/bee/004.png",
        "reason": "not an image that Pillow can read",
    }
    assert not train.layer(-1).patch[int(row)].any()
    assert train.layer(-1).patch[train.valid].any(axis=(1, 2)).all()


def test_too_many_bad_images_stop_the_run(tmp_path, capsys):
    """Above ``--max-bad`` the run stops and says which; with a larger share it goes on."""
    folder = make_folder(tmp_path / "images", bad=(4, 9))
    out = tmp_path / "store"
    run(*arguments(folder, out), code=1)
    error = capsys.readouterr().err
    assert "--max-bad 0.01" in error
    assert "not an image" in error
    run(*arguments(folder, out, "--max-bad", "0.2"))
    assert epcache.verify_store(out).ok
    assert (~epcache.open_store(out)["train"].valid).sum() == 2


def test_dry_run_writes_nothing(folder, tmp_path, capsys):
    """``--dry-run`` tells size, room and time, and leaves no file."""
    result = run_json(capsys, *arguments(folder, tmp_path / "store", "--dry-run"))
    assert not (tmp_path / "store").exists()
    assert result["sealed"] is False
    assert result["fits"] is True
    assert result["seconds"] > 0
    run(*arguments(folder, tmp_path / "store"))
    sizes = {name: len(data) for name, data in files_of(tmp_path / "store").items()}
    tokens = sum(size for name, size in sizes.items() if "/layers/" in name and "/c/" in name)
    assert result["bytes"] == tokens


def test_a_run_that_cannot_fit_does_not_start(folder, tmp_path, capsys, monkeypatch):
    """Too little room: one line with both sizes, and no folder is made."""
    monkeypatch.setattr("epcache.plan.free_bytes", lambda path: 10_000)
    run(*arguments(folder, tmp_path / "store"), code=1)
    assert "10 KB are free" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--layers", "6"), "0 to 5"),
        (("--layers", "one"), "one"),
        (("--image-size", "33"), "33"),
        (("--views", "0"), "--views 0"),
        (("--precision", "int8"), "int8"),
        (("--max-bad", "2"), "--max-bad 2"),
        (("--split", "dev"), "dev"),
        (("--device", "cuda:9"), "cuda:9"),
        (("--backbone", "dinov2_vits41"), "dinov2_vits14"),
        (("--dataset", "cub2000"), "cub200"),
        (("--weights", "/nowhere/w.pth"), "/nowhere/w.pth"),
        (("--data-dir", "/nowhere"), "/nowhere"),
        (("--rank", "3"), "--world-size is not"),
        (("--rank", "3", "--world-size", "2"), "--rank 3"),
        (("--image-size", "100000"), "1 to 4096"),
        (("--weights", "random:99999999999999999999"), "2**63"),
        (("--device", "meta"), "meta"),
        (("--limit", "0"), "--limit 0"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_mistakes_get_one_line(folder, tmp_path, capsys, more, words):
    """A wrong value is answered in one line that holds it, or what was expected, with exit 1."""
    run(*arguments(folder, tmp_path / "store", *more), code=1)
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: ")
    assert words in lines[-1]
    assert "Traceback" not in "".join(lines)
    assert not (tmp_path / "store" / "zarr.json").exists()


def test_another_store_at_the_path_is_refused(whole, folder, capsys):
    """A run never writes into a store of another identity; it says in what they differ."""
    before = files_of(whole)
    run(*arguments(folder, whole, "--seed", "7"), code=1)
    assert "seed" in capsys.readouterr().err
    assert files_of(whole) == before


def test_default_place_and_last_store(folder, tmp_path, capsys, monkeypatch):
    """Without --out the store lies below EPCACHE_HOME, and info finds the one sealed last."""
    monkeypatch.setenv("EPCACHE_HOME", str(tmp_path / "home"))
    command = ["extract", *BACKBONE, "--dataset", "imagefolder", "--data-dir", str(folder)]
    first = run_json(capsys, *command)
    second = run_json(capsys, *command, "--limit", "4")
    place = tmp_path / "home/stores/imagefolder"
    assert first["store"] == str(place / f"test_vit-{first['digest'][:8]}")
    assert run_json(capsys, "info")["store"] == second["store"]
    assert run_json(capsys, "info", first["store"])["layers"] == [5]


def test_verify_exit_status(whole, tmp_path, capsys):
    """``verify`` exits 0 on a whole store and 1 with the file's name on a damaged one."""
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    good = run_json(capsys, "verify", copy)
    assert good == {"store": str(copy), "ok": True, "shards_checked": 60, "problems": []}
    shard = copy / "train/layers/3/patch/c/1/0/0"
    data = bytearray(shard.read_bytes())
    data[100] ^= 4
    shard.write_bytes(data)
    bad = run_json(capsys, "verify", copy, code=1)
    assert [problem["file"] for problem in bad["problems"]] == ["train/layers/3/patch/c/1/0/0"]
    assert bad["ok"] is False


def test_a_deleted_shard_is_computed_again(whole, folder, tmp_path):
    """The same command repairs a sealed store from which a shard was deleted: only that one."""
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    lost = copy / "train/layers/3/patch/c/1/0/0"
    lost.unlink()
    untouched = copy / "train/layers/3/patch/c/0/0/0"
    stamp = untouched.stat().st_mtime_ns
    run(*arguments(folder, copy))
    assert_same_store(whole, copy)
    assert untouched.stat().st_mtime_ns == stamp


@pytest.mark.parametrize(
    "name", ["train/samples.csv", "final_norm.safetensors", "train/labels/c/0", "val/zarr.json"]
)
def test_a_deleted_small_file_is_written_again(whole, folder, tmp_path, name):
    """The same command repairs a sealed store that lost a small file, to the same bytes."""
    copy = tmp_path / "copy"
    shutil.copytree(whole, copy)
    (copy / name).unlink()
    run(*arguments(folder, copy))
    assert_same_store(whole, copy)


def test_a_folder_with_other_things_is_refused(folder, tmp_path, capsys):
    """A store never moves in among a user's own files, and none of them is touched."""
    mine = tmp_path / "mine"
    (mine / ".partial").mkdir(parents=True)
    (mine / ".partial" / "notes.txt").write_text("mine")
    (mine / "journal.jsonl").write_text("mine")
    before = files_of(mine)
    run(*arguments(folder, mine), code=1)
    assert "other things in it" in capsys.readouterr().err
    assert files_of(mine) == before
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "store", "/proc/nowhere", "x" * 300):
        run(*arguments(folder, place), code=1)
        assert "fault of epcache" not in capsys.readouterr().err


@pytest.mark.parametrize("place", [".", "train", "train/new", ".."])
def test_a_store_and_its_data_never_mix(folder, capsys, place):
    """``--out`` at, inside or above the images is refused, and nothing is written there."""
    before = sorted(folder.rglob("*"))
    run(*arguments(folder, folder / place), code=1)
    assert "lie in one another" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


def test_a_run_that_failed_at_its_beginning_goes_on(whole, folder, tmp_path, monkeypatch):
    """A disk that is full before the root document is written leaves a folder that is taken up."""
    import epcache.store.writer as writer
    from epcache.errors import SpaceError

    def full(*arguments):
        raise SpaceError("full")

    out = tmp_path / "store"
    with monkeypatch.context() as patched:
        patched.setattr(writer, "root_document", full)
        run(*arguments(folder, out), code=1)
    assert not (out / "zarr.json").exists()
    run(*arguments(folder, out))
    assert_same_store(whole, out)


def test_the_batch_size_that_a_store_was_begun_with_stays(whole, folder, tmp_path, capsys):
    """Another --batch-size could change last bits, so a resumed run keeps the first or refuses."""
    out = tmp_path / "store"
    run(*arguments(folder, out, "--rank", "0", "--world-size", "2"))
    run(*arguments(folder, out), "--batch-size", "5", code=1)
    assert "was begun with 4" in capsys.readouterr().err
    without = [part for part in arguments(folder, out) if part not in ("--batch-size", "4")]
    run(*without)
    assert_same_store(whole, out)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_half_a_launcher_is_an_error(folder, tmp_path, capsys, monkeypatch, name):
    """One of RANK and WORLD_SIZE alone would make part of a store that nobody finishes."""
    monkeypatch.setenv(name, "4")
    run(*arguments(folder, tmp_path / "store"), code=1)
    assert f"${name} is set" in capsys.readouterr().err
    assert not (tmp_path / "store").exists()


def test_usage_errors_with_json_print_an_object(folder, tmp_path, capsys):
    """Scripts get their object also when an option cannot be parsed."""
    result = run_json(capsys, *arguments(folder, tmp_path / "store", "--views", "many"), code=2)
    assert list(result) == ["error"]


def test_a_talkative_backbone_cannot_spoil_the_object(folder, tmp_path, capsys, monkeypatch):
    """What a user's module prints goes to stderr; what it raises or exits with is an error."""
    (tmp_path / "mine.py").write_text(
        "import sys\nfrom torch import nn\n"
        "class Talk(nn.Module):\n"
        "    def forward(self, x):\n"
        "        print('NOISE')\n"
        "        return x.flatten(2).transpose(1, 2)[:, :16]\n"
        "def talk():\n    print('NOISE')\n    return Talk()\n"
        "def leave():\n    sys.exit(0)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    command = ["extract", "--dataset", "imagefolder", "--data-dir", folder, "--image-size", "32"]
    result = run_json(capsys, *command, "--backbone", "mine:talk", "--out", tmp_path / "s")
    assert result["tokens"]["num_patches"] == 16
    run(*command, "--backbone", "mine:leave", code=1)
    assert "cannot be built" in capsys.readouterr().err


def test_an_unsealed_store_is_refused_with_the_way_on(folder, tmp_path, capsys):
    """Opening a store under way names the command that finishes it."""
    out = tmp_path / "store"
    run(*arguments(folder, out, "--rank", "0", "--world-size", "2"))
    with pytest.raises(RuntimeError, match="not sealed") as error:
        epcache.open_store(out)
    assert "epcache extract" in str(error.value)
    state = run_json(capsys, "info", out)
    assert state["sealed"] is False
    assert state["tasks"]["committed"] < state["tasks"]["all"]
