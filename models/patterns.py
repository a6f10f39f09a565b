"""Usual patterns of `torch.nn`: each is a small model, or a function, as people write them.

`PATTERNS` is a list of `(name, make)`. `make()` gives `(program, arguments)`: a module or a function, and a function
that gives a fresh tuple of arguments. Both are the same each time: seeds are fixed.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

Arguments = Callable[[], tuple[Any, ...]]
Make = Callable[[], tuple[Callable[..., Any], Arguments]]

PATTERNS: list[tuple[str, Make]] = []


def pattern(make: Callable[[], tuple[Callable[..., Any], Arguments]]) -> Make:
    """Enter a pattern under the name of its function."""

    def seeded() -> tuple[Callable[..., Any], Arguments]:
        torch.manual_seed(0)
        program, arguments = make()

        def fresh() -> tuple[Any, ...]:
            torch.manual_seed(1)
            return arguments()

        return program, fresh

    PATTERNS.append((make.__name__, seeded))
    return seeded


def rand(*shape: int) -> Arguments:
    """One argument of normal numbers."""
    return lambda: (torch.randn(*shape),)


def tokens(most: int, *shape: int) -> Arguments:
    """One argument of numbers of tokens."""
    return lambda: (torch.randint(0, most, shape),)


class Lambda(nn.Module):
    """A forward over some parts."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any) -> Any:
        return self._forward(self, *args)


# ---------------------------------------------------------------------------------------------------------------------
# Layers.
@pattern
def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), rand(4, 6)


@pattern
def activations():
    kinds = [nn.ReLU, nn.ReLU6, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Hardswish]
    kinds += [nn.Hardsigmoid, nn.Hardtanh, nn.LeakyReLU, nn.LogSigmoid, nn.PReLU, nn.Softshrink, nn.Softsign, nn.Tanh]
    kinds += [nn.Tanhshrink, nn.Sigmoid, nn.Hardshrink]
    parts = nn.ModuleList([kind() for kind in kinds] + [nn.Threshold(0.1, 0.2), nn.GLU(), nn.Softmax(-1)])
    return Lambda(lambda self, x: [part(x) for part in self.parts], parts=parts), rand(4, 6)


@pattern
def inplace_activations():
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(True), nn.Linear(6, 6), nn.SiLU(True), nn.Dropout(0.5, True)), rand(
        4, 6
    )


@pattern
def rrelu_in_training():
    return nn.Sequential(nn.Linear(6, 6), nn.RReLU()), rand(4, 6)


@pattern
def convolutions():
    parts = [nn.Conv2d(3, 4, 3, padding="same"), nn.Conv2d(4, 4, 3, groups=2, padding_mode="reflect", padding=1)]
    return nn.Sequential(*parts, nn.Conv2d(4, 2, 3, stride=2, dilation=2), nn.ConvTranspose2d(2, 2, 2)), rand(
        2, 3, 12, 12
    )


@pattern
def convolutions_of_one_and_three_dimensions():
    def forward(self, x, y):
        return self.one(x), self.three(y), self.back(self.three(y), output_size=[5, 5, 5])

    parts = {"one": nn.Conv1d(3, 4, 3), "three": nn.Conv3d(2, 3, 2), "back": nn.ConvTranspose3d(3, 2, 2)}
    return Lambda(forward, **parts), lambda: (torch.randn(2, 3, 8), torch.randn(1, 2, 5, 5, 5))


@pattern
def channels_last_convolution():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).to(memory_format=torch.channels_last)
    return model, lambda: (torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),)


@pattern
def normalizations():
    parts = [nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)]
    parts += [nn.LayerNorm([4, 5, 5]), nn.RMSNorm(5), nn.LocalResponseNorm(2), nn.BatchNorm2d(4, momentum=None)]
    return nn.Sequential(*parts), rand(3, 4, 5, 5)


@pattern
def batch_norm_in_eval():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    model[1].eval()
    return model, rand(2, 3, 6, 6)


@pattern
def pooling():
    def forward(self, x):
        y, places = F.max_pool2d(x, 2, return_indices=True)
        adaptive = F.adaptive_avg_pool2d(x, 3), F.adaptive_max_pool2d(x, 2), F.lp_pool2d(x.abs() + 1, 2, 2)
        return F.max_unpool2d(y, places, 2), F.avg_pool2d(x, 3, 2, 1), *adaptive, F.fractional_max_pool2d(x, 2, 3)

    return Lambda(forward), lambda: (torch.randn(2, 3, 8, 8, requires_grad=True),)


@pattern
def pixel_shuffle_and_padding():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.PixelShuffle(2), nn.ReflectionPad2d(2), nn.ReplicationPad2d(1))
    return nn.Sequential(model, nn.ConstantPad2d(1, 0.5), nn.CircularPad2d(1), nn.PixelUnshuffle(2)), rand(1, 3, 7, 7)


@pattern
def interpolate():
    def forward(self, x):
        modes = ("nearest", "bilinear", "bicubic", "area", "nearest-exact")
        return [F.interpolate(self.conv(x), scale_factor=1.5, mode=mode) for mode in modes]

    return Lambda(forward, conv=nn.Conv2d(3, 2, 3)), rand(1, 3, 8, 8)


