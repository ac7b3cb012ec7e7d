"""Every pooler written plainly: all tokens projected, all norms applied, textbook attention.

Nothing here is shared with the package. A reference takes the pooler's parameters by their
``state_dict`` names and returns the output and, where there is one, the attention over tokens.
"""

import torch
import torch.nn.functional as F

Parameters = dict[str, torch.Tensor]


def run(name, options, params: Parameters, x, *, grid, training=False):
    """Output (B, O) and attention (B, M, N) or None of the named pooler."""
    return globals()[f"_{name}"](params, x, grid=grid, training=training, **options)


def _linear(params, name, x):
    return F.linear(x, params[f"{name}.weight"], params.get(f"{name}.bias"))


def _norm(params, name, x, eps):
    return F.layer_norm(x, x.shape[-1:], params[f"{name}.weight"], params.get(f"{name}.bias"), eps)


def _batch_norm(x, weight, bias, training, eps):
    """Batch norm over all axes but the last; running statistics are 0 and 1."""
    flat = x.reshape(-1, x.shape[-1])
    mean, var = torch.zeros_like(flat[0]), torch.ones_like(flat[0])
    return F.batch_norm(flat, mean, var, weight, bias, training, eps=eps).view_as(x)


def _mlp(params, x):
    return _linear(params, "mlp.fc2", F.gelu(_linear(params, "mlp.fc1", x)))


def _heads(x, num_heads):
    return x.reshape(*x.shape[:-1], num_heads, -1).transpose(-2, -3)


def _attend(query, key, value, num_heads):
    """Multi-head attention of (B, Q, D) over (B, N, D): output (B, Q, D), maps (B, h, Q, N)."""
    query, key, value = (_heads(part, num_heads) for part in (query, key, value))
    maps = (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).softmax(-1)
    return (maps @ value).transpose(-2, -3).flatten(-2), maps


def _batch(query, x):
    return query.expand(len(x), -1, -1)


def _rest(maps):
    """Attention of the first query to all tokens but the first, rows summing to 1."""
    rest = maps[:, :, 0, 1:]
    return rest / rest.sum(-1, keepdim=True)


def _cls(params, x, grid, training):
    return x[:, 0], None


def _gap(params, x, grid, training, value=False, dim_out=None):
    return (_linear(params, "value", x) if value else x).mean(1), None


def _ep(params, x, grid, training, num_queries, dim_out=None, value=True):
    maps = (params["queries"] @ x.transpose(1, 2) * x.shape[-1] ** -0.5).softmax(-1)
    values = _linear(params, "value", x) if value else x
    width = values.shape[-1] // num_queries
    slices = values.reshape(*x.shape[:2], num_queries, width).transpose(1, 2)
    return (maps[:, :, None] @ slices).flatten(1), maps


def _mhca(params, x, grid, training, num_heads, key="linear"):
    keys = _linear(params, "key", x) if key == "linear" else x
    y, maps = _attend(_batch(params["queries"], x), keys, _linear(params, "value", x), num_heads)
    return y[:, 0], maps[:, :, 0]


def _aim(params, x, grid, training, num_heads):
    x = _batch_norm(x, None, None, training, 1e-6)
    return _mhca(params, x, grid, training, num_heads)


def _abmilp(params, x, grid, training, depth, self_attention="none"):
    seen = x
    if self_attention != "none":
        query, key, value = _linear(params, "self_attention.qkv", x).chunk(3, -1)
        seen = _linear(params, "self_attention.proj", _attend(query, key, value, 1)[0])
    scores = _linear(params, "score.0", seen)
    if depth == 2:
        scores = _linear(params, "score.2", scores.tanh())
    maps = scores.softmax(1).transpose(1, 2)
    return (maps @ (seen if self_attention == "both" else x))[:, 0], maps


def _simpool(params, x, grid, training, linear=True, num_heads=1):
    tokens, mean = _norm(params, "norm", x, 1e-6), x.mean(1, keepdim=True)
    if linear:
        query, key = _linear(params, "query", mean), _linear(params, "key", tokens)
        y, maps = _attend(query, key, tokens, num_heads)
    else:
        y, maps = _attend(_norm(params, "norm", mean, 1e-6), tokens, x, num_heads)
    return y[:, 0], maps[:, :, 0]


