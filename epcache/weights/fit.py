"""A checkpoint -> a backbone's parameters, with an account of what loaded, what did not, and why.

Files name their parameters in many ways. Each plausible reading (which nested state dict, which
prefix) is converted, and the one that fills most of the backbone is kept; then everything that
the backbone needs must be there, in its shape and finite.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from epcache.errors import WeightsError
from epcache.weights.checkpoint import State, read_checkpoint, state_dicts
from epcache.weights.repairs import repaired, resampled

Convert = Callable[[State, nn.Module], State]
"""timm's own filter of published formats: renames, fuses, resizes."""

HEADS = re.compile(
    r"^(head|head_dist|heads|fc|classifier|classif|last_linear|lm_head|linear_head|attn_pool|pooler)"
    r"(\.|$)"
)
UNUSED: tuple[tuple[re.Pattern[str], str], ...] = (
    (HEADS, "head after the tokens"),
    (re.compile(r"(^|\.)(mask_token|masked_embed)$"), "mask token of pre-training"),
    (re.compile(r"^decoder"), "decoder of pre-training"),
    (re.compile(r"^predictor"), "predictor of pre-training"),
    (
        re.compile(r"(dino|ibot)_?(head|loss)|projector|projection_head|^proj(\.|$)"),
        "projection head",
    ),
    (re.compile(r"^(cls_pt_layers|local_cls_norm)"), "layers used in pre-training only"),
    (
        re.compile(r"relative_position_index|attn_mask|bias_mask|periods|rope|freqs"),
        "recomputed by the backbone",
    ),
    (re.compile(r"num_batches_tracked$"), "not used in evaluation"),
)
BACKBONE_PARTS = {
    *("cls_token", "reg_token", "register_tokens", "storage_tokens", "pos_embed", "patch_embed"),
    *("blocks", "layers", "stages", "stem", "norm_pre", "rel_pos_bias"),
}
"""A name that starts like this and has no place in the backbone means another architecture."""

PREFERRED = {"teacher", "target_encoder", "model_ema", "ema", "base_encoder"}
AVOIDED = {"student", "predictor", "decoder", "momentum_encoder"}
"""Equal candidates inside one file: which network its authors evaluate."""


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What became of a weights file."""

    loaded: int
    """Tensors of the backbone that came from the file."""
    unused: tuple[tuple[str, str], ...] = ()
    """(name in the file, reason)."""
    resized: tuple[str, ...] = ()
    """What was changed to fit, such as ``pos_embed 1x1370x384 -> 1x257x384``."""
    missing: tuple[tuple[str, str], ...] = ()
    """(name in the backbone, why its absence does not matter)."""
    found_at: str = ""
    """Nesting and prefix under which the file has the backbone, such as ``teacher.backbone.``."""


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """One way to read a checkpoint, converted to the backbone's names."""

    found_at: str
    source: State
    left_out: tuple[str, ...]
    state: State
    notes: tuple[str, ...]
    matched: int
    problem: str = ""

    @property
    def rank(self) -> tuple[int, int]:
        parts = set(re.split(r"\.", self.found_at))
        return self.matched, bool(parts & PREFERRED) - bool(parts & AVOIDED)


def load_weights(
    model: nn.Module,
    path: Path,
    *,
    name: str,
    needed: Set[str],
    convert: Convert | None = None,
) -> LoadReport:
    """Fill a backbone from a file.

    Args:
        model: The backbone, at the size it will run at; changed in place.
        path: A safetensors or torch file.
        name: The backbone's name, for messages.
        needed: Names of the state that the file must have (:func:`needed_keys`).
        convert: timm's filter for the architecture, if it has one.

    Returns:
        What loaded, what did not, and why.

    Raises:
        WeightsError: If the file cannot be read or is not this backbone.
    """
    checkpoint = read_checkpoint(path)
    readings = [
        reading
        for where, state in state_dicts(checkpoint)
        for reading in _read(model, where, state, needed, convert)
    ]
    if not readings:
        raise WeightsError(f"{path} holds no named tensors; expected a state dict of {name}")
    best = max(readings, key=lambda reading: reading.rank)
    target = model.state_dict()
    missing = [key for key in sorted(needed) if key not in best.state]
    if missing:
        raise _incomplete(path, name, best, missing, len(needed))
    _check(path, name, {key: best.state[key] for key in sorted(needed)}, target)
    unused = _unused(path, name, best, target)
    usable = {
        key: _as(tensor, target[key])
        for key, tensor in best.state.items()
        if key in target and tensor.shape == target[key].shape
    }
    model.load_state_dict(usable, strict=False)
    return LoadReport(
        loaded=len(usable),
        unused=unused,
        resized=_resized(best, usable),
        missing=tuple((k, _why_absent(k)) for k in target if k not in usable),
        found_at=best.found_at,
    )


def needed_keys(model: nn.Module) -> set[str]:
    """Names of the state that decides tokens or final norm: all but heads and derived buffers."""
    names = {name for name, _ in model.named_parameters()}
    names |= {name for name in model.state_dict() if name.endswith(("running_mean", "running_var"))}
    return {name for name in names if name.startswith("head.norm.") or not HEADS.match(name)}