@pattern
def spatial_transformer():
    def forward(self, x):
        theta = self.locate(x.flatten(1)).view(-1, 2, 3)
        return F.grid_sample(x, F.affine_grid(theta, x.shape, align_corners=False), align_corners=False)

    return Lambda(forward, locate=nn.Linear(75, 6)), rand(2, 3, 5, 5)


@pattern
def unfold_and_fold():
    def forward(self, x):
        return F.fold(self.mix(F.unfold(x, 3).transpose(1, 2)).transpose(1, 2), (8, 8), 3)

    return Lambda(forward, mix=nn.Linear(27, 27)), rand(2, 3, 8, 8)


@pattern
def bilinear_and_distances():
    def forward(self, x, y):
        return self.mix(x, y), F.cosine_similarity(x, y), F.pairwise_distance(x, y), torch.cdist(x, y), F.pdist(x)

    return Lambda(forward, mix=nn.Bilinear(5, 5, 3)), lambda: (
        torch.randn(4, 5, requires_grad=True),
        torch.randn(4, 5),
    )


@pattern
def dropouts():
    parts = [nn.Dropout(0.3), nn.Dropout1d(0.3), nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.3)]
    return nn.Sequential(nn.Linear(6, 6), *parts), rand(4, 3, 6)


@pattern
def functional_dropout():
    def forward(self, x):
        return F.dropout(self.linear(x), 0.5, training=self.training) + F.dropout(x, 0.2)

    return Lambda(forward, linear=nn.Linear(6, 6)), rand(4, 6)


# ---------------------------------------------------------------------------------------------------------------------
# Embeddings and sparse gradients.
@pattern
def embedding():
    return nn.Sequential(nn.Embedding(10, 4, padding_idx=0), nn.Linear(4, 2)), tokens(10, 3, 5)


@pattern
def embedding_scaled_by_frequency():
    return nn.Embedding(10, 4, scale_grad_by_freq=True), tokens(10, 3, 5)


@pattern
def embedding_with_largest_norm():
    return nn.Sequential(nn.Embedding(10, 4, max_norm=1.0), nn.Linear(4, 2)), tokens(10, 3, 5)


@pattern
def embedding_bag():
    def forward(self, x, offsets):
        return self.sum(x, offsets), self.mean(x, offsets), self.max(x, offsets)

    parts = {mode: nn.EmbeddingBag(10, 4, mode=mode) for mode in ("sum", "mean", "max")}
    return Lambda(forward, **parts), lambda: (torch.randint(0, 10, (7,)), torch.tensor([0, 3, 5]))


@pattern
def sparse_embedding():
    return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)), tokens(10, 3, 5)


@pattern
def sparse_embedding_bag():
    bag = nn.EmbeddingBag(10, 4, sparse=True, mode="sum")
    return Lambda(lambda self, x: self.bag(x) * 2, bag=bag), tokens(10, 3, 5)


@pattern
def sparse_matrix_product():
    def forward(self, x):
        places = torch.tensor([[0, 1, 2], [1, 0, 3]])
        adjacency = torch.sparse_coo_tensor(places, self.values, (4, 4))
        return torch.sparse.mm(adjacency, self.linear(x))

    return Lambda(forward, linear=nn.Linear(3, 2), values=nn.Parameter(torch.ones(3))), rand(4, 3)


@pattern
def sparse_adjacency_as_argument():
    def arguments():
        places = torch.tensor([[0, 1, 2], [1, 0, 3]])
        return torch.sparse_coo_tensor(places, torch.randn(3), (4, 4)), torch.randn(4, 3)

    return Lambda(lambda self, a, x: torch.sparse.mm(a, self.linear(x)), linear=nn.Linear(3, 2)), arguments


@pattern
def compressed_adjacency_as_argument():
    def arguments():
        return torch.randn(4, 4).relu().to_sparse_csr(), torch.randn(4, 3)

    return Lambda(lambda self, a, x: a @ self.linear(x), linear=nn.Linear(3, 2)), arguments


@pattern
def sparse_buffer():
    model = Lambda(lambda self, x: torch.sparse.mm(self.adjacency, self.linear(x)), linear=nn.Linear(3, 2))
    model.register_buffer("adjacency", torch.randn(4, 4).relu().to_sparse())
    return model, rand(4, 3)


# ---------------------------------------------------------------------------------------------------------------------
# Recurrent layers.
def _recurrent(kind: type[nn.RNNBase], **flags: Any) -> tuple[nn.Module, Arguments]:
    return kind(4, 5, num_layers=2, bidirectional=True, batch_first=True, **flags), rand(3, 6, 4)


@pattern
def rnn():
    return _recurrent(nn.RNN, nonlinearity="relu")


@pattern
def lstm():
    return _recurrent(nn.LSTM)


@pattern
def lstm_with_projection_and_dropout():
    return _recurrent(nn.LSTM, proj_size=3, dropout=0.4)


@pattern
def gru():
    return _recurrent(nn.GRU)


