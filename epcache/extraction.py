"""The loop of stage one: images through the backbone once, tokens into the store.

    decode threads -> forward (this thread) -> bounded queue -> writer thread -> commit thread

Each arrow is bounded, so peak memory depends on the batch and the layers, never on the number of
images; and the disk works while the backbone does.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from epcache.dataset import Batch, BatchPlan, ImageLoader
from epcache.errors import DataError, NumericError
from epcache.store.journal import Entry, Quarantined
from epcache.store.spec import ShardTask
from epcache.store.writer import StoreWriter, TaskWriter

if TYPE_CHECKING:
    from epcache.backbone import Backbone
    from epcache.manifest import Split

QUEUED_BATCHES = 2
FLOAT16_MAX = 65504.0

HalfTokens = Mapping[tuple[int, str], NDArray[np.float16]]
"""Tokens (B, N, D) by (layer, "patch" or "prefix")."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is."""

    num_images: int
    """Rows through the backbone in this run (a view counts as a row)."""
    num_bytes: int
    """Bytes of tokens handed to the disk in this run."""


def extract_tokens(
    backbone: Backbone,
    splits: Mapping[str, Split],
    orders: Mapping[str, NDArray[np.int64]],
    store: StoreWriter,
    loader: ImageLoader,
    *,
    batch_size: int,
    precision: str,
    max_bad: float,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """Compute and commit every task of this process that is not committed yet.

    Args:
        backbone: Frozen, on its device.
        splits: The manifest's splits by name.
        orders: For each split the position in the manifest of every stored row.
        store: Open for writing, begun.
        loader: Decodes images.
        batch_size: Rows a forward pass; a batch never crosses a shard.
        precision: float32, or the autocast type: bfloat16, float16.
        max_bad: Largest share of a split's rows that may be undecodable.
        progress: Called after every batch.

    Raises:
        DataError: More than ``max_bad`` of a split is undecodable, or a file cannot be read.
        NumericError: Tokens are not finite or do not fit float16, even in float32.
        SpaceError: The disk is full. What was committed stays.
    """
    watch = BadImageWatch(store, splits, orders, max_bad)
    steps = list(plan_steps(store.tasks(), batch_size))
    plans = (
        BatchPlan(
            split=splits[step.task.split],
            indices=orders[step.task.split][step.rows[0] : step.rows[1]].tolist(),
            view=step.task.view,
        )
        for step in steps
    )
    layers = tuple(store.spec.layers)
    num_images = num_bytes = 0
    with TokenSink(store) as sink:
        for step, batch in zip(steps, loader.load(plans), strict=True):
            quarantined = watch.see(step, batch)
            tokens = half_tokens(backbone, batch, layers, precision)
            sink.put(step, tokens, batch.sizes, quarantined)
            num_images += len(batch.images)
            num_bytes += sum(values.nbytes for values in tokens.values())
            progress(Progress(num_images=num_images, num_bytes=num_bytes))


@dataclass(frozen=True, kw_only=True)
class Step:
    """One forward pass: rows of a task, and whether they are its last."""

    task: ShardTask
    rows: tuple[int, int]
    last: bool


def plan_steps(tasks: Sequence[ShardTask], batch_size: int) -> Iterator[Step]:
    """Cut tasks into batches; the same batches on every run, so the same bytes."""
    for task in tasks:
        for start in range(*task.rows, batch_size):
            stop = min(start + batch_size, task.rows[1])
            yield Step(task=task, rows=(start, stop), last=stop == task.rows[1])


def half_tokens(
    backbone: Backbone, batch: Batch, layers: Sequence[int], precision: str
) -> HalfTokens:
    """Raw block outputs as float16, each value checked; undecodable rows are zeros.

    Autocast may overflow where float32 does not, so such a batch is run again in float32.

    Raises:
        NumericError: Names the layer and its largest value.
    """
    images = torch.from_numpy(batch.images)
    bad = sorted(batch.bad)
    for attempt in dict.fromkeys((precision, "float32")):
        tokens = {
            (layer, kind): values
            for layer, output in backbone.tokens(images, layers, attempt).items()
            for kind, values in (("patch", output.patch), ("prefix", output.prefix))
            if values.shape[1]
        }
        halves = {}
        for key, values in tokens.items():
            halves[key] = values.to(torch.float16)
            halves[key][bad] = 0
        low, high = extremes(list(halves.values()))
        if low.isfinite().all() and high.isfinite().all():
            if len(bad) < len(batch.images):
                refuse_zeros(halves, tokens, (low == high) & (high == 0))
            return {key: half.cpu().numpy() for key, half in halves.items()}
    raise overflow_error(tokens, bad)


def extremes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Smallest and largest value of each (2, n), NaN and infinity kept; one wait for the device."""
    return torch.stack([torch.stack(torch.aminmax(tensor)) for tensor in tensors], dim=1).cpu()


def refuse_zeros(
    halves: Mapping[tuple[int, str], torch.Tensor],
    tokens: Mapping[tuple[int, str], torch.Tensor],
    empty: torch.Tensor,
) -> None:
    """A layer that is zero for a whole batch says nothing, or was too small for float16.

    Raises:
        NumericError: Names the layer.
    """
    for (layer, kind), is_empty in zip(halves, empty.tolist(), strict=True):
        if is_empty:
            largest = tokens[layer, kind].abs().max().item()
            raise NumericError(
                f"layer {layer} ({kind} tokens) is zero for a whole batch in float16 (largest "
                f"value before: {largest:.3g}); check the weights, or leave it out: --layers"
            )


def overflow_error(
    tokens: Mapping[tuple[int, str], torch.Tensor], bad: Sequence[int]
) -> NumericError:
    """Say which layer does not fit, by how much, and what to do."""
    for (layer, kind), values in tokens.items():
        values = values.float().clone()
        values[bad] = 0
        if not values.isfinite().all():
            return NumericError(
                f"layer {layer} ({kind} tokens) has values that are not finite, in float32 too: "
                f"the weights or the image values are broken. Leave the layer out: --layers"
            )
        largest = values.abs().max().item()
        if largest > FLOAT16_MAX:
            return NumericError(
                f"layer {layer} ({kind} tokens) reaches {largest:.6g}, float16 holds at most "
                f"{FLOAT16_MAX:.0f}; nothing was stored for it. Leave the layer out: --layers"
            )
    raise AssertionError("every layer fits")


class BadImageWatch:
    """Counts undecodable rows of each split, across runs, and stops when there are too many."""

    def __init__(
        self,
        store: StoreWriter,
        splits: Mapping[str, Split],
        orders: Mapping[str, NDArray[np.int64]],
        max_bad: float,
    ) -> None:
        self._splits = splits
        self._orders = orders
        self._max_bad = max_bad
        self._num_rows = {name: split.num_rows for name, split in store.spec.splits.items()}
        self._bad: dict[str, dict[int, Quarantined]] = {name: {} for name in splits}
        for entry in store.committed.values():
            self._add(entry.task.split, entry.quarantined)

    def see(self, step: Step, batch: Batch) -> list[Quarantined]:
        """The batch's undecodable rows, as the journal wants them."""
        split = step.task.split
        found = []
        for position, reason in sorted(batch.bad.items()):
            row = step.rows[0] + position
            path = self._splits[split].paths[self._orders[split][row]]
            found.append(Quarantined(row=row, path=path, reason=reason))
        self._add(split, found)
        return found

    def _add(self, split: str, found: Sequence[Quarantined]) -> None:
        bad = self._bad[split]
        bad |= {image.row: image for image in found}
        if len(bad) > self._max_bad * self._num_rows[split]:
            shown = "; ".join(f"{image.path}: {image.reason}" for image in list(bad.values())[-3:])
            raise DataError(
                f"{len(bad)} of {self._num_rows[split]} images of split {split!r} cannot be "
                f"decoded, more than --max-bad {self._max_bad:g} allows ({shown}). Mend the files, "
                f"or run the same command with a larger --max-bad to go on"
            )


class TokenSink:
    """The writer thread: takes batches from a bounded queue, commits whole tasks.

    Committing waits for the disk, so it happens in a thread of its own while the next task's rows
    are already being written; one at a time, so that the journal keeps the tasks' order.
    """

    def __init__(self, store: StoreWriter) -> None:
        self._store = store
        self._queue: queue.Queue[tuple[Step, HalfTokens, list[tuple[int, int]], list[Quarantined]]]
        self._queue = queue.Queue(QUEUED_BATCHES)
        self._done = threading.Event()
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="store-writer")

    def __enter__(self) -> TokenSink:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until everything is committed; after an error, leave the open task out."""
        (self._done if kind is None else self._stopped).set()
        self._thread.join()
        if kind is None and self._error is not None:
            raise self._error

    def put(
        self,
        step: Step,
        tokens: HalfTokens,
        sizes: list[tuple[int, int]],
        quarantined: list[Quarantined],
    ) -> None:
        """Hand over a batch; waits while the queue is full, raises what the writer met."""
        while True:
            if self._error is not None:
                raise self._error
            try:
                return self._queue.put((step, tokens, sizes, quarantined), timeout=0.2)
            except queue.Full:
                continue

    def _run(self) -> None:
        task: TaskWriter | None = None
        committing: Future[Entry] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="store-commit") as commits:
            try:
                while not self._stopped.is_set():
                    try:
                        step, tokens, sizes, quarantined = self._queue.get(timeout=0.05)
                    except queue.Empty:
                        if self._done.is_set() and self._queue.empty():
                            break
                        continue
                    task = task or self._store.open_task(step.task)
                    task.append(tokens, sizes, quarantined)
                    if step.last:
                        if committing is not None:
                            committing.result()
                        committing, task = commits.submit(task.commit), None
                if committing is not None:
                    committing.result()
            except BaseException as error:
                self._error = error
            finally:
                if task is not None:
                    task.abandon()
