"""What a person or a script sees of the command line."""

import json
import re
import subprocess
import sys

import pytest
from extractkit import run, run_json

from epcache.cli import render
from epcache.cli.options import comma_list, share
from epcache.store.files import format_bytes


def command(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-c", "from epcache.cli.main import main; main()", *arguments],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def test_help_names_every_command():
    """``epcache --help`` lists what there is."""
    out = command("--help").stdout
    for name in ("demo", "extract", "info", "verify", "backbones", "datasets", "bench"):
        assert re.search(rf"\b{name}\b", out), name


def test_usage_errors_exit_2():
    """A wrong option or a missing one is a usage error, told on stderr."""
    for arguments in (("extract", "--nonsense"), ("extract",), ("nonsense",)):
        done = command(*arguments)
        assert done.returncode == 2
        assert not done.stdout
        assert "Traceback" not in done.stderr


def test_known_errors_exit_1_in_one_line():
    """A user's mistake is one line without a traceback; --debug shows the traceback too."""
    done = command("info", "/nowhere/at/all")
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "/nowhere/at/all" in done.stderr
    assert "Traceback" in command("info", "/nowhere/at/all", "--debug").stderr


def test_json_on_errors_too(capsys):
    """With --json a failure is an object on stdout as well."""
    result = run_json(capsys, "info", "/nowhere", code=1)
    assert list(result) == ["error"]
    assert "/nowhere" in result["error"]


def test_version():
    """``--version`` prints the version and nothing else."""
    import epcache

    assert command("--version").stdout == f"{epcache.__version__}\n"


def test_listings_as_json(capsys):
    """Backbones and data sets come as objects with the fields that the tables show."""
    backbones = run_json(capsys, "backbones")["backbones"]
    by_alias = {entry["alias"]: entry for entry in backbones}
    assert by_alias["dinov2_vitl14"]["image_size"] == 224
    assert by_alias["mae_vitb16"]["norm"] == "none"
    datasets = run_json(capsys, "datasets")["datasets"]
    assert {"cub200", "imagenet1k", "digits", "imagefolder"} <= {d["name"] for d in datasets}
    (cub,) = run_json(capsys, "datasets", "cub200")["datasets"]
    assert cub["splits"] == {"train": 5994, "test": 5794}
    assert "images.txt" in cub["layout"] or "images" in cub["layout"]


def test_tables_show_every_row(capsys):
    """The plain tables hold one line an entry, however wide."""
    run("backbones")
    out = capsys.readouterr().out
    assert "dinov2_vits14" in out
    assert "vit_small_patch14_dinov2.lvd142m" in out
    run("datasets", "cub200")
    assert "5,994" in capsys.readouterr().out


def test_unknown_data_set_names_the_nearest(capsys):
    """A typo is answered with what was probably meant."""
    run("datasets", "cub-200", code=1)
    assert "cub200" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 KB"),
        (1234, "1.23 KB"),
        (45_600_000, "45.6 MB"),
        (1.5e9, "1.5 GB"),
        (6.98e11, "698 GB"),
    ],
)
def test_sizes_read_well(num_bytes, text):
    """Three digits and a unit."""
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (62, "1:02"), (11241.4, "3:07:21")])
def test_durations_read_well(seconds, text):
    """Minutes and seconds, hours when there are some."""
    assert render.duration(seconds) == text


def test_option_values():
    """Repeats and commas are one list; shares are numbers or percentages."""
    assert comma_list(["a,b", " c ", ""]) == ("a", "b", "c")
    assert comma_list(None) == ()
    assert share("1%") == pytest.approx(0.01)
    assert share("0.2") == pytest.approx(0.2)


def test_broken_pipe_is_no_error_message():
    """``epcache backbones | head -1`` ends quietly."""
    script = f"{sys.executable} -c 'from epcache.cli.main import main; main()' backbones --json"
    done = subprocess.run(
        ["bash", "-c", f"{script} | head -c 10"], capture_output=True, text=True, check=False
    )
    assert done.stdout == '{"backbone'
    assert "Traceback" not in done.stderr


def test_bench_refuses_unknown_names(capsys):
    """A benchmark that does not exist is a one-line error."""
    run("bench", "--only", "speed", code=1)
    assert "extract, write, read, memory" in capsys.readouterr().err


def test_json_objects_are_strict(capsys):
    """No NaN or Infinity, which JSON does not have."""
    from epcache.cli.options import print_json

    with pytest.raises(ValueError, match="JSON"):
        print_json({"x": float("nan")})
    print_json({"x": None})
    assert json.loads(capsys.readouterr().out) == {"x": None}
