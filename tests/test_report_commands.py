"""The command of a row makes that row again: same run name, same numbers."""

import shlex

import pytest
from extractkit import run, run_json
from probekit import learnable_store
from reportkit import make_row

from epcache import ProbeConfig, fit_probes, open_store
from epcache.linear import LOW_SHOT_CS
from epcache.report.collect import collect
from epcache.report.commands import UNSURE, command_of
from epcache.results import read_rows

NUMBERS = ("val_top1", "test_top1", "test_top1_best", "test_top1_last", "best_epoch", "test_top5",
           "train_images", "num_params")  # fmt: skip
CONFIGS = {
    "plain": {"pooler": "ep", "num_queries": 4, "lr": 0.03},
    "all tokens": {"pooler": "ep", "num_queries": 4, "tokens": "all", "dim_out": 8, "lr": 0.1},
    "another layer": {"pooler": "cls", "layer": 0, "norm": "none", "lr": 0.1, "seed": 3},
    "shots": {"pooler": "gap", "shots": 4, "order_seed": 2, "lr": 0.1},
    "share": {"pooler": "gap", "share": 0.3, "lr": 0.1},
    "one view": {"pooler": "gap", "layer": 3, "lr": 0.1, "views": 1},
    "nothing held out": {"pooler": "gap", "holdout": 0.0, "lr": 0.1},
    "optimizer": {"pooler": "ep", "num_queries": 2, "optimizer": "sgd", "lr": 1e-05,
                  "weight_decay": 0.001, "batch_size": 8, "label_smoothing": 0.1,
                  "holdout": 0.2},
    "python: options": {"pooler": "abmilp", "options": {"depth": 1}, "lr": 0.01},
    "python: warm-up": {"pooler": "gap", "warmup_epochs": 1.0, "lr": 0.1},
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A store with two views of train, so that their number matters."""
    return learnable_store(tmp_path_factory.mktemp("commands") / "store", num_views=2)


def numbers(row):
    return {name: getattr(row, name) for name in NUMBERS}


def repeat(command, home, capsys, monkeypatch):
    """Run a command with results of its own; its only row."""
    monkeypatch.setenv("EPCACHE_HOME", str(home))
    program, *arguments = shlex.split(command)
    if program == "python":
        assert arguments[0] == "-c"
        exec(arguments[1], {})
    else:
        assert program == "epcache"
        run_json(capsys, *arguments)
    (row,) = read_rows(home / "results")
    return row


@pytest.mark.parametrize("name", CONFIGS)
def test_probe_again(path, tmp_path, capsys, monkeypatch, name):
    """A probe's command leads to the same run and the same numbers."""
    config = ProbeConfig(**{"epochs": 2, "views": 2, **CONFIGS[name]})
    folder = tmp_path / "results"
    fit_probes(open_store(path), [config], results_dir=folder, device="cpu")
    (entry,) = collect(folder).entries
    assert entry.command.startswith("python -c" if "python" in name else "epcache probe")
    again = repeat(entry.command, tmp_path / "home", capsys, monkeypatch)
    assert again.run == entry.row.run
    assert numbers(again) == numbers(entry.row)


@pytest.mark.parametrize(
    "arguments",
    [
        ("knn", "--k", "3,5", "--pooler", "gap", "--layer", "0"),
        ("knn", "--k", "3", "--holdout", "25%", "--seed", "2"),
        ("knn", "--k", "3", "--holdout", "0", "--norm", "none"),
        ("knn", "--k", "2", "--shots", "4", "--pooler", "gap"),
        ("linear", "--method", "ridge", "--holdout", "0.3"),
        ("linear", "--method", "ridge", "--l2", "0.5", "--holdout", "0"),
        ("linear", "--method", "logistic", "--shots", "4", "--pooler", "gap",
         "--l2", ",".join(map(str, LOW_SHOT_CS))),
        ("linear", "--method", "ridge", "--share", "50%", "--pooler", "gap", "--seed", "1"),
    ],
)  # fmt: skip
def test_features_again(path, tmp_path, capsys, monkeypatch, arguments):
    """k-NN and linear rows do not say what was held out; their command does."""
    monkeypatch.setenv("EPCACHE_HOME", str(tmp_path / "first"))
    command, *options = arguments
    run_json(capsys, command, path, *options)
    folder = tmp_path / "first" / "results"
    (tmp_path / "first" / "stores" / "zoo").mkdir(parents=True)
    (tmp_path / "first" / "stores" / "zoo" / "tiny").symlink_to(path)
    entries = collect(folder).entries
    assert entries
    for number, entry in enumerate(entries):
        again = repeat(entry.command, tmp_path / f"again{number}", capsys, monkeypatch)
        assert again.run == entry.row.run, entry.command
        assert numbers(again) == numbers(entry.row)


def test_averages_are_asked_for(path, monkeypatch, capsys):
    """A row on the average of layers asks for that average."""
    asked = ProbeConfig(pooler="gap", layer=3, average_layers=2, lr=0.1, epochs=2, views=1)
    probe = {**asked.to_json(), "optimizer": "adamw", "batch_size": 16, "warmup_epochs": 0.2,
             "label_smoothing": 0.0, "weight_decay": 0.0}  # fmt: skip
    row = make_row(pooler="gap", num_queries=None, average_layers=2, train_images=60, epochs=2)
    command = command_of(row, {"store": str(path), "probe": probe}, None)
    requests = []

    def remember(request, observer):
        requests.append(request)
        raise KeyboardInterrupt

    monkeypatch.setattr("epcache.pipelines.probe.probe", remember)
    run(*shlex.split(command)[1:], code=130)
    (config,) = requests[0].configs
    assert (config.average_layers, config.layer, config.lr) == (2, 3, 0.1)


def test_a_probe_of_a_grid_stands_alone(path, tmp_path, capsys, monkeypatch):
    """The command of a row that was selected from a grid gives its numbers without the others."""
    folder = tmp_path / "results"
    rates = [ProbeConfig(pooler="gap", lr=lr, epochs=2, views=1) for lr in (0.01, 0.1, 1.0)]
    fit_probes(open_store(path), rates, results_dir=folder, device="cpu")
    entries = collect(folder).entries
    assert len(entries) == 3
    best = next(entry for entry in entries if entry.row.test_top1 is not None)
    again = repeat(best.command, tmp_path / "home", capsys, monkeypatch)
    assert again.run == best.row.run
    assert again.test_top1 == pytest.approx(best.row.test_top1)


def test_gone_runs_have_what_their_rows_say():
    """Without its folder a run's command is made from the row, and the store has to be named."""
    command = command_of(make_row(shots=4, val_top1=None), None, None)
    assert command.endswith(UNSURE)
    words = shlex.split(command, comments=True)
    assert words[:3] == ["epcache", "probe", "STORE"]
    for option, value in (("--M", "32"), ("--shots", "4"), ("--lr", "0.01"), ("--holdout", "0")):
        assert words[words.index(option) + 1] == value


def test_a_command_that_may_lead_elsewhere_says_so():
    """Where no usual choice gives the row's name, the command is marked."""
    row = make_row(pooler="gap", num_queries=None, method="ridge", l2=1.0, run="0123456789ab")
    assert command_of(row, None, None).endswith(UNSURE)


def test_names_are_quoted():
    """A store's path cannot become part of the command."""
    config = {"store": "/tmp/a b; rm -rf $HOME"}
    assert shlex.split(command_of(make_row(), config, None))[2] == "/tmp/a b; rm -rf $HOME"
