"""A weights file -> the state dicts that may be in it. Never unpickles code."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from epcache.errors import WeightsError

State = dict[str, Tensor]

MAX_DEPTH = 3
"""Published checkpoints nest two levels at most (teacher -> state_dict)."""


def existing(path: Path) -> Path:
    """The same path, if a file is there.

    Raises:
        WeightsError: If none is.
    """
    if path.is_dir():
        raise WeightsError(f"weights {path} is a folder; give a file in it")
    if not path.is_file():
        raise WeightsError(f"weights file {path} does not exist; check the path")
    return path


def read_checkpoint(path: Path) -> Any:
    """Everything in a safetensors or torch file, on the CPU.

    Raises:
        WeightsError: If the file is missing, is neither, or is a pickle that needs to run code.
    """
    path = existing(path.expanduser())
    if _is_safetensors(path):
        try:
            return safetensors.torch.load_file(path)
        except (safetensors.SafetensorError, OSError) as error:
            raise WeightsError(f"{path} is a damaged safetensors file: {error}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old pickle protocols; what matters is raised
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"{path} holds more than tensors ({_unsafe_name(error)}), and loading that could run "
            f"code; where you trust it, save its state dict alone as safetensors and pass that file"
        ) from error
    except Exception as error:  # of rubbish, torch's unpickler raises whatever it stumbles over
        reason = (str(error).strip().splitlines() or ["unreadable"])[0]
        raise WeightsError(
            f"{path} is neither a safetensors nor a torch file, or is damaged: {reason}"
        ) from error


def state_dicts(
    checkpoint: Any, where: str = "", depth: int = MAX_DEPTH
) -> Iterator[tuple[str, State]]:
    """Every mapping of names to tensors in a checkpoint, outermost first.

    Yields:
        Where it is (``teacher.model``; empty for the outermost) and its tensors by name.
    """
    if not isinstance(checkpoint, Mapping) or depth == 0:
        return
    tensors = {k: v for k, v in checkpoint.items() if isinstance(k, str) and isinstance(v, Tensor)}
    for key, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_meta:
            raise WeightsError(
                f"the file holds a sparse or empty tensor, {key} of shape {tuple(tensor.shape)}; "
                f"expected dense values"
            )
    if tensors:
        yield where, tensors
    for key, value in checkpoint.items():
        if isinstance(value, Mapping):
            yield from state_dicts(value, f"{where}.{key}".lstrip("."), depth - 1)


def _is_safetensors(path: Path) -> bool:
    """By name or by content: 8 bytes of header length, then JSON."""
    with path.open("rb") as file:
        return path.suffix == ".safetensors" or file.read(9)[8:] == b"{"


def _unsafe_name(error: Exception) -> str:
    """The global that torch refused to load, out of its page-long message."""
    words = str(error).split("GLOBAL ", 1)
    return words[1].split()[0] if len(words) == 2 else "a pickle"