def digest_weights(model: nn.Module, needed: Set[str]) -> str:
    """Sha256 of what decides the tokens, whatever file it came from.

    Args:
        model: The backbone.
        needed: Names of the state that counts.

    Returns:
        64 hex digits over (name, dtype, shape, bytes) of the needed state in float32, by name.
    """
    digest = hashlib.sha256()
    state = model.state_dict()
    for key in sorted(needed):
        tensor = state[key].detach().to("cpu", torch.float32).contiguous()
        digest.update(f"{key} float32 {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


def _read(
    model: nn.Module, where: str, state: State, needed: Set[str], convert: Convert | None
) -> Iterable[_Reading]:
    """The state dict as it is, and under the prefix that most of the backbone's names have."""
    for prefix in dict.fromkeys(("", *_prefixes(state, model.state_dict().keys()))):
        inside = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        left_out = tuple(k for k in state if not k.startswith(prefix))
        converted, notes, problem = repaired(inside, model)
        if not problem:
            try:
                if convert is not None:
                    converted = convert(dict(converted), model)
                converted = resampled(converted, model)
            except Exception as error:  # foreign files make filters fail in any way
                problem = f"{type(error).__name__}: {error}"
        matched = sum(isinstance(converted.get(key), Tensor) for key in needed)
        found_at = ".".join(part for part in (where, prefix.rstrip(".")) if part)
        yield _Reading(
            found_at=f"{found_at}." if found_at else "",
            source=inside,
            left_out=left_out,
            state={k: v for k, v in converted.items() if isinstance(v, Tensor)},
            notes=notes,
            matched=matched,
            problem=problem,
        )


def _prefixes(state: State, model_keys: Iterable[str]) -> list[str]:
    """The prefixes that turn most names into the backbone's own; ties are all returned."""
    names, counts = set(model_keys), Counter[str]()
    for key in state:
        for dot in re.finditer(r"\.", key):
            if key[dot.end() :] in names:
                counts[key[: dot.end()]] += 1
    most = max(counts.values(), default=0)
    return [prefix for prefix, count in counts.items() if count == most]


def _incomplete(
    path: Path, name: str, best: _Reading, missing: list[str], total: int
) -> WeightsError:
    if best.problem:
        return WeightsError(f"{path} does not fit {name}: {best.problem}")
    shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
    start = next(iter(best.source), "nothing")
    return WeightsError(
        f"{path} lacks {len(missing)} of the {total} tensors of {name}: {shown} (its own names "
        f"start with {start}). Is it the checkpoint of this backbone?"
    )


def _check(path: Path, name: str, state: State, target: Mapping[str, Tensor]) -> None:
    """Refuse wrong shapes and values that are not numbers."""
    for key, tensor in state.items():
        if tensor.shape != target[key].shape:
            raise WeightsError(
                f"{key} in {path} has shape {tuple(tensor.shape)}, but {name} has "
                f"{tuple(target[key].shape)}. Is it the checkpoint of this backbone?"
            )
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise WeightsError(f"{key} in {path} holds NaN or infinity; the file is damaged")


def _unused(
    path: Path, name: str, best: _Reading, target: Mapping[str, Tensor]
) -> tuple[tuple[str, str], ...]:
    """What of the file has no place in the backbone, each with a reason."""
    taken = {tensor.data_ptr() for key, tensor in best.state.items() if key in target}
    unused = []
    for key, tensor in {**best.source, **best.state}.items():
        if key in target or (key not in best.state and tensor.data_ptr() in taken):
            continue  # in place, or in place under another name
        reason = _reason(key)
        if reason is None and key not in best.state:
            reason = "merged, resized or left out by timm's reading of this format"
        if reason is None and _is_backbone_part(key, target):
            raise WeightsError(
                f"{path} has {key}, which {name} does not have. Is it the checkpoint of this "
                f"backbone?"
            )
        unused.append((key, reason or "not part of this backbone"))
    return (*unused, *((key, _reason(key) or "beside the backbone") for key in best.left_out))


def _reason(key: str) -> str | None:
    return next((why for pattern, why in UNUSED if pattern.search(key)), None)


def _is_backbone_part(key: str, target: Mapping[str, Tensor]) -> bool:
    part = key.partition(".")[0]
    return part in BACKBONE_PARTS or any(name.startswith(f"{part}.") for name in target)


def _resized(best: _Reading, usable: State) -> tuple[str, ...]:
    changed = [
        f"{key} {_shape(best.source[key])} -> {_shape(tensor)}"
        for key, tensor in usable.items()
        if key in best.source and best.source[key].shape != tensor.shape
    ]
    return (*best.notes, *(note for note in changed if note not in best.notes))


def _why_absent(key: str) -> str:
    return "head after the tokens, never used" if HEADS.match(key) else "computed by the backbone"


def _as(tensor: Tensor, like: Tensor) -> Tensor:
    if like.is_floating_point() and not tensor.is_floating_point():
        raise WeightsError(
            f"the file holds a {tensor.dtype} tensor of shape {tuple(tensor.shape)} where the "
            f"backbone has {like.dtype}; expected floating values, not quantised or complex ones"
        )
    return tensor.to(like.dtype) if like.is_floating_point() else tensor


def _shape(tensor: Tensor) -> str:
    return "x".join(str(size) for size in tensor.shape)
