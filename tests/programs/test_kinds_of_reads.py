"""More programs that look at their data, of the kinds that models are made of, each as in eager over ten calls."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from programs.test_checked_reads import aot, compare, values

PROGRAMS = {}


def program(arguments, most=2):
    """Put a function, or what makes a module, into the table, with how many programs may be made for it."""

    def register(fn):
        assert fn.__name__ not in PROGRAMS
        PROGRAMS[fn.__name__] = fn, arguments, most
        return fn

    return register


def integers(n, most, *shape):
    """Other whole numbers at each call."""
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(n))


@program(lambda n: (values(n, 4, 8),), 4)
class ExitByConfidence(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3)) for _ in range(3)
        )
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

    def forward(self, x):
        for b, h in zip(self.blocks, self.heads, strict=False):
            x = b(x)
            y = h(x).softmax(-1)
            if y.max(-1).values.mean() > 0.5:
                return y
        return y


@program(lambda n: (values(n, 3).detach().abs() + 1,), 20)
def newton_quadratic(a):
    x = torch.ones(3, requires_grad=True)
    k = 0
    while k < 30:
        f = (x**3 - a).square().sum()
        (g,) = torch.autograd.grad(f, x, create_graph=False)
        if g.norm().item() < 1e-2:
            break
        x = (x - 0.02 * g).detach().requires_grad_()
        k += 1
        if k > 5:
            break
    return x.detach(), k


@program(lambda n: (values(n, 3, 3),), 6)
def newton_schulz(x):
    a = x @ x.T + torch.eye(3) * 3
    y = a / a.norm()
    z = torch.eye(3)
    for _i in range(8):
        t = 0.5 * (3 * torch.eye(3) - z @ y)
        y, z = y @ t, t @ z
        if (z @ y - torch.eye(3)).abs().max() < 0.05:
            break
    return y * a.norm().sqrt()


@program(lambda n: (values(n, 5, 5), values(n + 3, 5)), 8)
def sinkhorn_log(c, m):
    f = torch.zeros(5)
    g = torch.zeros(5)
    for _ in range(20):
        f0 = f
        f = -torch.logsumexp(g[None] - c, 1)
        g = -torch.logsumexp(f[:, None] - c, 0)
        if (f - f0).abs().sum() < 1e-1:
            break
    return (f[:, None] + g[None] - c).exp() * m


@program(lambda n: (values(n, 6, 2).detach().abs(), values(n + 1, 6).detach()), 10)
def nms(boxes, scores):
    b = torch.cat([boxes, boxes + 1], 1)
    order = scores.argsort(descending=True)
    keep = []
    while order.numel() > 0:
        i = order[0]
        keep.append(i)
        if order.numel() == 1:
            break
        rest = order[1:]
        lt = torch.maximum(b[i, :2], b[rest, :2])
        rb = torch.minimum(b[i, 2:], b[rest, 2:])
        inter = (rb - lt).clamp(min=0).prod(1)
        order = rest[inter / (2 - inter) < 0.3]
    return torch.stack(keep), b[torch.stack(keep)]


@program(lambda n: (values(n, 6, 2).detach().abs(), values(n + 1, 6).detach()), 10)
def nms_by_mask(boxes, scores):
    idx = scores.argsort(descending=True)
    dead = torch.zeros(6, dtype=torch.bool)
    keep = []
    for k in range(6):
        i = idx[k].item()
        if dead[i]:
            continue
        keep.append(i)
        dead |= (boxes - boxes[i]).norm(dim=1) < 0.5
    return torch.tensor(keep), scores[torch.tensor(keep)]


@program(lambda n: (values(n, 6, 4),), 1)
class MoeStacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3, bias=False)
        self.up = nn.Parameter(torch.randn(3, 8, 4))
        self.down = nn.Parameter(torch.randn(3, 4, 8))

    def forward(self, x):
        w, sel = self.gate(x).softmax(-1).topk(2)
        w = w / w.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        mask = F.one_hot(sel, 3).permute(2, 1, 0)
        for e in range(3):
            pos, tok = torch.where(mask[e])
            h = F.linear(F.silu(F.linear(x[tok], self.up[e])), self.down[e]) * w[tok, pos, None]
            out.index_add_(0, tok, h)
        return out


@program(lambda n: (values(n, 6, 4),), 10)
class MoeHit(nn.Module):
    """transformers' loop over the experts that are hit."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3, bias=False)
        self.up = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x):
        w, sel = self.gate(x).softmax(-1).topk(1)
        out = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(sel, 3).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for e in hit:
            e = e[0]
            pos, tok = torch.where(mask[e])
            out.index_add_(0, tok, (x[tok] @ self.up[e]) * w[tok, pos, None])
        return out


