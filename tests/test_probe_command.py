"""``epcache probe`` as a person or a script uses it."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch
from extractkit import run, run_json
from probekit import learnable_store

from epcache.published import load_published
from epcache.report.collect import collect
from epcache.results import read_rows, results_dir
from epcache.runs import load_probe

QUICK = ("--epochs", "4", "--batch-size", "10")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EPCACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def store(home):
    return learnable_store(home / "stores" / "zoo" / "tiny-0")


def probe_json(capsys, *arguments):
    return run_json(capsys, "probe", *arguments, *QUICK)


def test_the_object_has_what_others_read(capsys, store, home):
    """Store, digest, rows and the best of them; the rows lie in rows.jsonl too."""
    result = probe_json(capsys, store, "--pooler", "ep,gap", "--M", "2,4", "--lr", "0.003,0.01")
    assert list(result) == ["store", "digest", "results", "best"]
    sizes = [(r["pooler"], r["num_queries"], r["lr"]) for r in result["results"]]
    assert sizes == [
        ("ep", 2, 0.003), ("ep", 2, 0.01), ("ep", 4, 0.003), ("ep", 4, 0.01),
        ("gap", None, 0.003), ("gap", None, 0.01),
    ]  # fmt: skip
    best = result["best"]
    assert best in result["results"]
    assert best["val_top1"] == max(r["val_top1"] for r in result["results"])
    assert best["test_top1"] <= best["test_top1_best"]
    kept = [row.to_json() for row in read_rows(home / "results")]
    assert sorted(kept, key=str) == sorted(result["results"], key=str)
    assert load_probe(best["run"]).row.to_json() == best


def test_the_store_sealed_last_is_taken(capsys, store):
    """And named."""
    run("probe", "--M", "4", "--lr", "0.01", *QUICK)
    out, err = capsys.readouterr()
    assert f"store {store}" in err
    assert "next: epcache" in out
    assert "test" in out.splitlines()[0]


def test_a_second_run_only_reads(capsys, store):
    """Nothing is trained twice, unless --again."""
    arguments = (store, "--M", "4", "--lr", "0.01")
    first = probe_json(capsys, *arguments)
    assert probe_json(capsys, *arguments) == first
    run("probe", *arguments, *QUICK, "--again")
    assert "refit 1 probe (ep) on 60 images" in capsys.readouterr().err


def test_a_probe_can_be_exported(capsys, store, tmp_path):
    """The best ep probe in the layout of published heads, logits and all."""
    path = tmp_path / "head.pth"
    result = probe_json(
        capsys, store, "--pooler", "ep,gap", "--M", "4", "--lr", "0.01", "--export", path
    )
    best = next(r for r in result["results"] if r["pooler"] == "ep")
    tokens = torch.randn(3, 6, 16)
    ours = load_probe(best["run"]).probe
    torch.testing.assert_close(load_published(path)(tokens), ours(tokens))


def test_an_exported_head_can_be_imported(capsys, store, tmp_path):
    """It becomes a run with the score that it had; the page knows the command for it."""
    path = tmp_path / "head.pth"
    trained = probe_json(capsys, store, "--M", "4", "--lr", "0.01", "--export", path)["best"]
    run("probe", store, "--import", path, "--json")
    (row,) = json.loads(capsys.readouterr().out)["results"]
    assert row["test_top1_last"] == pytest.approx(trained["test_top1"])
    assert row["recipe"] == "imported"
    (entry,) = (e for e in collect(results_dir()).entries if e.row.run == row["run"])
    assert f"--import {path}" in entry.command
    run(*shlex.split(entry.command)[1:])
    assert row["run"] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--pooler", "epp"), 1, "did you mean ep"),
        (("--pooler", "gap", "--M", "4"), 1, "--M 4: pooler gap has none"),
        (("--M", "many"), 2, "expected whole numbers"),
        (("--lr", "0"), 1, "lr=0: expected more than 0"),
        (("--layer", "7"), 1, "layer 7 is not in store"),
        (("--memory-budget", "lots"), 1, "expected a size such as 2GB"),
        (("--precision", "float8"), 1, "expected auto or float32 or bfloat16"),
        (("--device", "gpu"), 1, "--device gpu cannot be used"),
        (("--optimizer", "sgd"), 1, "give learning rates with the optimizer"),
        (("--pooler", "gap", "--export", "x"), 1, "add --pooler ep"),
        (("--recipe", "paper"), 1, "take recipe small"),
        (("--import", "x", "--lr", "1"), 2, "leave out --lr"),
        (("--import", "missing.pth"), 1, "missing.pth does not exist"),
    ],
)
def test_mistakes_are_one_line(capsys, store, arguments, code, message):
    """Exit status, and a line that says what to do."""
    run("probe", store, *arguments, code=code)
    err = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert message in err
    assert "Traceback" not in err


def test_all_probes_diverging_is_an_error(capsys, store):
    """Which rate it was is told."""
    run("probe", store, "--optimizer", "sgd", "--lr", "1e30", "--M", "4", *QUICK, code=1)
    err = capsys.readouterr().err
    assert "lr 1e+30" in err
    assert "every probe diverged" in err


def test_no_held_out_data(capsys, store):
    """--holdout 0 leaves the chosen accuracies null and takes the best epoch's as best."""
    result = probe_json(capsys, store, "--M", "4", "--lr", "0.003,0.01", "--holdout", "0")
    assert [r["val_top1"] for r in result["results"]] == [None, None]
    best = max(r["test_top1_best"] for r in result["results"])
    assert result["best"]["test_top1_best"] == best


def test_a_killed_run_goes_on(store, home):
    """Killed without warning at some epoch, the same command does the rest."""
    command = [
        sys.executable, "-c", "from epcache.cli.main import main; main()", "probe", str(store),
        "--M", "4", "--lr", "0.01", "--epochs", "40", "--batch-size", "10", "--json",
    ]  # fmt: skip
    environment = {**os.environ, "EPCACHE_HOME": str(home), "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    checkpoints = home / "results" / "checkpoints"
    deadline = time.monotonic() + 60
    while not (checkpoints.is_dir() and list(checkpoints.glob("*.safetensors"))):
        assert time.monotonic() < deadline
        assert started.poll() is None
        time.sleep(0.02)
    started.send_signal(signal.SIGKILL)
    assert started.wait() == -signal.SIGKILL
    assert not read_rows(home / "results")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert "select goes on from its last epoch" in done.stderr
    (row,) = json.loads(done.stdout)["results"]
    assert row["epochs"] == 40
    assert len(read_rows(home / "results")) == 1
    assert not list(checkpoints.iterdir())
