"""Figures of stage two: pool first against project all, banks against one after another.

See ``bench.py`` for how contestants are compared.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from epcache.backbone import load_backbone
from epcache.bank import ProbeBank, Trainee
from epcache.bench import (
    VITS14,
    Figure,
    FreeBackbone,
    FreeLoader,
    alternate,
    compare,
    no_image,
    rows_split,
    synthetic_spec,
    timed,
    write_jpegs,
    write_store,
)
from epcache.dataset import BatchPlan, ImageLoader, Preprocess
from epcache.optim import make_optimizer
from epcache.pooling import attention_pool
from epcache.store.reader import open_store
from epcache.stream import PooledSource, TokenSource, TokenStream
from epcache.train import Fit, Schedule
from epcache.workspace import Workspace

NUM_TOKENS, DIM, BATCH, CLASSES = 196, 768, 128, 1000
"""ViT-B/16 at 224 pixels on ImageNet: the size of the published tables."""


def tokens_and_labels(
    dtype: torch.dtype = torch.float32, num_classes: int = CLASSES
) -> tuple[Tensor, Tensor]:
    """One batch of random tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(BATCH, NUM_TOKENS, DIM, generator=generator).to(dtype)
    return tokens, torch.randint(num_classes, (BATCH,), generator=generator)


class PublishedEp(nn.Module):
    """Efficient probing as published: every token is projected, then the values are pooled."""

    def __init__(self, num_queries: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(num_queries, DIM) * 0.02)
        self.value = nn.Linear(DIM, DIM, bias=False)
        self.norm = nn.BatchNorm1d(DIM, affine=False, eps=1e-6)
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, tokens_BND: Tensor) -> Tensor:
        """Logits (B, C)."""
        weights_BMN = (self.queries * DIM**-0.5 @ tokens_BND.transpose(1, 2)).softmax(-1)
        values_BNMo = self.value(tokens_BND).unflatten(2, (len(self.queries), -1))
        pooled = torch.einsum("bmn,bnmo->bmo", weights_BMN, values_BNMo).flatten(1)
        logits: Tensor = self.head(self.norm(pooled))
        return logits


def bank_step(
    trainees: Sequence[Trainee], dtype: torch.dtype, num_classes: int = CLASSES
) -> Callable[[], None]:
    """A function that does one whole training step of a bank."""
    tokens, labels = tokens_and_labels(dtype, num_classes)
    bank = ProbeBank(trainees, dim=DIM, grid=None, num_classes=num_classes)
    optimizers = [
        make_optimizer("sgd", stack.params, torch.zeros(len(stack.members)))
        for stack in bank.stacks
    ]
    rates = [torch.full((len(stack.members),), 1e-3) for stack in bank.stacks]

    def step() -> None:
        _, gradients = bank.loss_and_gradients(tokens, labels)
        for optimizer, gradient, rate in zip(optimizers, gradients, rates, strict=True):
            optimizer.step(gradient, rate)

    return step


def repeated(step: Callable[[], None], times: int, units: float) -> Callable[[], float]:
    """Units a second of a step, over a few of them."""

    def many() -> None:
        for _ in range(times):
            step()

    return lambda: times * units / timed(many)