@pattern
def cells_in_a_loop():
    def forward(self, x):
        h = c = g = x.new_zeros(3, 5)
        for step in x.unbind(1):
            h, c = self.lstm(step, (h, c))
            g = self.gru(h, g)
        return h, c, g

    return Lambda(forward, lstm=nn.LSTMCell(4, 5), gru=nn.GRUCell(5, 5)), rand(3, 6, 4)


@pattern
def state_between_calls():
    def forward(self, x, h):
        y, h = self.gru(x, h)
        return y, h.detach()

    return Lambda(forward, gru=nn.GRU(4, 5)), lambda: (torch.randn(6, 3, 4), torch.zeros(1, 3, 5))


@pattern
def packed_sequence_as_argument():
    def forward(self, packed):
        y, (h, c) = self.lstm(packed)
        return pad_packed_sequence(y, batch_first=True)[0], h, c

    return Lambda(forward, lstm=nn.LSTM(4, 5)), lambda: (pack_sequence([torch.randn(n, 4) for n in (5, 3, 2)]),)


@pattern
def packed_sequence_of_known_lengths():
    def forward(self, x):
        packed = pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True)
        y, h = self.gru(packed)
        return pad_packed_sequence(y, batch_first=True)[0], h

    return Lambda(forward, gru=nn.GRU(4, 5)), rand(3, 5, 4)


@pattern
def padded_list_of_sequences():
    def forward(self, *xs):
        return self.linear(pad_sequence(list(xs), batch_first=True))

    return Lambda(forward, linear=nn.Linear(4, 2)), lambda: tuple(torch.randn(n, 4) for n in (5, 3, 2))


# ---------------------------------------------------------------------------------------------------------------------
# Attention.
@pattern
def multihead_attention():
    def forward(self, x):
        y, weights = self.attend(x, x, x)
        return y, weights

    return Lambda(forward, attend=nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)), rand(2, 5, 8)


@pattern
def multihead_attention_with_all_flags():
    def forward(self, q, k, v):
        hidden = torch.zeros(2, 7, dtype=torch.bool)
        hidden[:, -2:] = True
        causal = torch.ones(5, 7, dtype=torch.bool).triu(2)
        return self.attend(q, k, v, key_padding_mask=hidden, attn_mask=causal, average_attn_weights=False)

    attend = nn.MultiheadAttention(
        8, 2, kdim=6, vdim=4, add_bias_kv=True, add_zero_attn=True, bias=False, batch_first=True
    )
    return Lambda(forward, attend=attend), lambda: (torch.randn(2, 5, 8), torch.randn(2, 7, 6), torch.randn(2, 7, 4))


@pattern
def multihead_attention_without_weights():
    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(5)
        return self.attend(x, x, x, need_weights=False, attn_mask=mask, is_causal=True)[0]

    return Lambda(forward, attend=nn.MultiheadAttention(8, 2)), rand(5, 2, 8)


@pattern
def scaled_dot_product_attention():
    def forward(self, x):
        q, k, v = self.qkv(x).view(2, 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True), F.scaled_dot_product_attention(
            q, k, v, dropout_p=0.2
        )

    return Lambda(forward, qkv=nn.Linear(8, 24)), rand(2, 5, 8)


@pattern
def transformer():
    return nn.Transformer(8, 2, 1, 1, 16, batch_first=True, norm_first=True), lambda: (
        torch.randn(2, 5, 8),
        torch.randn(2, 4, 8),
    )


@pattern
def transformer_encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 2), rand(2, 5, 8)


@pattern
def transformer_encoder_with_padding_in_training():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x, hidden):
        return self.encode(x, src_key_padding_mask=hidden)

    model = Lambda(forward, encode=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    return model, lambda: (torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2]))


@pattern
def transformer_encoder_in_eval():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval(), rand(2, 5, 8)


@pattern
def transformer_encoder_by_nested_tensors():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x, hidden):
        return self.encode(x, src_key_padding_mask=hidden)

    model = Lambda(forward, encode=nn.TransformerEncoder(layer, 2)).eval().requires_grad_(False)
    return model, lambda: (torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2]))


@pattern
def transformer_decoder():
    layer = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x, memory):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.decode(x, memory, tgt_mask=mask, tgt_is_causal=True)

    return Lambda(forward, decode=nn.TransformerDecoder(layer, 2)), lambda: (
        torch.randn(2, 5, 8),
        torch.randn(2, 4, 8),
    )


@pattern
def rotary_positions_by_complex_numbers():
    def forward(self, x):
        q = torch.view_as_complex(self.q(x).float().reshape(2, 5, 4, 2))
        angles = torch.outer(torch.arange(5), 1.0 / 10.0 ** torch.arange(4))
        return torch.view_as_real(q * torch.polar(torch.ones_like(angles), angles)).flatten(2)

    return Lambda(forward, q=nn.Linear(8, 8)), rand(2, 5, 8)


# ---------------------------------------------------------------------------------------------------------------------
# Losses.
@pattern
def losses_of_classes():
    def forward(self, x, y):
        z = self.linear(x)
        smooth = F.cross_entropy(z, y, label_smoothing=0.1, weight=torch.arange(3.0), ignore_index=0)
        return smooth, F.nll_loss(z.log_softmax(-1), y), F.multi_margin_loss(z, y)

    return Lambda(forward, linear=nn.Linear(5, 3)), lambda: (torch.randn(4, 5), torch.randint(0, 3, (4,)))


