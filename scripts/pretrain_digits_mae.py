"""Pre-train the bundled backbone `digits_mae`: a tiny ViT, as a masked autoencoder, on real digits.

    python scripts/pretrain_digits_mae.py                     # writes the bundled file
    python scripts/pretrain_digits_mae.py --epochs 2 --out /tmp/short.safetensors
    python scripts/pretrain_digits_mae.py --check 20          # the same 20 steps twice

The images are the 1,297 training rows of `digits` (scikit-learn's handwritten digits), in the
backbone's own preprocessing. No label is read, and the 500 held-out rows are not asked for. Half of
the patches of an image are hidden, the encoder sees the rest and [CLS], and a small decoder, which
is not kept, fills in the pixels of what was hidden.

It runs on one core of a CPU and takes about three minutes. Seed, threads and algorithms are fixed:
a second run on the same machine and versions gives the same file, whose sha256 is printed; another
processor may round differently.

Source: He et al., Masked Autoencoders Are Scalable Vision Learners (CVPR 2022), section 3.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional

from epcache.catalog import BackboneEntry, find_backbone
from epcache.dataset import Preprocess
from epcache.manifest import load_manifest

ROOT = Path(__file__).parents[1]
MAX_BYTES = 2_000_000


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the weights, besides images and architecture."""

    epochs: int = 40
    batch_size: int = 128
    lr: float = 1.5e-3
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    warmup: float = 0.1
    """Part of all steps over which the learning rate rises; then it falls to 0 by half a cosine."""
    mask_ratio: float = 0.5
    """Half, not the usual 75%: a patch here is one pixel of the 8 x 8 original."""
    decoder_dim: int = 32
    decoder_depth: int = 1
    decoder_heads: int = 4
    seed: int = 0
    num_threads: int = 1
    """A sum in other pieces rounds differently, so the number of threads is part of the recipe."""


def bundled_entry() -> BackboneEntry:
    """What `backbones.toml` says of the bundled backbone: architecture and preprocessing."""
    entry = find_backbone("digits_mae")
    assert entry is not None
    return entry


def train_images(entry: BackboneEntry) -> Tensor:
    """The training images as the backbone sees them, float32 (n, 3, S, S)."""
    split = load_manifest("digits", splits=["train"]).splits["train"]
    preprocess = Preprocess(image_size=entry.image_size, crop_pct=entry.crop_pct)
    crops = [
        np.asarray(preprocess.eval_crop(split.open_image(row).convert("RGB")))
        for row in range(len(split.paths))
    ]
    pixels_BCHW = torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (entry.mean, entry.std))
    return (pixels_BCHW - mean) / std