def bench_step(*, num_repeats: int = 7) -> list[Figure]:
    """One EP step, M=32: pooled first against projecting all tokens."""
    tokens, labels = tokens_and_labels()
    torch.manual_seed(0)
    published = PublishedEp(32)
    optimizer = torch.optim.SGD(published.parameters(), lr=1e-3, momentum=0.9)

    def reference() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(published(tokens), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    trainee = Trainee(pooler="ep", options={"num_queries": 32}, optimizer="sgd", lr=1e-3)
    rates = alternate(
        {
            "ours": repeated(bank_step([trainee], torch.float32), 6, BATCH),
            "published": repeated(reference, 2, BATCH),
        },
        num_repeats,
    )
    return [
        compare(
            "EP step, float32",
            rates,
            "ours",
            "published",
            unit="images/s",
            what="the published formula, which projects all tokens",
            target=">= 7",
            note=f"N={NUM_TOKENS}, D={DIM}, M=32, C={CLASSES}, batch {BATCH}, SGD step included",
        )
    ]


def bench_bank(*, num_repeats: int = 5) -> list[Figure]:
    """32 EP probes of M=8: a bank against one after another, and against the machine's GEMM."""
    trainees = [
        Trainee(pooler="ep", options={"num_queries": 8}, optimizer="sgd", lr=1e-3, seed=seed)
        for seed in range(32)
    ]
    singles = [bank_step([trainee], torch.float32, 100) for trainee in trainees[:8]]

    def one_after_another() -> None:
        for step in singles:
            step()

    rates = alternate(
        {
            "bank": repeated(bank_step(trainees, torch.float32, 100), 1, BATCH * 32),
            "alone": repeated(one_after_another, 1, BATCH * 8),
        },
        num_repeats,
    )
    figure = compare(
        "bank of 32 EP8 probes",
        rates,
        "bank",
        "alone",
        unit="probe-images/s",
        what="the same probes one after another, pooled first too",
        target=">= 3",
        note=f"float32, N={NUM_TOKENS}, D={DIM}, 100 classes, SGD step included",
    )
    return [figure, bench_pooling(num_repeats=num_repeats)]


def bench_pooling(*, num_repeats: int = 5) -> Figure:
    """Pooling for 256 queries, forward and backward, as a share of the machine's GEMM rate."""
    tokens, _ = tokens_and_labels()
    queries = (torch.randn(256, DIM) * 0.02).requires_grad_()
    gradient = torch.randn(BATCH, 256, DIM)
    flops = 4 * 2 * BATCH * 256 * NUM_TOKENS * DIM
    left, right = torch.randn(2048, 2048), torch.randn(2048, 2048)
    workspace = Workspace()  # as a bank has one

    def pool() -> None:
        queries.grad = None
        attention_pool([queries], tokens, workspace)[0].backward(gradient)  # type: ignore[no-untyped-call]

    def product() -> None:
        torch.mm(left, right)

    rates = alternate(
        {
            "pool": repeated(pool, 2, flops / 1e9),
            "gemm": repeated(product, 8, 2 * 2048**3 / 1e9),
        },
        num_repeats,
    )
    return compare(
        "pooling 256 queries",
        rates,
        "pool",
        "gemm",
        unit="GFLOP/s",
        what="a 2048 x 2048 matrix product in the same precision",
        target=">= 0.60",
        note="float32, forward and backward",
    )


def cached_stream(work_dir: Path, num_images: int, tokens: str) -> TokenStream:
    """A stream over a fresh store of random ViT-S/14 tokens with 37 classes."""
    path = work_dir / "probe-store"
    spec = synthetic_spec(num_images, 1)
    split = rows_split(num_images, no_image)
    write_store(path, spec, FreeBackbone(1, 256), FreeLoader(), split, batch_size=256)
    source = TokenSource(
        split=open_store(path)["train"],
        layer=0,
        tokens="cls" if tokens == "cls" else "patch",
        rows=np.arange(num_images),
    )
    return TokenStream(source, batch_size=128, budget_bytes=8 * 2**30)


def bench_linear(work_dir: Path, *, num_repeats: int = 3) -> list[Figure]:
    """A hundred learning rates of a linear probe against one: what ``epcache probe`` does for it.

    The patch tokens are read and pooled, all rates are trained and judged on a tenth of the rows,
    and the best is trained again on all of them.
    """
    source = cached_stream(work_dir, 2048, "patch").source
    assert isinstance(source, TokenSource)
    labels = torch.randint(37, (len(source),), generator=torch.Generator().manual_seed(0))
    rows = np.arange(len(source))
    schedule = Schedule(epochs=20)

    def fit(rates: Sequence[float], train: PooledSource, judge: PooledSource) -> None:
        trainees = [Trainee(pooler="gap", lr=rate) for rate in rates]
        bank = ProbeBank(trainees, dim=VITS14.dim, grid=None, num_classes=37)
        streams = [TokenStream(part, batch_size=230, budget_bytes=2**30) for part in (train, judge)]
        Fit(bank, streams[0], streams[1], schedule).run()

    def choose(number: int) -> float:
        def run() -> None:
            pooled = replace(PooledSource.of(source, num_views=1), labels=labels)
            held = rows % 10 == 0
            rates = [10 ** -(1 + i / 25) for i in range(number)]
            fit(rates, pooled.subset(rows[~held]), pooled.subset(rows[held]))
            fit(rates[:1], pooled, pooled)

        return 1 / timed(run)

    rates = alternate({"hundred": lambda: choose(100), "one": lambda: choose(1)}, num_repeats)
    shutil.rmtree(work_dir / "probe-store")
    return [
        compare(
            "100 linear learning rates",
            rates,
            "hundred",
            "one",
            unit="runs/s",
            what="one learning rate",
            target=">= 0.50",
            note="2,048 images, D=384, 37 classes: read, pool, 20 epochs to choose, 20 to refit",
        )
    ]


def bench_epochs(work_dir: Path, *, num_images: int = 64, num_repeats: int = 3) -> list[Figure]:
    """90 epochs of EP M=32: from the cache, extraction included, against the backbone each time."""
    folder = write_jpegs(work_dir / "images", num_images)
    backbone = load_backbone("dinov2_vits14", weights="random:0", image_size=224)
    split = rows_split(num_images, lambda row: Image.open(folder / f"{row}.jpg"))
    loader = ImageLoader(Preprocess(image_size=224), seed=0, num_workers=os.cpu_count() or 1)

    def live() -> float:
        def epoch() -> None:
            plans = (
                BatchPlan(split=split, indices=range(start, start + 16))
                for start in range(0, num_images, 16)
            )
            for batch in loader.load(plans):
                backbone.tokens(torch.from_numpy(batch.images), [11], "float32")

        return timed(epoch) / num_images

    stream = cached_stream(work_dir, 1024, "patch")
    trainee = Trainee(pooler="ep", options={"num_queries": 32})

    def cached() -> float:
        bank = ProbeBank([trainee], dim=VITS14.dim, grid=None, num_classes=37)
        fit = Fit(bank, stream, stream, Schedule(epochs=2))
        return timed(fit._train_epoch) / len(stream)

    seconds = alternate({"cached": cached, "live": live}, num_repeats)
    rates = {
        # seconds an image for 90 epochs: the backbone once and the probe 90 times, or both 90 times
        "cache": [
            1 / (one + 90 * probe)
            for one, probe in zip(seconds["live"], seconds["cached"], strict=True)
        ],
        "loop": [
            1 / (90 * (one + probe))
            for one, probe in zip(seconds["live"], seconds["cached"], strict=True)
        ],
    }
    shutil.rmtree(work_dir / "probe-store")
    shutil.rmtree(folder)
    return [
        compare(
            "90 epochs of EP32",
            rates,
            "cache",
            "loop",
            unit="images/s",
            what="the backbone run in every epoch",
            target=">= 50",
            note="ViT-S/14 at 224 px; measured per epoch, extraction included, one view",
        )
    ]