@program(lambda n: (values(n, 6, 4),), 1)
class MoeList(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(3))

    def forward(self, x):
        p, c = self.gate(x).max(-1)
        out = x.clone()
        for i, e in enumerate(self.experts):
            m = c == i
            out[m] = e(x[m]) * p[m].unsqueeze(-1)
        return out


@program(lambda n: (values(n, 6, 4),), 10)
class MoeSkipEmpty(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        c = self.gate(x).argmax(-1)
        out = torch.zeros_like(x)
        for i, e in enumerate(self.experts):
            idx = (c == i).nonzero(as_tuple=True)[0]
            if idx.numel() == 0:
                continue
            out = out.index_copy(0, idx, e(x[idx]))
        return out


@program(lambda n: (values(n, 8, 4),), 10)
class MoeSplit(nn.Module):
    """Sorted tokens, split by counts that are read."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        c = self.gate(x).argmax(-1)
        order = c.argsort(stable=True)
        counts = torch.bincount(c, minlength=3).tolist()
        parts = [e(t) for e, t in zip(self.experts, x[order].split(counts), strict=False)]
        y = torch.cat(parts)
        return torch.zeros_like(y).index_copy(0, order, y)


@program(lambda n: (values(n, 4),), 10)
class WrittenBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros((), dtype=torch.long))
        self.register_buffer("ema", torch.zeros(4))

    def forward(self, x):
        self.n += 1
        if self.n.item() % 3 == 0:
            self.ema.zero_()
        self.ema.mul_(0.9).add_(x.detach(), alpha=0.1)
        if self.ema.norm() > 0.3:
            return x * self.ema
        return x - self.ema


@program(lambda n: (values(n, 4),), 2)
class InitializedOnce(nn.Module):
    """Activation normalization: data decide at the first call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ready", torch.tensor(False))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        if not self.ready:
            self.mean.copy_(x.detach().mean())
            self.ready.fill_(True)
        return x - self.mean


@program(lambda n: (values(n, 4, 5),), 3)
def mask_with_gradients_in_place(x):
    y = x.sigmoid().clone()
    y[y > 0.5] = y[y > 0.5] * 2
    y[y < 0.2] *= 3
    return y


@program(lambda n: (values(n, 4, 5), values(n + 1, 5)), 8)
def mask_rows_in_place(x, r):
    y = x * 1
    m = y.detach().sum(1) > 0
    y[m] = r
    y[~m, 1:3] += r[:2]
    return y


@program(lambda n: (values(n, 6), values(n + 1, 6)), 1)
def masked_put_accumulate(x, v):
    y = x.clone()
    m = x.detach() > 0
    y.index_put_((m,), v[m].exp(), accumulate=True)
    return y


@program(
    lambda n: (torch.tensor([[1.0, float("nan"), 2], [1, float("inf"), -0.0], [0, 1, 2]])[n % 3].requires_grad_(),), 3
)
def nan_inf(x):
    if torch.isnan(x).any():
        return x.nan_to_num(0.0)
    if not torch.isfinite(x).all():
        return x.clamp(-5, 5)
    return x * 2


@program(
    lambda n: (torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.5])[n % 6].requires_grad_(),), 8
)
def float_decisions(x):
    v = x.item()
    if math.isnan(v):
        return x * 0
    if math.isinf(v):
        return x.clone().fill_(3) + x * 0
    return x * (2 if math.copysign(1, v) > 0 else 3)


@program(lambda n: (values(n, 5), torch.tensor(n % 7)), 7)
def guarded(x, i):
    k = int(i)
    return x[k] * 2 if k < 5 else x.sum()


@program(lambda n: (values(n, 5), torch.tensor(n % 7)), 2)
def guarded_gather(x, i):
    if i < 5:
        return x.gather(0, i[None]) * 2
    return x.sum()


@program(lambda n: (values(n, 5), torch.tensor(n % 7)), 2)
def embedding_guarded(w, i):
    if (i >= 5).any():
        return w.sum()
    return F.embedding(i, w[:, None])


