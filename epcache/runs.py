"""A run's folder: what was asked, how training went, and the trained probe.

runs/<run>/config.json          the probe with every choice resolved, and its row
runs/<run>/curve.json           per epoch: "select" (train_loss, val_top1, val_top5) and "final"
                                (train_loss, test_top1, test_top5); null for what did not happen
runs/<run>/best.safetensors     weights at the chosen epoch, last.safetensors: at the last
runs/<run>/final_norm.safetensors   the backbone's last norm, where the probe sees it
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from epcache.bank import State
from epcache.errors import ConfigError, WeightsError
from epcache.norm import FinalNorm
from epcache.poolers import make_pooler
from epcache.probe import Probe
from epcache.results import RUNS, Row, results_dir
from epcache.store.files import remove_partials, write_durably
from epcache.train import Outcome

Tokens = Tensor | Sequence[Tensor]
"""(B, N, D) of one layer, or of each of the layers that a probe averages."""

WEIGHTS = ("best", "last")
CONFIG, CURVE, NORM = "config.json", "curve.json", "final_norm.safetensors"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run leaves behind."""

    row: Row
    config: Mapping[str, Any]
    select: Outcome | None
    """On held-out data; None where an earlier run did it, or nothing was held out."""
    final: Outcome | None
    """Scored on the evaluation split; None for a probe that was not chosen."""
    norm: FinalNorm | None

    @property
    def states(self) -> dict[str, State]:
        """Weights by name: those of the last training that ended."""
        ended = self.final if self.final is not None and self.final.last_state else self.select
        assert ended is not None
        return {"best": ended.best_state, "last": ended.last_state}


class RunFiles:
    """One run's folder.

    Args:
        folder: Of all results.
        run: Its name.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self.path = folder / RUNS / run

    @property
    def are_whole(self) -> bool:
        """Whether everything was written: the config comes last."""
        return (self.path / CONFIG).is_file()

    def write(self, trained: Trained) -> None:
        """Write or replace all files, each whole or not at all."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name, state in trained.states.items():
            data = safetensors.torch.save({k: v.contiguous() for k, v in state.items()})
            self._write(f"{name}.safetensors", data)
        if trained.norm is not None:
            self._write(NORM, trained.norm.to_bytes())
        self._write_json(CURVE, {**self._curve(), **curve_json(trained)})
        self._write_json(CONFIG, {**trained.config, "row": trained.row.to_json()})

    def _curve(self) -> dict[str, Any]:
        """What an earlier run wrote."""
        return {"select": None, "final": None, **read_curve(self.path)}

    def _write_json(self, name: str, data: Mapping[str, Any]) -> None:
        self._write(name, (json.dumps(data, indent=1, allow_nan=False) + "\n").encode())

    def _write(self, name: str, data: bytes) -> None:
        write_durably(self.path / name, data, partial_dir=self.path)
        remove_partials(self.path / name)


