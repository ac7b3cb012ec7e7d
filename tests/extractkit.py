"""Small extractions for tests: a folder of images, a tiny untrained ViT, the real command."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from epcache.cli.main import main

BACKBONE = ("--backbone", "test_vit", "--weights", "random", "--image-size", "32")
"""timm's own test model: 6 blocks of width 64, 2 x 2 patch tokens and [CLS] at 32 pixels."""


def make_folder(root, *, num_train=23, num_val=9, classes=("ape", "bee", "cat"), bad=()):
    """``<split>/<class>/<image>.png`` of noise; positions in ``bad`` are no images."""
    rng = np.random.default_rng(0)
    for split, number in (("train", num_train), ("val", num_val)):
        for row in range(number):
            path = root / split / classes[row % len(classes)] / f"{row:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            if split == "train" and row in bad:
                path.write_bytes(b"not an image")
            else:
                pixels = rng.integers(0, 256, (40 + row, 50, 3), np.uint8)
                Image.fromarray(pixels).save(path)
    return root


def arguments(data_dir, out, *more):
    """The command line of an extraction with small shards and batches."""
    return [
        "extract", *BACKBONE, "--dataset", "imagefolder", "--data-dir", str(data_dir),
        "--out", str(out), "--shard-rows", "8", "--batch-size", "4", "--layers", "all", *more,
    ]  # fmt: skip


def run(*command, code=0):
    """Run a command in this process; its exit status has to be ``code``."""
    with pytest.raises(SystemExit) as stop:
        main([str(part) for part in command])
    assert (stop.value.code or 0) == code
    return stop


def run_json(capsys, *command, code=0):
    """Run a command with ``--json``; stdout has to be exactly one object."""
    capsys.readouterr()
    run(*command, "--json", code=code)
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


@contextlib.contextmanager
def started(command, **environment):
    """The command in a process of its own, which is gone when the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from epcache.cli.main import main; main()", *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    with process:  # closes the pipes and waits
        try:
            yield process
        finally:
            process.kill()


def files_of(store):
    """Every file of a store with its bytes."""
    return {
        path.relative_to(store).as_posix(): path.read_bytes()
        for path in sorted(Path(store).rglob("*"))
        if path.is_file()
    }


def assert_same_store(one, other):
    """Byte-identical trees, but for the folder's own name in the recorded command."""
    ours, theirs = files_of(one), files_of(other)
    assert ours.keys() == theirs.keys()
    for name, data in ours.items():
        if name == "zarr.json":
            left, right = root_without_command(data), root_without_command(theirs[name])
            assert left == right
        else:
            assert data == theirs[name], name


def root_without_command(data):
    """The root document but for the command, and the seal's hash that covers it."""
    attributes = json.loads(data)["attributes"]["epcache"]
    attributes["provenance"].pop("command")
    attributes["sealed"].pop("sha256")
    return attributes