@pattern
def losses_of_numbers():
    kinds = [nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss(), nn.SoftMarginLoss(), nn.PoissonNLLLoss()]
    kinds += [nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)), nn.KLDivLoss(reduction="batchmean")]
    kinds += [nn.HingeEmbeddingLoss(), nn.MultiLabelSoftMarginLoss()]

    def forward(self, x, y):
        z = self.linear(x)
        return sum(kind(z, y) for kind in self.kinds) + F.gaussian_nll_loss(z, y, z.exp())

    return Lambda(forward, linear=nn.Linear(5, 3), kinds=nn.ModuleList(kinds)), lambda: (
        torch.randn(4, 5),
        torch.rand(4, 3),
    )


@pattern
def losses_of_pairs():
    def forward(self, a, b, c):
        a, b, c, side = self.linear(a), self.linear(b), self.linear(c), torch.ones(4)
        ranked = F.margin_ranking_loss(a[:, 0], b[:, 0], side), F.cosine_embedding_loss(a, b, side)
        return F.triplet_margin_loss(a, b, c), *ranked, F.triplet_margin_with_distance_loss(a, b, c)

    return Lambda(forward, linear=nn.Linear(5, 3)), lambda: tuple(torch.randn(4, 5) for _ in range(3))


@pattern
def ctc_loss():
    def forward(self, x, y):
        return F.ctc_loss(self.linear(x).log_softmax(-1), y, (8, 8), (3, 2))

    return Lambda(forward, linear=nn.Linear(5, 6)), lambda: (torch.randn(8, 2, 5), torch.randint(1, 6, (2, 3)))


@pattern
def ctc_loss_summed():
    def forward(self, x, y):
        return F.ctc_loss(self.linear(x).log_softmax(-1), y, (8, 8), (3, 2), reduction="sum")

    return Lambda(forward, linear=nn.Linear(5, 6)), lambda: (torch.randn(8, 2, 5), torch.randint(1, 6, (2, 3)))


@pattern
def adaptive_softmax():
    return nn.AdaptiveLogSoftmaxWithLoss(6, 12, [4, 8]), lambda: (torch.randn(5, 6), torch.randint(0, 12, (5,)))


@pattern
def adaptive_softmax_as_probabilities():
    model = Lambda(lambda self, x: self.head.log_prob(x), head=nn.AdaptiveLogSoftmaxWithLoss(6, 12, [4, 8]))
    return model, rand(5, 6)


# ---------------------------------------------------------------------------------------------------------------------
# Containers and parameters.
@pattern
def containers_of_modules():
    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return {name: head(x) for name, head in self.heads.items()}

    layers, heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), {"a": nn.Linear(4, 2), "b": nn.Linear(4, 3)}
    return Lambda(forward, layers=layers, heads=nn.ModuleDict(heads)), rand(3, 4)


@pattern
def containers_of_parameters():
    def forward(self, x):
        for weight in self.weights:
            x = x @ weight
        return x * self.scales["a"] + self.scales["b"]

    weights = nn.ParameterList([torch.randn(4, 4) for _ in range(3)])
    scales = nn.ParameterDict({"a": torch.randn(4), "b": torch.randn(4)})
    return Lambda(forward, weights=weights, scales=scales), rand(3, 4)


@pattern
def sequential_with_names():
    parts = OrderedDict(first=nn.Linear(4, 4), act=nn.Tanh(), flat=nn.Flatten(), last=nn.Unflatten(1, (2, 6)))
    return nn.Sequential(parts), rand(2, 3, 4)


@pattern
def tied_weights():
    def forward(self, x):
        return self.out(torch.tanh(self.embed(x)))

    model = Lambda(forward, embed=nn.Embedding(10, 4), out=nn.Linear(4, 10, bias=False))
    model.out.weight = model.embed.weight
    return model, tokens(10, 3, 5)


@pattern
def module_used_twice():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer), rand(3, 4)


@pattern
def frozen_backbone():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model, rand(3, 4)


@pattern
def low_rank_adapter():
    def forward(self, x):
        return self.base(x) + self.up(self.down(x)) * 0.5

    model = Lambda(forward, base=nn.Linear(4, 4), down=nn.Linear(4, 2, bias=False), up=nn.Linear(2, 4, bias=False))
    model.base.requires_grad_(False)
    return model, rand(3, 4)


@pattern
def mixture_of_experts():
    def forward(self, x):
        gates = self.gate(x).softmax(-1)
        return torch.einsum("be,ebo->bo", gates, torch.stack([expert(x) for expert in self.experts]))

    return Lambda(forward, gate=nn.Linear(4, 3), experts=nn.ModuleList(nn.Linear(4, 5) for _ in range(3))), rand(6, 4)


# ---------------------------------------------------------------------------------------------------------------------
# Parametrizations, pruning, averages.
@pattern
def weight_norm():
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh()), rand(3, 4)


@pattern
def old_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Tanh()), rand(3, 4)


@pattern
def spectral_norm():
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh()), rand(3, 4)


@pattern
def old_spectral_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Tanh()), rand(3, 4)


