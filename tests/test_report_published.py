"""Published numbers are those of the source, and stand beside rows of the same kind alone."""

from collections import Counter

from reportkit import make_row, scored, write_results

from epcache.catalog import find_backbone
from epcache.poolers import POOLERS, pooler_options
from epcache.report.collect import collect
from epcache.report.published import LINEAR, beside, published_results
from epcache.report.tables import published as published_table


def test_every_published_pair_is_there():
    """Linear and EP accuracies by backbone, as the source prints them."""
    pairs = {}
    for each in published_results():
        if each.note != "ablation":
            pairs.setdefault((each.backbone, each.note), []).append(round(100 * each.top1, 1))
    assert pairs == {
        ("mae_vits16", ""): [47.1, 64.6], ("mae_vitb16", ""): [67.8, 75.5],
        ("mae_vitl16", ""): [76.0, 79.5], ("simmim_vitb16", "benchmark"): [47.1, 64.9],
        ("simmim_vitb16", "paper"): [51.5, 65.1], ("beitv2_vitb16", ""): [79.0, 81.4],
        ("capi_vitl14", ""): [81.9, 83.0], ("dino_vitb16", ""): [77.2, 77.4],
        ("dinov2_vitb14", ""): [83.6, 84.0], ("dinov2_vitl14", ""): [85.3, 85.6],
        ("dinov3_vitl16", ""): [86.6, 87.1], ("clip_vitl14", ""): [82.5, 83.2],
        ("siglip_vitl16", ""): [84.1, 85.9], ("siglip2_vitl16", ""): [85.3, 87.1],
        ("aimv2_vitl14", ""): [84.7, 85.9], ("ijepa_vith14", ""): [78.1, 79.0],
        ("hiera_b", ""): [69.3, 75.7], ("dit_xl2", ""): [32.7, 57.0],
    }  # fmt: skip


def test_published_heads_exist():
    """Backbones are aliases (but the one that has none), poolers and options are real."""
    for each in published_results():
        assert find_backbone(each.backbone) is not None or each.backbone == "dit_xl2"
        assert each.dataset == "imagenet1k"
        assert each.protocol == "best epoch"
        assert "ICLR 2026" in each.source
        if each.pooler != LINEAR:
            assert each.pooler in POOLERS
            assert set(each.options) <= set(pooler_options(each.pooler))
    tokens = Counter(each.tokens for each in published_results() if each.pooler == "ep")
    assert tokens["all"] == 3


def test_only_the_same_kind_stands_beside(tmp_path):
    """Another data set, head, token kind, subset or average of layers is not compared."""
    rows = [
        scored(0.74, num_queries=32), scored(0.99, num_queries=32, shots=16),
        scored(0.98, num_queries=32, tokens="all"), scored(0.97, num_queries=16),
        scored(0.96, num_queries=32, average_layers=4),
        scored(0.60, pooler="cls", num_queries=None),
        scored(0.66, pooler="gap", num_queries=None),
        scored(0.95, pooler="gap", num_queries=None, method="ridge", l2=1.0, recipe=None),
    ]  # fmt: skip
    results = collect(write_results(tmp_path, rows, with_runs=False))
    found = {each.published.head: each for each in beside(results)}
    assert found["ep M=32"].ours.row == rows[0]
    assert found["linear"].ours.row == rows[6]
    assert found["gap"].ours.row == rows[6]
    assert found["ep M=12"].ours is None
    table = published_table(list(found.values()))
    first = dict(zip([column.name for column in table.columns], table.rows[0], strict=True))
    assert (first["head"], first["protocol"]) == ("linear", "best epoch")
    # best epoch against best epoch
    assert round(first["difference"], 4) == round(0.665 - 0.678, 4)


def test_other_data_have_no_published_numbers(tmp_path):
    """Numbers of ImageNet are not shown beside another data set."""
    results = collect(write_results(tmp_path, [make_row(dataset="cub200")], with_runs=False))
    assert beside(results) == []