def sine_positions(dim: int, grid: int) -> Tensor:
    """Fixed sine-cosine position embedding, zeros for [CLS]; (1, 1 + grid * grid, dim)."""
    rates = 10_000 ** -(torch.arange(dim // 4) / (dim // 4))
    angles = torch.arange(grid)[:, None] * rates
    one_axis = torch.cat([angles.sin(), angles.cos()], 1)
    rows, columns = (
        axis.reshape(-1) for axis in torch.meshgrid(*[torch.arange(grid)] * 2, indexing="ij")
    )
    positions = torch.cat([one_axis[rows], one_axis[columns]], 1)
    return torch.cat([torch.zeros(1, dim), positions])[None]


class MaskedAutoencoder(nn.Module):
    """The encoder that is kept, and a small decoder that is not."""

    def __init__(self, encoder: nn.Module, recipe: Recipe) -> None:
        super().__init__()
        self.encoder = encoder.requires_grad_(True).train()
        self.patch: int = encoder.patch_embed.patch_size[0]
        self.grid: int = encoder.patch_embed.grid_size[0]
        self.num_patches = self.grid**2
        self.num_visible = round(self.num_patches * (1 - recipe.mask_ratio))
        width = recipe.decoder_dim
        self.enter = nn.Linear(encoder.embed_dim, width)
        self.hidden_token = nn.Parameter(torch.randn(width) * 0.02)
        self.register_buffer("positions", sine_positions(width, self.grid))
        self.blocks = nn.Sequential(
            *(
                Block(width, recipe.decoder_heads, qkv_bias=True)
                for _ in range(recipe.decoder_depth)
            )
        )
        self.leave = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, self.patch**2))
        with torch.no_grad():
            encoder.pos_embed.copy_(sine_positions(encoder.embed_dim, self.grid))

    def forward(self, images_BCHW: Tensor, generator: torch.Generator) -> Tensor:
        """Mean squared error of the hidden patches' pixels, for masks drawn from the generator."""
        noise_BN = torch.rand(len(images_BCHW), self.num_patches, generator=generator)
        order_BN = noise_BN.argsort(1)
        back_BN = order_BN.argsort(1)
        pixels_BNP = self.decode(self.encode(images_BCHW, order_BN), back_BN)
        error_BN = (pixels_BNP - self.targets(images_BCHW)).square().mean(-1)
        return error_BN[back_BN >= self.num_visible].mean()

    def encode(self, images_BCHW: Tensor, order_BN: Tensor) -> Tensor:
        """[CLS] and the first patches of the order, through the encoder and its last norm."""
        encoder = self.encoder
        tokens_BND = encoder.patch_embed(images_BCHW) + encoder.pos_embed[:, 1:]
        visible_BND = take(tokens_BND, order_BN[:, : self.num_visible])
        cls_B1D = (encoder.cls_token + encoder.pos_embed[:, :1]).expand(len(images_BCHW), -1, -1)
        return encoder.norm(encoder.blocks(torch.cat([cls_B1D, visible_BND], 1)))

    def decode(self, visible_BND: Tensor, back_BN: Tensor) -> Tensor:
        """Pixels of every patch, (B, N, patch * patch), from [CLS] and the visible patches."""
        cls_B1D, visible_BND = self.enter(visible_BND).split([1, self.num_visible], 1)
        num_hidden = self.num_patches - self.num_visible
        hidden_BND = self.hidden_token.expand(len(visible_BND), num_hidden, -1)
        all_BND = take(torch.cat([visible_BND, hidden_BND], 1), back_BN)
        decoded_BND = self.blocks(torch.cat([cls_B1D, all_BND], 1) + self.positions)
        return self.leave(decoded_BND)[:, 1:]

    def targets(self, images_BCHW: Tensor) -> Tensor:
        """Pixels of every patch, (B, N, patch * patch); one channel, for the digits are grey."""
        grey_BHW = images_BCHW[:, 0]
        cut = grey_BHW.reshape(-1, self.grid, self.patch, self.grid, self.patch)
        return cut.transpose(2, 3).reshape(-1, self.num_patches, self.patch**2)


def take(tokens_BND: Tensor, index_BN: Tensor) -> Tensor:
    """Tokens of every image in the order of its index."""
    return tokens_BND.gather(1, index_BN[..., None].expand(-1, -1, tokens_BND.shape[-1]))


def augment(images_BCHW: Tensor, generator: torch.Generator) -> Tensor:
    """Turn, slant, scale, stretch and shift every image a little."""

    def draw(most: float) -> Tensor:
        return (torch.rand(len(images_BCHW), generator=generator) * 2 - 1) * most

    angle, scale, slant, stretch = draw(0.26), 1 + draw(0.15), draw(0.2), 1 + draw(0.1)
    cos, sin = angle.cos() * scale, angle.sin() * scale
    rows = [cos * stretch, slant - sin, draw(0.12), sin, cos / stretch, draw(0.12)]
    affine = torch.stack(rows, 1).view(-1, 2, 3)
    grid = functional.affine_grid(affine, list(images_BCHW.shape), align_corners=False)
    return functional.grid_sample(images_BCHW, grid, padding_mode="border", align_corners=False)


