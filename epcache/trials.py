"""The probes of one stream with everything decided, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from epcache.averaging import averaged_layers
from epcache.bank import Trainee
from epcache.errors import ConfigError
from epcache.pooled import choose_norm
from epcache.poolers import POOLERS, make_pooler, pooler_options
from epcache.recipes import ResolvedRecipe, resolve
from epcache.results import run_name
from epcache.store.reader import Store
from epcache.stream import TokenKind
from epcache.subset import choose_rows
from epcache.train import Schedule

if TYPE_CHECKING:
    from epcache.probing import ProbeConfig


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where and how the arithmetic is done."""

    device: str
    precision: str
    budget_bytes: int


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A probe with everything decided."""

    config: ProbeConfig
    run: str
    """Name, from everything that decides its numbers."""
    num_params: int
    """Trainable ones, the classifier's included."""
    num_queries: int | None
    dim_out: int

    @property
    def trainee(self) -> Trainee:
        """As a bank takes it."""
        config = self.config
        assert config.optimizer is not None
        assert config.lr is not None
        assert config.weight_decay is not None
        return Trainee(
            pooler=config.pooler,
            options=config.pooler_options,
            seed=config.seed,
            optimizer=config.optimizer,
            lr=config.lr,
            weight_decay=config.weight_decay,
        )

    @property
    def family(self) -> str:
        """Equal for probes that differ in nothing but what is selected."""
        return run_name({**self.config.to_json(), "lr": None, "weight_decay": None})

    @property
    def source_kind(self) -> tuple[TokenKind, bool]:
        """Tokens that it looks at, and whether they are pooled once."""
        return self.config.tokens, self.config.is_free


class GroupPlan:
    """What the configs of one stream mean on one store.

    Args:
        store: Sealed.
        configs: Of one stream.
        precision: Of the matrix products.
        say: Told what the user should know.

    Raises:
        ConfigError: A config does not fit the store.
    """

    def __init__(
        self,
        store: Store,
        configs: Sequence[ProbeConfig],
        *,
        precision: str,
        say: Callable[[str], None],
    ) -> None:
        self.store, self.precision = store, precision
        first = configs[0]
        dataset = store.provenance["dataset"]
        self.classes: tuple[str, ...] = tuple(dataset["classes"])
        self.train_split, self.eval_split = dataset["train_split"], dataset["eval_split"]
        self.order_seed = first.order_seed
        self.average_layers = first.average_layers
        self.layer = averaged_layers(store, first.layer, first.average_layers)[-1]
        self.shape = store.spec.layers[self.layer]
        self._first = replace(first, layer=self.layer)
        self.norm_name, self.norm = choose_norm(store, first.norm)
        self.num_views = self._views(first.views)
        self.subset = choose_rows(
            store[self.train_split],
            shots=first.shots,
            share=first.share,
            seed=first.order_seed,
            holdout=first.holdout,
        )
        for note in self.subset.notes:
            say(note)
        self.rows = self.subset.rows
        """Of the training split: what the chosen probe is trained on."""
        self.held_out = (self.subset.learn, self.subset.held) if first.holdout else None
        """Rows to train on and to choose by; None where nothing is chosen."""
        recipes = [resolve_recipe(config, len(self.rows)) for config in configs]
        self.batch_size = recipes[0].batch_size
        self.schedule = Schedule(
            epochs=recipes[0].epochs,
            warmup_epochs=recipes[0].warmup_epochs,
            drop_last=recipes[0].drop_last,
            label_smoothing=recipes[0].label_smoothing,
        )
        self.trials = self._make_trials(configs, recipes)

    @property
    def title(self) -> str:
        """``layer 11, 4 shots, patch tokens``, for messages."""
        return f"{self._first.tokens_title}, {self._first.tokens} tokens"

    def _views(self, asked: int | None) -> int:
        has = self.store[self.train_split].num_views
        if asked is not None and asked > has:
            raise ConfigError(
                f"views={asked}: store {self.store.path} has {has}. Run: epcache extract "
                f"--views {asked} ..."
            )
        return asked or has

    def _make_trials(
        self, configs: Sequence[ProbeConfig], recipes: Sequence[ResolvedRecipe]
    ) -> list[Trial]:
        trials: dict[str, Trial] = {}
        for config, recipe in zip(configs, recipes, strict=True):
            decided = replace(
                config,
                layer=self.layer,
                norm=self.norm_name,
                views=self.num_views,
                tokens="cls" if config.pooler == "cls" else config.tokens,
            )
            for one in decided.expand(recipe):
                trial = self._make_trial(one)
                trials.setdefault(trial.run, trial)
        return list(trials.values())

    def _make_trial(self, config: ProbeConfig) -> Trial:
        if POOLERS[config.pooler].needs_grid and config.tokens != "patch":
            raise ConfigError(
                f"pooler {config.pooler} needs the grid of patch tokens and got tokens="
                f"{config.tokens}; use patch"
            )
        options = config.pooler_options
        with torch.device("meta"):
            pooler = make_pooler(config.pooler, dim=self.shape.dim, grid=self.shape.grid, **options)
        own = sum(p.numel() for p in pooler.parameters() if p.requires_grad)
        identity = {
            "command": "probe",
            "digest": self.store.digest,
            "precision": "float32" if config.is_free else self.precision,
            **config.to_json(),
        }
        if self.subset.is_outside:
            identity["chosen_by"] = "training images outside the subset"
        return Trial(
            config=config,
            run=run_name(identity),
            num_params=own + (pooler.dim_out + 1) * len(self.classes),
            num_queries={**pooler_options(config.pooler), **options}.get("num_queries"),
            dim_out=pooler.dim_out,
        )

    def config_json(self, trial: Trial) -> dict[str, Any]:
        """Everything needed to repeat the run and to build its probe."""
        return {
            "store": str(self.store.path.resolve()),
            "digest": self.store.digest,
            "probe": trial.config.to_json(),
            "precision": self.precision,
            "dim": self.shape.dim,
            "grid": list(self.shape.grid),
            "num_prefix": self.shape.num_prefix,
            "classes": list(self.classes),
            "train_split": self.train_split,
            "eval_split": self.eval_split,
        }


def resolve_recipe(config: ProbeConfig, num_rows: int) -> ResolvedRecipe:
    """The recipe in numbers, with the config's own in place."""
    return resolve(
        config.recipe,
        num_rows,
        optimizer=config.optimizer,
        epochs=config.epochs,
        warmup_epochs=config.warmup_epochs,
        batch_size=config.batch_size,
        lrs=None if config.lr is None else (config.lr,),
        weight_decays=None if config.weight_decay is None else (config.weight_decay,),
        label_smoothing=config.label_smoothing,
    )


def describe(trial: Trial) -> str:
    """``ep M=32, lr 0.01``, for messages."""
    queries = "" if trial.num_queries is None else f" M={trial.num_queries}"
    return f"{trial.config.pooler}{queries}, lr {trial.config.lr:g}, seed {trial.config.seed}"