@program(lambda n: (values(n, 4, 6), torch.tensor([6, 1 + n % 3, 3, 2])), 10)
def by_lengths(x, lengths):
    return torch.stack([row[:k].mean() for row, k in zip(x, lengths.tolist(), strict=False)])


@program(lambda n: (values(n, 4, 6), torch.tensor([2 + n % 3, 1 + n % 3, 3, 2])), 4)
def max_length(x, lengths):
    m = int(lengths.max())
    return (x[:, :m] * (torch.arange(m) < lengths[:, None])).sum()


@program(lambda n: (values(n, 4, 6, 3), torch.tensor([6, 4, 3, 1 + n % 3])), 10)
class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)

    def forward(self, x, lengths):
        p = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=True)
        y, h = self.rnn(p)
        y, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=True)
        return y, h


@program(lambda n: (values(n, 4, 6, 3), torch.tensor([1 + n % 3, 4, 3, 6])), 10)
class PackedUnsorted(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3, 4, batch_first=True, bidirectional=True)

    def forward(self, x, lengths):
        p = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, (h, _c) = self.rnn(p)
        y, ll = nn.utils.rnn.pad_packed_sequence(y, batch_first=True, total_length=6)
        return y, h, ll


@program(
    lambda n: (
        values(n, 8, 2, 5),
        torch.tensor([[1, 2, 3], [2, 1, 4]]),
        torch.tensor([8, 6 + n % 2]),
        torch.tensor([3, 1 + n % 3]),
    ),
    10,
)
def ctc(x, t, il, tl):
    return F.ctc_loss(x.log_softmax(-1), t, il, tl)


@program(
    lambda n: (
        values(n, 8, 2, 5),
        torch.tensor([1, 2, 3, 2, 1, 4]),
        torch.tensor([8, 6 + n % 2]),
        torch.tensor([3, 3]),
    ),
    10,
)
class CtcModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.loss = nn.CTCLoss(zero_infinity=True, reduction="sum")
        self.p = nn.Linear(5, 5)

    def forward(self, x, t, il, tl):
        return self.loss(self.p(x).log_softmax(-1), t, il, tl)


@program(lambda n: (values(n, 8, 3), torch.tensor([[3, 3, 2], [1, 5, 2], [0, 8, 0]])[n % 3]), 10)
def split_by_read(x, s):
    return [p.sum(0) * (i + 1) for i, p in enumerate(x.split(s.tolist()))][1]


@program(lambda n: (values(n, 8, 3), torch.tensor([[3, 5], [1, 2], [0, 8]])[n % 3]), 10)
def tensor_split_by_read(x, s):
    a, b, c = x.tensor_split(s)
    return a.sum(), b * 2, c.sum(0)


@program(lambda n: (integers(n, 5, 8), values(n, 8)), 10)
def unique_variants(i, x):
    u = torch.unique(i)
    v, c = torch.unique(i, return_counts=True, sorted=True)
    w, inv = torch.unique_consecutive(i, return_inverse=True)
    s = torch.zeros(len(u)).index_add(0, torch.searchsorted(u, i), x)
    return u, v * 2, c, w, inv, s


@program(lambda n: (integers(n, 2, 6, 2), values(n, 6)), 10)
def unique_rows(i, x):
    u, inv, c = torch.unique(i, dim=0, return_inverse=True, return_counts=True)
    return u, torch.zeros(u.shape[0]).index_add(0, inv, x) / c


@program(lambda n: (integers(n, 2, 2, 6),), 10)
def unique_columns(i):
    return torch.unique(i, dim=1), torch.unique_consecutive(i, dim=1, return_counts=True)[1]


@program(lambda n: (values(n, 3, 6),), 2)
def corrcoef(x):
    return torch.corrcoef(x)


@program(lambda n: (values(n, 3, 6),), 2)
def cov(x):
    return torch.cov(x, fweights=torch.tensor([1, 2, 1, 1, 1, 2]))


@program(lambda n: (values(n, 3, 6), 1 + integers(n, 3, 6)), 2)
def cov_weights(x, w):
    return torch.cov(x, fweights=w)


@program(lambda n: (values(n, 20).detach(),), 2)
def histogram(x):
    h, e = torch.histogram(x, 5)
    return h, e


@program(lambda n: (values(n, 20).detach(),), 2)
def histc(x):
    return torch.histc(x, 5), torch.histc(x, 4, -1, 1)


@program(lambda n: (values(n, 4),), 2)
def combinations(x):
    return torch.combinations(x).sum(0), torch.combinations(x, 3, with_replacement=True)


