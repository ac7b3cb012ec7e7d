"""What this machine offers: memory to keep tokens in, and the type that multiplies fastest."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch

from epcache.errors import ConfigError

PRECISIONS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}
"""Types of the matrix products; half precision has too small a range for tokens times queries."""

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def pick_precision(name: str, device: str) -> str:
    """``auto`` is bfloat16 where the hardware multiplies it: on CUDA, and on CPUs with AMX.

    Elsewhere bfloat16 is emulated and slower than float32.

    Raises:
        ConfigError: There is no such precision.
    """
    if name == "auto":
        fast = device.startswith("cuda") or (device == "cpu" and has_amx())
        return "bfloat16" if fast else "float32"
    if name not in PRECISIONS:
        raise ConfigError(f"--precision {name}: expected auto or {' or '.join(PRECISIONS)}")
    return name


def has_amx() -> bool:
    """Whether this CPU has tile instructions for bfloat16."""
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


def describe_device(device: str) -> str:
    """``cpu (x86_64)`` or ``cuda (NVIDIA H100)``, for results."""
    cuda = device.startswith("cuda")
    return f"{device} ({torch.cuda.get_device_name(device) if cuda else platform.machine()})"


def parse_bytes(text: str) -> int:
    """``2GB``, ``512MiB`` or ``1000000``.

    Raises:
        ConfigError: It is no size.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not found or found[2].upper() not in UNITS:
        raise ConfigError(f"--memory-budget {text!r}: expected a size such as 2GB or 512MiB")
    return int(float(found[1]) * UNITS[found[2].upper()])


def default_budget(device: str) -> int:
    """Half of the memory that is free where tokens would be kept."""
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(device)
        return int(free // 2)
    return available_bytes() // 2


def available_bytes() -> int:
    """Memory that can be had without swapping; what a container allows, where it says so."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        sizes = dict(line.split(":", 1) for line in lines)
        available = int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8"))
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="utf-8"))
        return min(available, max(0, limit - used))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return available