@pattern
def orthogonal():
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Tanh()), rand(3, 4)


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@pattern
def parametrization_of_ones_own():
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer, rand(3, 4)


@pattern
def cached_parametrization():
    def forward(self, x):
        with parametrize.cached():
            return self.layer(self.layer(x))

    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return Lambda(forward, layer=layer), rand(3, 4)


@pattern
def pruned():
    layer = nn.Linear(4, 4)
    prune.l1_unstructured(layer, "weight", 0.5)
    return nn.Sequential(layer, nn.Tanh()), rand(3, 4)


@pattern
def averaged_model():
    def forward(self, x):
        return self.online(x) - self.average(x).detach()

    online = nn.Linear(4, 4)
    return Lambda(forward, online=online, average=torch.optim.swa_utils.AveragedModel(online)), rand(3, 4)


@pattern
def moving_average_updated_in_forward():
    def forward(self, x):
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.online.parameters(), strict=True):
                mean.lerp_(now, 0.1)
        return F.mse_loss(self.online(x), self.average(x))

    online = nn.Linear(4, 4)
    return Lambda(forward, online=online, average=copy.deepcopy(online).requires_grad_(False)), rand(3, 4)


@pattern
def moving_average_by_foreach():
    def forward(self, x):
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.online.parameters()), 0.1)
        return F.mse_loss(self.online(x), self.average(x))

    online = nn.Linear(4, 4)
    return Lambda(forward, online=online, average=copy.deepcopy(online).requires_grad_(False)), rand(3, 4)


# ---------------------------------------------------------------------------------------------------------------------
# State that a forward writes.
@pattern
def buffer_written_in_place():
    def forward(self, x):
        self.seen.add_(1)
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.linear(x - self.mean)

    model = Lambda(forward, linear=nn.Linear(4, 2))
    model.register_buffer("seen", torch.zeros(()))
    model.register_buffer("mean", torch.zeros(4))
    return model, rand(3, 4)


@pattern
def buffer_assigned():
    def forward(self, x):
        self.last = x.detach() * 0.5 + self.last * 0.5
        return self.linear(x) + self.last.mean()

    model = Lambda(forward, linear=nn.Linear(4, 2))
    model.register_buffer("last", torch.zeros(3, 4))
    return model, rand(3, 4)


@pattern
def memory_bank():
    def forward(self, x):
        features = F.normalize(self.linear(x), dim=-1)
        similar = features @ self.bank.clone().t()
        with torch.no_grad():
            self.bank.copy_(torch.cat([features.detach(), self.bank[: -len(x)]]))
        return similar

    model = Lambda(forward, linear=nn.Linear(4, 3))
    model.register_buffer("bank", torch.randn(8, 3))
    return model, rand(2, 4)


@pattern
def vector_quantization():
    def forward(self, x):
        z = self.encode(x)
        nearest = torch.cdist(z, self.codes.weight).argmin(-1)
        quantized = self.codes(nearest)
        loss = F.mse_loss(quantized, z.detach()) + 0.25 * F.mse_loss(z, quantized.detach())
        return z + (quantized - z).detach(), loss

    return Lambda(forward, encode=nn.Linear(4, 3), codes=nn.Embedding(6, 3)), rand(5, 4)


@pattern
def inplace_residual():
    def forward(self, x):
        y = self.first(x)
        y += x
        y[:, 0] *= 2
        y.clamp_(-1, 1)
        return self.second(y)

    return Lambda(forward, first=nn.Linear(4, 4), second=nn.Linear(4, 2)), rand(3, 4)


@pattern
def scatter_and_gather():
    def forward(self, x, at):
        y = self.linear(x)
        total = torch.zeros(5, 2).index_add(0, at, y).scatter_reduce(0, at[:, None].expand(-1, 2), y, "amax")
        return total, y.gather(1, at[:, None] % 2), y.new_zeros(5, 2).index_put((at,), y, accumulate=True)

    return Lambda(forward, linear=nn.Linear(4, 2)), lambda: (torch.randn(6, 4), torch.randint(0, 5, (6,)))


# ---------------------------------------------------------------------------------------------------------------------
# Hooks, custom functions and operators, checkpoints.
@pattern
def forward_hooks():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[0].register_forward_hook(lambda module, args, output: output.tanh())
    return model, rand(3, 4)


@pattern
def backward_hooks():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 0.5,))
    model[0].register_full_backward_pre_hook(lambda module, grad_out: (grad_out[0] * 2,))
    return model, rand(3, 4)


@pattern
def hooks_on_gradients():
    def forward(self, x):
        y = self.linear(x)
        y.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return y.square()

    model = Lambda(forward, linear=nn.Linear(4, 4))
    model.linear.weight.register_hook(lambda gradient: gradient * 2)
    return model, rand(3, 4)