@program(lambda n: (torch.tensor([n % 3, 2]), values(n, 4)), 4)
def small_numpy(i, x):
    a = i.numpy()
    return x[int(a[0])] * int(a.sum())


@program(lambda n: (torch.tensor([n % 3, 2]), values(n, 4)), 4)
def numpy_asarray(i, x):
    a = np.asarray(i)
    return x * float(a.max())


@program(lambda n: (torch.tensor([n % 3, 2]), values(n, 4)), 4)
def small_tolist(i, x):
    a = (i + 1).tolist()
    return x[: a[0]] * a[1]


@program(lambda n: (torch.tensor([[n % 3, 2], [1, 0]]), values(n, 4)), 4)
def nested_tolist(i, x):
    (a, b), (c, d) = i.tolist()
    return x[a] + x[b] * c - d


@program(lambda n: (values(n, 4),), 10)
def float_tolist(x):
    a = x.detach().tolist()
    return x * max(a)


@program(lambda n: (values(n, 3, 4),), 10)
class LayerDropTensor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            if torch.rand(()).item() < 0.4:
                continue
            x = x + F.dropout(layer(x), 0.2)
        return x


@program(lambda n: (values(n, 3, 4),), 8)
def stochastic_depth(x):
    keep = torch.bernoulli(torch.tensor(0.5))
    return x * 2 if keep else x


@program(lambda n: (values(n, 3),), 12)
def distributions(x):
    d = torch.distributions.Normal(x, x.detach().abs() + 1)
    s = d.rsample()
    return d.log_prob(s), s


@program(lambda n: (values(n, 3),), 12)
def categorical(x):
    d = torch.distributions.Categorical(logits=x)
    s = d.sample()
    return d.log_prob(s), d.entropy(), s


@program(lambda n: (values(n, 3).detach().abs() + 0.1,), 12)
def dist_validated(x):
    return (
        torch.distributions.Gamma(x, torch.ones(3)).log_prob(x + 1),
        torch.distributions.Beta(x, x).mean,
        torch.distributions.Dirichlet(x).entropy(),
    )


@program(lambda n: (values(n, 3, 3),), 12)
def mvn(x):
    d = torch.distributions.MultivariateNormal(torch.zeros(3), x @ x.T + torch.eye(3))
    return d.log_prob(torch.ones(3)), d.rsample()


@program(lambda n: (values(n, 4).detach().sigmoid(),), 12)
def bernoulli_branch(p):
    d = torch.distributions.Bernoulli(probs=p)
    s = d.sample()
    return s.sum() if s[0] == 1 else d.log_prob(s)


@program(lambda n: (values(n, 6),), 3)
def nonzero_variants(x):
    a = torch.nonzero(x > 0, as_tuple=True)[0]
    b = torch.argwhere(x < 0)
    return x[a].sum() - x[b].sum(), torch.count_nonzero(x > 0)


@program(lambda n: (values(n, 6),), 3)
def size_in_arithmetic(x):
    y = x[x > 0]
    n = y.shape[0]
    return y.sum() / max(n, 1) + torch.arange(n).sum() + torch.ones(n + 1).mean()


@program(lambda n: (values(n, 6),), 6)
def size_in_python(x):
    y = x[x > 0]
    if len(y) > 3:
        return y[:3].sum()
    return sum(y) if len(y) else x.sum()


@program(lambda n: (values(n, 6),), 3)
def cat_masked(x):
    y = torch.cat([x[x > 0], x[x <= 0]])
    return y * torch.arange(6)


@program(lambda n: (values(n, 6, 3), values(n + 1, 3, 2)), 3)
def masked_matmul(x, w):
    rows = x[x[:, 0] > 0]
    return (rows @ w).relu().sum(0), F.layer_norm(rows, (3,)).sum()


@program(lambda n: (values(n, 6, 3), integers(n, 3, 6)), 3)
def masked_cross_entropy(x, t):
    keep = t != 2
    return F.cross_entropy(x[keep], t[keep], reduction="sum")


@program(lambda n: (values(n, 6, 4), values(n + 1, 4, 4)), 3)
def masked_attention(x, w):
    y = x[x.detach().sum(1) > 0]
    return F.scaled_dot_product_attention(y[None], (y @ w)[None], y[None]).sum()


