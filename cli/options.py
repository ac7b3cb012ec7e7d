"""Options that several commands share, and how their text becomes values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, nothing else.")
]

StorePaths = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="STORE", help="Stores. [default: the one sealed last]", show_default=False
    ),
]
NumQueries = Annotated[
    list[str] | None, typer.Option("--M", "--num-queries", help="Queries. [default: 32 of ep]")
]
Layer = Annotated[int, typer.Option(help="Block index; -1 is the last.")]
AverageLayers = Annotated[
    int, typer.Option(help="Average the tokens of so many layers, the last of them --layer.")
]
Tokens = Annotated[str, typer.Option(help="patch, all ([CLS] in front of them), or cls.")]
Norm = Annotated[
    str, typer.Option(help="final, none, or auto: what the backbone's published protocol does.")
]
Lr = Annotated[
    list[str] | None, typer.Option(help="Learning rates to try. [default: the recipe's grid]")
]
WeightDecay = Annotated[
    list[str] | None, typer.Option(help="Weight decays to try. [default: the recipe's]")
]
Recipe = Annotated[
    str, typer.Option(help="small: AdamW and a grid of rates. paper: LARS, batch 4096.")
]
Optimizer = Annotated[
    str | None, typer.Option(help="lars, sgd, adamw; needs --lr. [default: the recipe's]")
]
Epochs = Annotated[int | None, typer.Option(help="[default: the recipe's]")]
BatchSize = Annotated[int | None, typer.Option(help="[default: the recipe's]")]
Shots = Annotated[int | None, typer.Option(help="Training images a class.")]
Share = Annotated[
    str | None, typer.Option(help="Share of each class of train, such as 1%; at least one image.")
]
MemoryBudget = Annotated[
    str | None,
    typer.Option(help="Tokens kept in memory, such as 2GB. [default: half of what is free]"),
]
Precision = Annotated[
    str, typer.Option(help="float32, bfloat16. [auto: bfloat16 where the hardware has it]")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Again = Annotated[bool, typer.Option("--again", help="Train also what has a result already.")]
N = TypeVar("N", int, float)


def comma_list(values: Sequence[str] | None) -> tuple[str, ...]:
    """``["a,b", "c"]`` -> ``("a", "b", "c")``: repeats or commas, as the user likes."""
    parts = [part.strip() for value in values or () for part in value.split(",")]
    return tuple(part for part in parts if part)


def some(values: tuple[str, ...], given: Sequence[str] | None, option: str) -> tuple[str, ...]:
    """The list, unless the option was given and names nothing (an unset shell variable, say).

    Raises:
        typer.BadParameter: It names nothing.
    """
    if given and not values:
        raise typer.BadParameter(f"{option} is given and names nothing")
    return values


def share(text: str) -> float:
    """``1%`` or ``0.01``.

    Raises:
        typer.BadParameter: It is neither.
    """
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a share such as 0.01 nor 1%") from None


def numbers(values: Sequence[str] | None, kind: Callable[[str], N], option: str) -> tuple[N, ...]:
    """Numbers given by repeats or commas.

    Raises:
        typer.BadParameter: One of them is none.
    """
    try:
        return tuple(kind(value) for value in comma_list(values))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise typer.BadParameter(f"{option} {','.join(values or ())}: expected {what}") from None


def running(memory_budget: str | None, device: str, precision: str, again: bool) -> dict[str, Any]:
    """How probes are run; nothing of it changes a result."""
    from epcache.hardware import parse_bytes

    budget = None if memory_budget is None else parse_bytes(memory_budget)
    return {
        "memory_budget": budget, "device": device, "precision": precision, "again": again,
    }  # fmt: skip


def share_of(text: str | None) -> float | None:
    """A share, if one was given."""
    return None if text is None else share(text)


def print_json(data: Mapping[str, Any]) -> None:
    """Exactly one object on stdout."""
    print(json.dumps(data, allow_nan=False), flush=True)
