"""Which layers a probe looks at when it looks at the average of several."""

from __future__ import annotations

from epcache.errors import ConfigError
from epcache.store.reader import Store, format_ranges


def averaged_layers(store: Store, layer: int, number: int) -> tuple[int, ...]:
    """The layers whose tokens are averaged: ``number`` of them, the last of them ``layer``.

    Raises:
        ConfigError: The store lacks one, or their tokens do not lie on one grid.
    """
    last = store.resolve_layer(layer)
    layers = tuple(range(last - number + 1, last + 1))
    if layers[0] < 0:
        raise ConfigError(
            f"average_layers={number}: there are {last + 1} layers up to layer {last}; average "
            f"{last + 1} or fewer"
        )
    missing = [one for one in layers if one not in store.spec.layers]
    if missing:
        raise ConfigError(
            f"average_layers={number}: layer {missing[0]} of {layers[0]} to {last} is not in store "
            f"{store.path} (has {format_ranges(store.layers)}); average fewer layers"
        )
    for one in layers:
        if store.spec.layers[one] != store.spec.layers[last]:
            raise ConfigError(
                f"average_layers={number}: tokens of layer {one} have another shape than those of "
                f"layer {last} in store {store.path}; average fewer layers"
            )
    return layers