@program(lambda n: (values(n, 2, 3, 6),), 3)
def masked_conv(x):
    y = x[:, :, x.detach()[0, 0] > 0]
    return F.pad(y, (2, 2)).cumsum(-1).sum()


@program(lambda n: (values(n, 5, 5),), 12)
def triu_read(x):
    k = int((x.detach() > 0).sum()) % 3
    return x.triu(k)


@program(lambda n: (values(n, 5),), 12)
def range_of_read(x):
    y = x
    for i in range(int((x > 0).sum())):
        y = y * (i + 1)
    return y


@program(lambda n: (values(n, 5),), 12)
def full_of_read(x):
    k = int((x > 0).sum())
    return torch.zeros(k).sum() + x[:k].sum() + torch.full((2,), k).sum(), k


@program(lambda n: (values(n, 5),), 12)
def view_by_read(x):
    k = int((x > 0).sum())
    return x.expand(k, 5).sum(0), x.repeat(k).sum()


@program(lambda n: (values(n, 5),), 3)
def grad_norm_clip(x):
    g = x.detach().norm()
    c = 1.0 / (g + 1e-6)
    if c < 1:
        return x * c
    return x


@program(lambda n: (values(n, 5),), 3)
def python_operators(x):
    s = x.sum()
    a = s > 0 and x[0] > 0
    b = not (x[1] < 0)
    return x * (2 if a else 1) * (3 if b else 1)


@program(lambda n: (values(n, 5),), 12)
def python_min_max(x):
    return max(x[0], x[1]) * min(x[2], x[3]) + sum(sorted([x[0], x[1]]))


@program(lambda n: (values(n, 5),), 12)
def fmt(x):
    return x * float(f"{x.detach().sum().item():.1f}")


@program(lambda n: (values(n, 4),), 3)
def allclose_branch(x):
    return x * 2 if torch.allclose(x, x + (1e-9 if n_even(x) else 1.0)) else x


def n_even(x):
    return bool(x[0] > 0)


@program(lambda n: (values(n, 4),), 6)
def line_search(x):
    t = 1.0
    f0 = x.detach().square().sum()
    while (x.detach() - t * 3 * x.detach()).square().sum() > f0 and t > 0.1:
        t *= 0.5
    return x * t


@program(lambda n: (values(n, 3, 3),), 20)
def power_iteration(a):
    v = torch.ones(3)
    lam = 0.0
    m = a @ a.T
    for _i in range(12):
        w = m @ v
        new = w.norm()
        v = w / new
        if abs(new.item() - lam) < 0.5:
            break
        lam = new.item()
    return v * new


@program(lambda n: (values(n, 4),), 12)
def beam(x):
    t = []
    s = x.detach().softmax(0)
    for _ in range(2):
        k = int(torch.multinomial(s, 1))
        t.append(k)
        s = s.roll(1)
    return x[t]


@program(lambda n: (values(n, 4).detach(), values(n, 4)), 3)
def out_of_mask(o, x):
    torch.mul(x.detach(), 2, out=o)
    return o[o > 0].sum() * x


@program(lambda n: (values(n, 6),), 3)
def checkpointed(x):
    def f(y):
        return y.sin() * y

    y = checkpoint(f, x, use_reentrant=False)
    return y * 2 if y.sum() > 0 else y


@program(lambda n: (values(n, 6),), 3)
def checkpoint_reads(x):
    def f(y):
        return y.sin() if y.sum() > 0 else y.cos()

    return checkpoint(f, x, use_reentrant=False)


@program(lambda n: (values(n, 6),), 3)
def checkpoint_mask(x):
    def f(y):
        return y[y > 0].exp().sum()

    return checkpoint(f, x, use_reentrant=False) * 2


class ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, m):
        ctx.save_for_backward(m)
        return x * m

    @staticmethod
    def backward(ctx, g):
        (m,) = ctx.saved_tensors
        k = m.long().tolist()
        return g * m * (2 if k[0] else 1), None


@program(lambda n: (values(n, 4),), 1)
def constants_selected_by_constants(x):
    places, chosen = torch.tensor([1, 2, 3]), torch.tensor([True, False, True])
    return x[places[chosen]] * x[torch.tensor([True, False, True, True])].sum()


@program(lambda n: (values(n, 3), (values(n, 3).detach() > 0).float()), 8)
def backward_reads_forward(x, m):
    return ReadsInBackward.apply(x, m)


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_as_in_eager(name):
    compare(*PROGRAMS[name], aot)