def pretrain(
    entry: BackboneEntry,
    images_BCHW: Tensor,
    recipe: Recipe,
    progress: Callable[[int, float], None] = lambda _epoch, _loss: None,
    num_steps: int | None = None,
) -> tuple[dict[str, Tensor], list[float]]:
    """Train a masked autoencoder; the same arguments give the same bits.

    Args:
        entry: Architecture.
        images_BCHW: Normalised training images.
        recipe: How.
        progress: Called after every epoch with its number and mean loss, the squared error of
            hidden pixels, which lie in [-1, 1].
        num_steps: Stop after so many steps of the recipe; by default all.

    Returns:
        The encoder's state in float16, and the loss of every step.
    """
    torch.set_num_threads(recipe.num_threads)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(recipe.seed)
    model = MaskedAutoencoder(VisionTransformer(num_classes=0, **entry.kwargs), recipe)
    optimizer = make_optimizer(model, recipe)
    generator = torch.Generator().manual_seed(recipe.seed)
    per_epoch = len(images_BCHW) // recipe.batch_size
    losses: list[float] = []
    for rows in islice(batches(len(images_BCHW), recipe, generator), num_steps):
        rate = recipe.lr * schedule((len(losses) + 1) / (recipe.epochs * per_epoch), recipe.warmup)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = model(augment(images_BCHW[rows], generator), generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) % per_epoch == 0:
            mean = sum(losses[-per_epoch:]) / per_epoch
            progress(len(losses) // per_epoch, mean)
    state = model.encoder.state_dict()
    return {name: value.half().contiguous() for name, value in state.items()}, losses


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW; matrices decay, biases, norms and single tokens do not."""
    decay, free = [], []
    for parameter in model.parameters():
        (decay if parameter.ndim > 1 and len(parameter) > 1 else free).append(parameter)
    groups = [{"params": decay}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay
    )


def batches(num_images: int, recipe: Recipe, generator: torch.Generator) -> Iterator[Tensor]:
    """Rows of every step; each epoch another order, its last incomplete batch left out."""
    for _ in range(recipe.epochs):
        order = torch.randperm(num_images, generator=generator)
        full = num_images // recipe.batch_size * recipe.batch_size
        yield from order[:full].split(recipe.batch_size)


def schedule(done: float, warmup: float) -> float:
    """Factor of the learning rate at a fraction of all steps."""
    if done < warmup:
        return done / warmup
    return 0.5 * (1 + math.cos(math.pi * (done - warmup) / (1 - warmup)))


def write(state: dict[str, Tensor], out_path: Path) -> str:
    """Write the weights in one piece; returns the file's sha256."""
    payload = save(state, metadata={"format": "pt"})
    if len(payload) > MAX_BYTES:
        raise ValueError(f"{len(payload):,} bytes of weights, at most {MAX_BYTES:,} are bundled")
    out_path.parent.mkdir(parents=True, exist_ok=True)
    part_path = out_path.with_name(out_path.name + ".part")
    with part_path.open("wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    part_path.replace(out_path)
    return hashlib.sha256(payload).hexdigest()


def check(entry: BackboneEntry, images_BCHW: Tensor, recipe: Recipe, num_steps: int) -> None:
    """Train the first steps twice; exit 1 unless weights and losses are the same bits."""
    one, other = (pretrain(entry, images_BCHW, recipe, num_steps=num_steps) for _ in range(2))
    same = one[1] == other[1] and save(one[0]) == save(other[0])
    if not same:
        raise SystemExit(f"{num_steps} steps twice: the weights differ on this machine")
    print(f"{num_steps} steps twice: the same weights; loss {one[1][0]:.4f} -> {one[1][-1]:.4f}")


def main() -> None:
    """Parse, train, write."""
    default = Recipe()
    entry = bundled_entry()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--epochs", type=int, default=default.epochs)
    parser.add_argument("--out", type=Path, default=ROOT / "epcache" / str(entry.file))
    parser.add_argument("--check", type=int, metavar="STEPS", help="train STEPS twice and compare")
    arguments = parser.parse_args()
    recipe = replace(default, epochs=arguments.epochs)
    images_BCHW = train_images(entry)
    if arguments.check:
        check(entry, images_BCHW, recipe, arguments.check)
        return
    start = time.perf_counter()

    def report(epoch: int, loss: float) -> None:
        seconds = time.perf_counter() - start
        print(f"epoch {epoch:3}  loss {loss:.4f}  {seconds:.0f} s", flush=True)

    state, losses = pretrain(entry, images_BCHW, recipe, report)
    digest = write(state, arguments.out)
    print(f"final loss {losses[-1]:.4f}\nsha256 {digest}\nwrote {arguments.out}")


if __name__ == "__main__":
    main()
