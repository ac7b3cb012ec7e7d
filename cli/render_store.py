"""What a person sees of extractions and stores; see ``render.py`` for the parts."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TextColumn

from epcache.cli.render import (
    PLAIN_SECONDS,
    LiveView,
    duration,
    error,
    facts,
    next_step,
    note,
    screen,
    table,
)
from epcache.store.files import format_bytes
from epcache.store.reader import format_ranges

if TYPE_CHECKING:
    from epcache.extraction import Progress as ExtractProgress
    from epcache.plan import ExtractPlan
    from epcache.store.verify import Verification
    from epcache.weights.fit import LoadReport


def views(number: int) -> str:
    """`` x 3 views``, or nothing for one."""
    return f" x {number} views" if number > 1 else ""


def quarantined(number: int | None) -> str:
    """`` (2 quarantined)``, or nothing for none."""
    return f" ({number} quarantined)" if number else ""


class ExtractView(LiveView):
    """Shows an extraction: the plan, then how far it is."""

    _total = 0

    def plan(self, plan: ExtractPlan, committed: int) -> None:
        """What is about to happen."""
        facts(plan_facts(plan, committed), stderr=True)

    def start(self, num_images: int) -> None:
        """The loop begins; this many images are left to do."""
        self._total = num_images
        self._started = self._shown = time.monotonic()
        if self._terminal:
            self._bar = Progress(
                TextColumn("extracting"),
                BarColumn(bar_width=None),
                TextColumn("{task.completed}/{task.total} images"),
                TextColumn("{task.fields[rate]}"),
                console=screen(stderr=True),
                expand=True,
                refresh_per_second=4,
            )
            self._bar.add_task("", total=num_images, rate="")
            self._bar.start()

    def progress(self, progress: ExtractProgress) -> None:
        """A batch is through."""
        now = time.monotonic()
        rate = progress.num_images / max(now - self._started, 1e-9)
        left = (self._total - progress.num_images) / max(rate, 1e-9)
        text = f"{rate:.1f} images/s  {format_bytes(progress.num_bytes)}  {duration(left)} left"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=progress.num_images, rate=text)
        elif now - self._shown >= PLAIN_SECONDS:
            self._shown = now
            self.message(f"{progress.num_images}/{self._total} images  {text}")


def plan_facts(plan: ExtractPlan, committed: int) -> list[tuple[str, str]]:
    """What an extraction is about to do."""
    backbone, spec, manifest = plan.backbone, plan.spec, plan.manifest
    shape = spec.layers[max(spec.layers)]
    prefix = {0: "no prefix token", 1: "1 prefix token"}.get(
        shape.num_prefix, f"{shape.num_prefix} prefix tokens"
    )
    own_name = backbone.timm_name in (None, backbone.name)
    rows = ", ".join(
        f"{name} {split.num_rows:,}{views(split.num_views)}" for name, split in spec.splits.items()
    )
    facts = [
        ("backbone", backbone.name + ("" if own_name else f" ({backbone.timm_name})")),
        ("weights", f"{backbone.weights}, sha256 {backbone.weights_digest[:8]}"),
        *(("", line) for line in load_lines(backbone.load_report)),
        (
            "input",
            f"{backbone.image_size} px, centre crop {backbone.crop_pct:.3g}, "
            f"{backbone.interpolation}",
        ),
        (
            "tokens",
            f"{shape.grid[0]} x {shape.grid[1]} = {shape.num_patches} patch tokens of width "
            f"{shape.dim}, {prefix}",
        ),
        (
            "layers",
            f"{format_ranges(tuple(spec.layers))} of {spec.num_layers} blocks, raw output; "
            f"--norm auto will mean {backbone.norm_policy}",
        ),
        ("data", f"{manifest.name}: {rows} images, {len(manifest.classes):,} classes"),
        ("run", f"{plan.device}, {plan.precision}, batches of {plan.batch_size}{share_of(plan)}"),
        (
            "store",
            f"{plan.store_path}: {format_bytes(spec.num_bytes)} of float16"
            + (" before compression" if spec.geometry.compress else "")
            + f", {spec.geometry.shard_rows} images a shard",
        ),
    ]
    if committed:
        facts.append(("", f"{format_bytes(committed)} are committed already; going on from there"))
    return facts


def share_of(plan: ExtractPlan) -> str:
    """``, rank 0 of 4``, or nothing for a run of its own."""
    config = plan.config
    return f", rank {config.rank} of {config.world_size}" if config.world_size > 1 else ""


def load_lines(report: LoadReport) -> list[str]:
    """What loaded, what did not, and why; reasons that repeat are told once."""
    lines = [
        f"{report.loaded} tensors loaded" + (f" from {report.found_at}" if report.found_at else "")
    ]
    lines += [f"fitted: {change}" for change in report.resized]
    for title, found in (("unused", report.unused), ("missing", report.missing)):
        by_reason: dict[str, list[str]] = {}
        for name, reason in found:
            by_reason.setdefault(reason, []).append(name)
        for reason, names in by_reason.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"{title}: {', '.join(names[:3])}{more} ({reason})")
    return lines


def estimate(result: Mapping[str, Any], command: str) -> None:
    """The end of a dry run."""
    facts(
        [
            ("free", f"{format_bytes(result['free_bytes'])} for {format_bytes(result['bytes'])}"),
            (
                "time",
                f"about {duration(result['seconds'])} at {result['images_per_second']:.1f} "
                f"images/s (one timed batch)",
            ),
        ]
    )
    fits = "fits" if result["fits"] else "does NOT fit"
    next_step(f"dry run: nothing was written; the store {fits}", command)


def extracted(result: Mapping[str, Any]) -> None:
    """The end of an extraction."""
    if not result["sealed"]:
        next_step(
            f"this rank is done; {result['store']} is sealed by the rank that finishes last",
            f"epcache info {shlex.quote(result['store'])}",
        )
        return
    splits = ", ".join(
        f"{name} {split['num_images']:,}{quarantined(split['quarantined'])}"
        for name, split in result["splits"].items()
    )
    if result["images_per_second"]:
        note(f"{result['images_per_second']:.1f} images/s, {duration(result['seconds'])} in all")
    next_step(
        f"sealed {result['store']} ({splits}; {format_bytes(result['bytes'])})",
        f"epcache verify {shlex.quote(result['store'])}",
    )


def info(result: Mapping[str, Any]) -> None:
    """What is in a store."""
    provenance, tokens = result["provenance"], result["tokens"]
    backbone, dataset = provenance["backbone"], provenance["dataset"]
    splits = ", ".join(
        f"{name} {split['num_images']:,}{views(split['num_views'])}"
        f"{quarantined(split['quarantined'])}"
        for name, split in result["splits"].items()
    )
    tasks = result["tasks"]
    unfinished = f"no: {tasks['committed']} of {tasks['all']} tasks are committed"
    state = "yes" if result["sealed"] else unfinished
    facts(
        [
            ("store", result["store"]),
            ("digest", result["digest"]),
            ("sealed", state),
            ("backbone", f"{backbone['name']}, weights {backbone['weights']}"),
            ("weights", f"sha256 {backbone['weights_digest']}"),
            ("data", f"{dataset['name']}: {splits}; {len(dataset['classes']):,} classes"),
            (
                "tokens",
                f"{tokens['grid'][0]} x {tokens['grid'][1]} patches + {tokens['num_prefix']} "
                f"prefix, width {tokens['dim']}, float16",
            ),
            ("layers", f"{format_ranges(result['layers'])} of {backbone['num_layers']} blocks"),
            ("norm", f"raw block output is stored; --norm auto means {backbone['norm_policy']}"),
            ("size", format_bytes(result["bytes"])),
            ("made by", f"epcache {provenance['epcache_version']}: {provenance['command']}"),
            ("on", ", ".join(f"{k} {v}" for k, v in provenance["environment"].items())),
        ]
    )
    if not result["sealed"]:
        next_step("not finished", provenance["command"])


def verified(path: Path, found: Verification) -> None:
    """The verdict on a store."""
    if found.ok:
        next_step(
            f"{path} is whole: {found.shards_checked} shards and all small files are what was "
            f"committed",
            f"epcache info {shlex.quote(str(path))}",
        )
        return
    table(["file", "problem"], [(p.file, p.problem) for p in found.problems])
    if all(problem.problem.startswith("not sealed") for problem in found.problems):
        error(
            f"{path} is not finished; what is committed is whole ({found.shards_checked} shards). "
            f"Run the extraction's command again (epcache info shows it)"
        )
        return
    error(
        f"{path}: {len(found.problems)} problems in {found.shards_checked} shards and the small "
        f"files. Restore these files from a copy; or delete the shards among them and run the "
        f"extraction's command again (epcache info shows it): it computes only those"
    )
