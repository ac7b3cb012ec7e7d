"""Hypothesis strategies: specs of stores, and keys to index their arrays with."""

from __future__ import annotations

import string

import numpy as np
from hypothesis import strategies as st

from epcache.store.spec import Geometry, LayerShape, SplitSpec, StoreSpec

JSON_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)

JSON_VALUES = st.recursive(
    JSON_LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)

SPLIT_NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=4)


@st.composite
def layer_shapes(draw: st.DrawFn, *, most: int = 5) -> LayerShape:
    """A small token grid, with or without prefix tokens."""
    grid = (draw(st.integers(1, most)), draw(st.integers(1, most)))
    return LayerShape(
        grid=grid,
        num_patches=grid[0] * grid[1],
        num_prefix=draw(st.integers(0, 3)),
        dim=draw(st.integers(1, 2 * most)),
    )


@st.composite
def store_specs(
    draw: st.DrawFn, *, most_rows: int = 30, compress: st.SearchStrategy[bool] | None = None
) -> StoreSpec:
    """Any store that is small enough to write."""
    num_layers = draw(st.integers(1, 4))
    stored = draw(st.sets(st.integers(0, num_layers - 1), min_size=1))
    names = draw(st.lists(SPLIT_NAMES, min_size=1, max_size=2, unique=True))
    return StoreSpec(
        identity=draw(st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=3)),
        layers={layer: draw(layer_shapes()) for layer in sorted(stored)},
        num_layers=num_layers,
        splits={
            name: SplitSpec(
                num_rows=draw(st.integers(1, most_rows)), num_views=draw(st.integers(1, 2))
            )
            for name in names
        },
        geometry=Geometry(
            shard_rows=draw(st.integers(1, 12)),
            compress=draw(st.booleans() if compress is None else compress),
        ),
    )


def slices(size: int) -> st.SearchStrategy[slice]:
    """Slices with steps of either sign and ends outside the axis."""
    end = st.none() | st.integers(-size - 2, size + 2)
    return st.builds(slice, end, end, st.none() | st.sampled_from([1, 2, 3, -1, -2]))


def row_keys(size: int) -> st.SearchStrategy[object]:
    """What may index the rows of an array with ``size`` rows."""
    number = st.integers(-size, size - 1)
    numbers = st.lists(number, max_size=8)
    return (
        number
        | slices(size)
        | numbers
        | numbers.map(lambda values: np.array(values, np.int32))
        | st.lists(st.booleans(), min_size=size, max_size=size).map(np.array)
        | st.just(...)
    )


@st.composite
def array_keys(draw: st.DrawFn, shape: tuple[int, int, int]) -> object:
    """A key for the rows, or a tuple of keys for rows, tokens and width."""
    first = draw(row_keys(shape[0]))
    if first is ... or draw(st.booleans()):
        return first
    rest = [
        draw(st.integers(-size, size - 1) | slices(size)) for size in shape[1 : draw(SHORTER) + 1]
    ]
    return (first, *rest)


SHORTER = st.integers(0, 2)