def read_curve(run: Path) -> dict[str, Any]:
    """A run's curves by name, as ``curve_json`` wrote them; damaged ones are left out."""
    try:
        found = json.loads((run / CURVE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    curves = found if isinstance(found, dict) else {}
    return {name: curve for name, curve in curves.items() if isinstance(curve, dict)}


def curve_json(trained: Trained) -> dict[str, Any]:
    """Per epoch, for the trainings that took place and ended."""
    curves: dict[str, Any] = {}
    for name, outcome, judged in (
        ("select", trained.select, "val"),
        ("final", trained.final, "test"),
    ):
        if outcome is not None and outcome.problem is None:
            curves[name] = {
                "train_loss": outcome.train_loss,
                f"{judged}_top1": outcome.top1,
                f"{judged}_top5": outcome.top5,
            }
    return curves


class LiveProbe(nn.Module):
    """A trained probe for tokens as a backbone's block gives them.

    Args:
        probe: In evaluation mode.
        config: As ``config.json`` has it.
        norm: Applied to tokens first; None where the probe was trained on raw block output.
    """

    def __init__(self, probe: Probe, config: Mapping[str, Any], norm: FinalNorm | None) -> None:
        super().__init__()
        self.probe = probe
        self.config = config
        self.row = Row.from_json(config["row"])
        self.classes: tuple[str, ...] = tuple(config["classes"])
        self.norm = norm

    def prepare(self, tokens: Tokens, prefix: Tokens | None = None) -> Tensor:
        """Tokens as the pooler sees them: the right ones, with the final norm, in float32.

        Args:
            tokens: Patch tokens (B, N, D); a list of them, earliest layer first, for a probe on the
                average of layers. Without ``prefix``, and if the probe looks at [CLS], the tokens
                start with it.
            prefix: Prefix tokens (B, R, D), [CLS] first; a list like ``tokens``.

        Raises:
            ConfigError: The number of layers is not the probe's.
        """
        layers = self._layers("tokens", tokens)
        prefixes = [None] * len(layers) if prefix is None else self._layers("prefix", prefix)
        found = [self._prepare(*pair) for pair in zip(layers, prefixes, strict=True)]
        average = found[0] if len(found) == 1 else torch.stack(found).float().mean(0)
        return average.to(self.probe.head.weight.dtype)

    def _layers(self, name: str, given: Tokens) -> list[Tensor]:
        """One tensor for each layer that the probe looks at."""
        layers = [given] if isinstance(given, Tensor) else list(given)
        wanted = self.row.average_layers or 1
        if len(layers) != wanted:
            last = self.row.layer
            which = f"layer {last}" if wanted == 1 else f"layers {last - wanted + 1} to {last}"
            raise ConfigError(
                f"{name} of {len(layers)} layers: this probe looks at {wanted}, {which}; give "
                + ("one tensor" if wanted == 1 else f"a list of {wanted} tensors, in that order")
            )
        return layers

    def _prepare(self, tokens_BND: Tensor, prefix_BRD: Tensor | None) -> Tensor:
        wanted = self.row.tokens
        if wanted != "patch" and prefix_BRD is not None:
            tokens_BND = torch.cat([prefix_BRD[:, :1], tokens_BND], dim=1)
        if wanted == "cls":
            tokens_BND = tokens_BND[:, :1]
        return tokens_BND if self.norm is None else self.norm(tokens_BND)

    def forward(self, tokens: Tokens, prefix: Tokens | None = None) -> Tensor:
        """Class scores (B, C); arguments as for ``prepare``."""
        logits_BC: Tensor = self.probe(self.prepare(tokens, prefix))
        return logits_BC

    def attention(self, tokens: Tokens, prefix: Tokens | None = None) -> Tensor:
        """The pooler's attention maps (B, M, N); arguments as for ``prepare``."""
        return self.probe.pooler.attention(self.prepare(tokens, prefix))


def load_probe(
    run: str | Path, *, results_dir: Path | None = None, weights: str = "best"
) -> LiveProbe:
    """A run's trained probe, in evaluation mode on the CPU.

    Args:
        run: Its name, or its folder.
        results_dir: Where the results are; None is ``$EPCACHE_HOME/results``.
        weights: ``best``, at the chosen epoch, or ``last``.

    Raises:
        ConfigError: There is no such run.
        WeightsError: Its files are damaged.
    """
    if weights not in WEIGHTS:
        raise ConfigError(f"weights={weights!r}: expected one of {', '.join(WEIGHTS)}")
    path = find_run(run, results_dir)
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        state = safetensors.torch.load_file(path / f"{weights}.safetensors")
        probe = build_probe(config)
        probe.load_state_dict(state)
    except (
        OSError, KeyError, ValueError, TypeError, RuntimeError, safetensors.SafetensorError,
    ) as error:  # fmt: skip
        reason = str(error).strip().split("\n", 1)[0]
        raise WeightsError(
            f"run {path} is damaged ({reason}); train it anew: epcache probe --again ..."
        ) from error
    has_norm = config["row"]["norm"] == "final"
    norm = FinalNorm.load(path / NORM) if has_norm else None
    return LiveProbe(probe, config, norm).eval()


def find_run(run: str | Path, folder: Path | None = None) -> Path:
    """A run's folder by name or path.

    Raises:
        ConfigError: There is none.
    """
    runs = (default_results() if folder is None else folder) / RUNS
    for path in (runs / run, Path(run)):
        if (path / CONFIG).is_file():
            return path
    raise ConfigError(f"no run {run} in {runs}; the rows of epcache probe name the runs there are")


def build_probe(config: Mapping[str, Any]) -> Probe:
    """A probe of the right shapes; its values are to be replaced."""
    asked = config["probe"]
    sizes = {name: asked[name] for name in ("num_queries", "dim_out") if asked[name] is not None}
    unused = torch.Generator()  # leaves torch's global state alone
    pooler = make_pooler(
        asked["pooler"],
        dim=config["dim"],
        grid=(config["grid"][0], config["grid"][1]),
        generator=unused,
        **asked["options"],
        **sizes,
    )
    return Probe(pooler, len(config["classes"]), unused)


default_results = results_dir
"""``load_probe`` has an argument of that name."""