def _delf(params, x, grid, training):
    weight, bias = params["norm.weight"], params["norm.bias"]
    features = _batch_norm(_linear(params, "project", x), weight, bias, training, 1e-5)
    scores = F.softplus(_linear(params, "score", features.relu()))
    maps = (scores / scores.sum(1, keepdim=True)).transpose(1, 2)
    unit = F.normalize(features, dim=-1)
    return (scores.transpose(1, 2) @ unit)[:, 0] / x.shape[1], maps


def _cae(params, x, grid, training, num_heads):
    query = _linear(params, "query", _norm(params, "norm_query", params["queries"], 1e-5))
    key = _linear(params, "key", _norm(params, "norm_key", x, 1e-5))
    value = _linear(params, "value", _norm(params, "norm_value", x, 1e-5))
    y, maps = _attend(_batch(query, x), key, value, num_heads)
    return _linear(params, "proj", y)[:, 0], maps[:, :, 0]


def _siglip(params, x, grid, training, num_heads):
    key, value = _linear(params, "key_value", x).chunk(2, -1)
    query = _linear(params, "query", params["queries"])
    y, maps = _attend(_batch(query, x), key, value, num_heads)
    y = _linear(params, "proj", y)
    return (y + _mlp(params, y))[:, 0], maps[:, :, 0]


def _vjepa(params, x, grid, training, num_heads):
    key, value = _linear(params, "key_value", _norm(params, "norm", x, 1e-5)).chunk(2, -1)
    query = _linear(params, "query", params["queries"])
    y, maps = _attend(_batch(query, x), key, value, num_heads)
    y = params["queries"] + _linear(params, "proj", y)
    return (y + _mlp(params, _norm(params, "norm_mlp", y, 1e-5)))[:, 0], maps[:, :, 0]


def _vit_block(params, x, grid, training, num_heads):
    query, key, value = _linear(params, "qkv", _norm(params, "norm", x, 1e-5)).chunk(3, -1)
    y, maps = _attend(query, key, value, num_heads)
    y = x + _linear(params, "proj", y)
    y = y + _mlp(params, _norm(params, "norm_mlp", y, 1e-5))
    return y.mean(1), maps.mean(2)


def _clip(params, x, grid, training, num_heads):
    tokens = _norm(params, "norm", x, 1e-6)
    tokens = torch.cat([tokens.mean(1, keepdim=True), tokens], 1) + params["pos_embed"]
    y, maps = _attend(*_linear(params, "qkv", tokens).chunk(3, -1), num_heads)
    return _linear(params, "proj", y)[:, 0], _rest(maps)


def _cait(params, x, grid, training, num_heads):
    query = _batch(params["queries"], x)
    tokens = _norm(params, "norm", torch.cat([query, x], 1), 1e-6)
    key, value = _linear(params, "key", tokens), _linear(params, "value", tokens)
    y, maps = _attend(_linear(params, "query", tokens[:, :1]), key, value, num_heads)
    y = query + params["gamma"] * _linear(params, "proj", y)
    y = y + params["gamma_mlp"] * _mlp(params, _norm(params, "norm_mlp", y, 1e-6))
    return _norm(params, "norm_out", y, 1e-5)[:, 0], _rest(maps)


def _coca(params, x, grid, training, num_heads, num_queries):
    query = _heads(
        _linear(params, "query", _norm(params, "norm", params["queries"], 1e-5)), num_heads
    )
    key, value = (part[:, None] for part in _linear(params, "key_value", x).chunk(2, -1))
    maps = (query @ key.transpose(-1, -2) / 64**0.5).softmax(-1)
    y = (maps @ value).transpose(1, 2).flatten(2)
    return _linear(params, "proj", y)[:, 0], maps[:, :, 0]


def _cbam(params, x, grid, training, reduction=16):
    image = x.transpose(1, 2).unflatten(2, grid)

    def squeeze(vector):
        return _linear(params, "channel.fc2", _linear(params, "channel.fc1", vector).relu())

    channel = torch.sigmoid(squeeze(image.mean((2, 3))) + squeeze(image.amax((2, 3))))
    gated = image * channel[:, :, None, None]
    planes = torch.stack([gated.mean(1), gated.amax(1)], 1)
    mixed = F.conv2d(planes, params["spatial.conv.weight"], padding=3)
    weight, bias = params["spatial.norm.weight"], params["spatial.norm.bias"]
    gate = torch.sigmoid(_batch_norm(mixed[:, 0, :, :, None], weight, bias, training, 1e-5))
    gate = gate[..., 0][:, None]
    maps = (gate / gate.sum((2, 3), keepdim=True)).flatten(2)
    return (gated * gate + image).relu().mean((2, 3)), maps