class Reverse(torch.autograd.Function):
    """The gradient of the opposite sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.weight * gradient, None


@pattern
def reversed_gradients():
    def forward(self, x):
        z = self.encode(x)
        return self.task(z), self.domain(Reverse.apply(z, 0.3))

    parts = {"encode": nn.Linear(4, 4), "task": nn.Linear(4, 2), "domain": nn.Linear(4, 2)}
    return Lambda(forward, **parts), rand(3, 4)


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


@pattern
def custom_function_of_a_parameter():
    def forward(self, x):
        return x @ Cubed.apply(self.weight)

    return Lambda(forward, weight=nn.Parameter(torch.randn(4, 2))), rand(3, 4)


@torch.library.custom_op("foregrad_patterns::scaled", mutates_args=())
def scaled(x: Tensor, by: float) -> Tensor:
    return x * by


@scaled.register_fake
def _(x: Tensor, by: float) -> Tensor:
    return torch.empty_like(x)


def _keep_factor(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.by = inputs[1]


scaled.register_autograd(lambda ctx, gradient: (gradient * ctx.by, None), setup_context=_keep_factor)


@pattern
def custom_operator():
    return Lambda(lambda self, x: scaled(self.linear(x), 2.0), linear=nn.Linear(4, 2)), rand(3, 4)


@pattern
def checkpointed_blocks():
    def forward(self, x):
        x = checkpoint(self.first, x, use_reentrant=False)
        return checkpoint_sequential(self.second, 2, x, use_reentrant=False)

    second = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Tanh())
    return Lambda(forward, first=nn.Sequential(nn.Linear(4, 4), nn.Tanh()), second=second), rand(3, 4)


@pattern
def reentrant_checkpoint():
    def forward(self, x):
        return checkpoint(self.second, self.first(x), use_reentrant=True)

    return Lambda(forward, first=nn.Linear(4, 4), second=nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))), rand(3, 4)


@pattern
def scripted_function():
    @torch.jit.script
    def swish(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)

    return Lambda(lambda self, x: swish(self.linear(x)), linear=nn.Linear(4, 2)), rand(3, 4)


@pattern
def scripted_submodule():
    part = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    return nn.Sequential(nn.Linear(4, 4), part, nn.Linear(4, 2)), rand(3, 4)


@pattern
def traced_submodule():
    part = torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), torch.randn(3, 4))
    return nn.Sequential(nn.Linear(4, 4), part, nn.Linear(4, 2)), rand(3, 4)


@pattern
def scripted_batch_norm():
    part = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()))
    return nn.Sequential(part, nn.Linear(4, 2)), rand(3, 4)


@pattern
def whole_scripted_module():
    # No tanh: TorchScript rounds its gradient otherwise from the second call on.
    return torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))), rand(3, 4)


@pattern
def compiled_helper():
    helper = torch.compile(lambda x: torch.tanh(x) * 2, backend="eager")
    return Lambda(lambda self, x: helper(self.linear(x)), linear=nn.Linear(4, 2)), rand(3, 4)


# ---------------------------------------------------------------------------------------------------------------------
# Grad modes, dtypes, devices.
@pattern
def block_without_gradients():
    def forward(self, x):
        with torch.no_grad():
            y = self.teacher(x)
        with torch.set_grad_enabled(self.training):
            return F.mse_loss(self.student(x), y)

    return Lambda(forward, teacher=nn.Linear(4, 2), student=nn.Linear(4, 2)), rand(3, 4)


@pattern
def block_in_inference_mode():
    def forward(self, x):
        with torch.inference_mode():
            mask = self.teacher(x) > 0
        return self.student(x) * mask.clone()

    return Lambda(forward, teacher=nn.Linear(4, 2), student=nn.Linear(4, 2)), rand(3, 4)


@pattern
def straight_through():
    def forward(self, x):
        y = self.linear(x)
        hard = F.one_hot(y.argmax(-1), 3).to(y.dtype)
        return hard - y.detach() + y, F.gumbel_softmax(y, hard=True)

    return Lambda(forward, linear=nn.Linear(4, 3)), rand(3, 4)


@pattern
def autocast_block():
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.norm(self.linear(x))
        return y.float().softmax(-1)

    return Lambda(forward, linear=nn.Linear(4, 4), norm=nn.LayerNorm(4)), rand(3, 4)


@pattern
def mixed_dtypes():
    def forward(self, x):
        y = self.short(x.bfloat16())
        return self.long(y.double()), y.to(torch.float16).float()

    return Lambda(forward, short=nn.Linear(4, 4).bfloat16(), long=nn.Linear(4, 2).double()), rand(3, 4)


@pattern
def complex_layer():
    return Lambda(lambda self, x: self.linear(x).abs(), linear=nn.Linear(4, 2, dtype=torch.complex64)), lambda: (
        torch.randn(3, 4, dtype=torch.complex64),
    )


@pattern
def fourier_layer():
    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=x.shape[-1])

    return Lambda(forward, weight=nn.Parameter(torch.randn(5, dtype=torch.complex64))), rand(2, 3, 8)


@pattern
def spectrogram():
    def forward(self, x):
        spectrum = torch.stft(x, 16, window=torch.hann_window(16), return_complex=True)
        return torch.istft(spectrum * self.gain, 16, window=torch.hann_window(16))

    return Lambda(forward, gain=nn.Parameter(torch.ones(9, 1))), rand(2, 64)


@pattern
def einsum_and_scans():
    def forward(self, x):
        y = torch.einsum("bti,oi->bto", x, self.weight)
        return y.cumsum(1), y.exp().cumprod(1), y.logcumsumexp(1), y.cummax(1).values

    return Lambda(forward, weight=nn.Parameter(torch.randn(3, 4))), rand(2, 5, 4)


@pattern
def state_space_scan():
    def forward(self, x):
        h, out = x.new_zeros(2, 3), []
        for t in range(x.shape[1]):
            h = h * torch.sigmoid(self.decay) + self.write(x[:, t])
            out.append(h)
        return torch.stack(out, 1)

    return Lambda(forward, decay=nn.Parameter(torch.zeros(3)), write=nn.Linear(4, 3)), rand(2, 5, 4)


@pattern
def variational_autoencoder():
    def forward(self, x):
        mean, log = self.encode(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log).exp()
        return self.decode(z), -0.5 * (1 + log - mean**2 - log.exp()).sum()

    return Lambda(forward, encode=nn.Linear(6, 4), decode=nn.Linear(2, 6)), rand(3, 6)


@pattern
def distributions():
    def forward(self, x):
        mean, scale = self.linear(x).chunk(2, -1)
        normal = torch.distributions.Normal(mean, F.softplus(scale), validate_args=False)
        prior = torch.distributions.Normal(torch.zeros(2), torch.ones(2), validate_args=False)
        sample = normal.rsample()
        return normal.log_prob(sample).sum(-1), torch.distributions.kl_divergence(normal, prior)

    return Lambda(forward, linear=nn.Linear(4, 4)), rand(3, 4)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients inside of a program.
@pattern
def gradient_penalty():
    def forward(self, x):
        x = x.detach().requires_grad_()
        score = self.critic(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return score.mean() + (slope.norm(dim=1) - 1).square().mean()

    return Lambda(forward, critic=nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))), rand(3, 4)


@pattern
def energy_and_forces():
    def forward(self, places):
        places = places.requires_grad_()
        apart = (places[:, None] - places[None]).square().sum(-1)
        energy = self.model(apart.flatten())
        (forces,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
        return energy, -forces

    return Lambda(forward, model=nn.Sequential(nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 1))), rand(3, 3)


def _functional(model: nn.Module, parameters: dict[str, Tensor], *args: Any) -> Any:
    return torch.func.functional_call(model, parameters, args)


def _loss(model: nn.Module, parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(_functional(model, parameters, x), y)


def _pair() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 4), torch.randn(5, 2)


def _two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


@pattern
def functional_gradients():
    def forward(self, x, y):
        return torch.func.grad(lambda p: _loss(self.model, p, x, y))(dict(self.model.named_parameters()))

    return Lambda(forward, model=_two_layers()), _pair


@pattern
def gradients_per_sample():
    def forward(self, x, y):
        def one(parameters, x, y):
            return _loss(self.model, parameters, x[None], y[None])

        return torch.func.vmap(torch.func.grad(one), (None, 0, 0))(dict(self.model.named_parameters()), x, y)

    return Lambda(forward, model=_two_layers()), _pair


@pattern
def ensemble():
    def forward(self, x):
        parameters, buffers = torch.func.stack_module_state(list(self.members))
        return torch.func.vmap(lambda p, b: torch.func.functional_call(self.members[0], (p, b), (x,)))(
            parameters, buffers
        )

    return Lambda(forward, members=nn.ModuleList(_two_layers() for _ in range(3))), rand(5, 4)


@pattern
def learning_to_learn():
    def forward(self, x, y):
        parameters = dict(self.model.named_parameters())
        for _ in range(2):
            slopes = torch.func.grad(lambda p: _loss(self.model, p, x, y))(parameters)
            parameters = {name: value - 0.1 * slopes[name] for name, value in parameters.items()}
        return _loss(self.model, parameters, x, y)

    return Lambda(forward, model=_two_layers()), _pair


@pattern
def learning_to_learn_by_autograd():
    def forward(self, x, y):
        parameters = dict(self.model.named_parameters())
        for _ in range(2):
            slopes = torch.autograd.grad(
                _loss(self.model, parameters, x, y), list(parameters.values()), create_graph=True
            )
            parameters = {n: v - 0.1 * g for (n, v), g in zip(parameters.items(), slopes, strict=True)}
        return _loss(self.model, parameters, x, y)

    return Lambda(forward, model=_two_layers()), _pair


@pattern
def jacobian_and_hessian():
    def forward(self, x, y):
        jacobian = torch.func.vmap(torch.func.jacrev(self.model))(x)
        hessian = torch.func.hessian(lambda p: _loss(self.model, p, x, y))(dict(self.model.named_parameters()))
        return jacobian, hessian["2.bias"]["2.bias"]

    return Lambda(forward, model=_two_layers()), _pair


@pattern
def forward_derivative():
    def forward(self, x, v):
        return torch.func.jvp(self.model, (x,), (v,))

    return Lambda(forward, model=_two_layers()), lambda: (torch.randn(5, 4), torch.randn(5, 4))


@pattern
def physics_informed():
    def forward(self, x):
        def u(x):
            return self.model(x[None])[0]

        slope = torch.func.vmap(torch.func.grad(u))(x)
        curve = torch.func.vmap(torch.func.grad(torch.func.grad(u)))(x)
        return (curve + slope).square().mean()

    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    return Lambda(forward, model=nn.Sequential(model, nn.Flatten(0))), rand(6)


# ---------------------------------------------------------------------------------------------------------------------
# Quantization, nested tensors.
@pattern
def fake_quantization():
    def forward(self, x):
        weight = torch.fake_quantize_per_tensor_affine(self.linear.weight, 0.1, 0, -128, 127)
        return F.linear(x, weight, self.linear.bias)

    return Lambda(forward, linear=nn.Linear(4, 2)), rand(3, 4)


@pattern
def quantization_aware_training():
    from torch.ao import quantization

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant, self.dequant = quantization.QuantStub(), quantization.DeQuantStub()
            self.linear, self.relu = nn.Linear(4, 4), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.dequant(self.relu(self.linear(self.quant(x))))

    model = Model().train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        quantization.prepare_qat(model, inplace=True)
    return model, rand(3, 4)


@pattern
def quantization_observers():
    from torch.ao import quantization

    def forward(self, x):
        return self.minmax(self.linear(x)), self.moving(x), self.channels(x)

    parts = {"minmax": quantization.MinMaxObserver(), "moving": quantization.MovingAverageMinMaxObserver()}
    parts["channels"] = quantization.MovingAveragePerChannelMinMaxObserver(ch_axis=1)
    return Lambda(forward, linear=nn.Linear(4, 4), **parts), rand(3, 4)


@pattern
def nested_tensor_made_inside():
    def forward(self, *xs):
        nested = torch.nested.as_nested_tensor(list(xs), layout=torch.jagged)
        return self.linear(nested).to_padded_tensor(0.0)

    return Lambda(forward, linear=nn.Linear(4, 2)), lambda: tuple(torch.randn(n, 4) for n in (5, 3, 2))


@pattern
def nested_tensor_of_offsets():
    def forward(self, x, offsets):
        nested = torch.nested.nested_tensor_from_jagged(x, offsets)
        return self.linear(nested).values()

    return Lambda(forward, linear=nn.Linear(4, 2)), lambda: (torch.randn(10, 4), torch.tensor([0, 5, 8, 10]))


class Output(NamedTuple):
    logits: Tensor
    hidden: tuple[Tensor, ...]


@pattern
def named_results():
    def forward(self, x):
        hidden = [x]
        for layer in self.layers:
            hidden.append(torch.tanh(layer(hidden[-1])))
        return Output(self.head(hidden[-1]), tuple(hidden))

    return Lambda(forward, layers=nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), head=nn.Linear(4, 2)), rand(3, 4)


@pattern
def lazy_layers_after_their_first_call():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    model(torch.randn(3, 5))
    return model, rand(3, 5)


@pattern
def stochastic_depth():
    def forward(self, x):
        for block in self.blocks:
            keep = torch.bernoulli(torch.full((x.shape[0], 1), 0.8))
            x = x + keep / 0.8 * block(x)
        return x

    return Lambda(forward, blocks=nn.ModuleList(nn.Linear(4, 4) for _ in range(3))), rand(3, 4)


@pattern
def diffusion_step():
    def forward(self, x):
        t = torch.randint(0, 10, (x.shape[0],))
        noise = torch.randn_like(x)
        level = self.levels[t].view(-1, 1)
        return F.mse_loss(self.model(level.sqrt() * x + (1 - level).sqrt() * noise), noise)

    model = Lambda(forward, model=nn.Linear(4, 4))
    model.register_buffer("levels", torch.linspace(0.9, 0.1, 10))
    return model, rand(3, 4)


@pattern
def contrastive_loss():
    def forward(self, a, b):
        a, b = F.normalize(self.encode(a), dim=-1), F.normalize(self.encode(b), dim=-1)
        logits = a @ b.t() * self.scale.exp()
        target = torch.arange(len(a))
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2

    return Lambda(forward, encode=nn.Linear(4, 3), scale=nn.Parameter(torch.zeros(()))), lambda: (
        torch.randn(3, 4),
        torch.randn(3, 4),
    )


@pattern
def train_step_inside():
    """The optimizer's step is part of the program."""

    def forward(self, x):
        loss = self.linear(x).square().mean()
        gradients = torch.autograd.grad(loss, list(self.linear.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(self.linear.parameters(), gradients, strict=True):
                parameter.sub_(gradient, alpha=0.1)
        return loss.detach()

    return Lambda(forward, linear=nn.Linear(4, 2)), rand(3, 4)


@pattern
def linear_algebra():
    def forward(self, x):
        gram = x.t() @ x + self.ridge.exp() * torch.eye(4)
        return torch.linalg.solve(gram, x.t()), torch.linalg.cholesky(gram), torch.logdet(gram), torch.linalg.pinv(gram)

    return Lambda(forward, ridge=nn.Parameter(torch.zeros(()))), rand(6, 4)


@pattern
def sorting_and_choosing():
    def forward(self, x):
        y = self.linear(x)
        values, places = y.topk(3, -1)
        return values, places, y.sort(-1).values, y.median(-1).values, y.quantile(0.3, -1), y.masked_fill(y < 0, 0.0)

    return Lambda(forward, linear=nn.Linear(4, 5)), rand(3, 4)
