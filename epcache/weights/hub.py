"""Published weights of a timm model -> a file on this machine, or one clear line why not."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from epcache.errors import WeightsError

PROBE_SECONDS = 5.0
"""The hub client retries for minutes where nothing answers; one short question comes first."""


def fetch_weights(name: str, pretrained_cfg: Any) -> Path:
    """Find or download the weights file of a timm model.

    Args:
        name: What the user asked for, for messages.
        pretrained_cfg: timm's ``PretrainedCfg`` of the model.

    Returns:
        The file, in the cache of its source.

    Raises:
        WeightsError: If there are none, or they cannot be had (offline, no network, gated).
    """
    if pretrained_cfg is None or not pretrained_cfg.has_weights:
        raise WeightsError(
            f"timm has no weights for {name}; give a file with --weights FILE, or --weights random "
            f"for an untrained one"
        )
    if pretrained_cfg.custom_load and not pretrained_cfg.hf_hub_id:
        raise WeightsError(f"weights of {name} are in a format of their own; pass --weights FILE")
    if pretrained_cfg.hf_hub_id:
        return _from_hub(name, pretrained_cfg.hf_hub_id, pretrained_cfg.hf_hub_filename)
    return _from_url(name, pretrained_cfg.url)


def _from_hub(name: str, hub_id: str, filename: str | None) -> Path:
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    repo, _, revision = hub_id.partition("@")
    filenames = [filename] if filename else ["model.safetensors", "pytorch_model.bin"]
    where = f"{repo}/{filenames[0]} on the Hugging Face hub"
    for candidate in filenames:
        cached = try_to_load_from_cache(repo, candidate, revision=revision or None)
        if isinstance(cached, str):
            return Path(cached)
    if _offline():
        raise _cannot_have(name, where, "HF_HUB_OFFLINE is set and it is not in the cache")
    _probe(name, where, constants.ENDPOINT)
    for candidate in filenames:
        try:
            return Path(
                hf_hub_download(repo, candidate, revision=revision or None, etag_timeout=10)
            )
        except LocalEntryNotFoundError as error:
            raise _cannot_have(name, where, "the hub does not answer") from error
        except EntryNotFoundError:
            continue
        except GatedRepoError as error:
            reason = "it is gated: accept its licence on its page and run `hf auth login`"
            raise _cannot_have(name, where, reason) from error
        except RepositoryNotFoundError as error:
            reason = "there is no such repository, or it is private"
            raise _cannot_have(name, where, reason) from error
        except (HfHubHTTPError, OSError) as error:
            raise _cannot_have(name, where, _first_line(error)) from error
    raise _cannot_have(name, where, f"the repository has none of {', '.join(filenames)}")


def _from_url(name: str, url: str) -> Path:
    from timm.models import _hub as timm_hub

    path = Path(timm_hub.get_cache_dir()) / Path(url).name
    if path.exists():
        return path
    if _offline():
        raise _cannot_have(name, url, f"HF_HUB_OFFLINE is set and {path} does not exist")
    _probe(name, url, url)
    try:
        return Path(timm_hub.download_cached_file(url, check_hash=True, progress=False))
    except (OSError, RuntimeError) as error:
        raise _cannot_have(name, url, _first_line(error)) from error


def _offline() -> bool:
    from huggingface_hub import constants

    value = os.environ.get("HF_HUB_OFFLINE", "").upper()
    return bool(constants.HF_HUB_OFFLINE) or value in {"1", "ON", "YES", "TRUE"}


def _probe(name: str, where: str, url: str) -> None:
    request = urllib.request.Request(url, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=PROBE_SECONDS).close()
    except urllib.error.HTTPError as error:
        error.close()  # it answers; what it answers is the download's business
    except (OSError, ValueError) as error:
        raise _cannot_have(name, where, f"no connection ({_first_line(error)})") from error


def _cannot_have(name: str, where: str, reason: str) -> WeightsError:
    return WeightsError(
        f"cannot get the weights of {name}: looked for {where}, but {reason}. Fetch that file on a "
        f"connected machine and pass it with --weights FILE"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
