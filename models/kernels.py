"""Operations of the model that have more than one form, all equal to rounding.

Which form runs depends on where: compiled CPU code, torch's own kernels, oneDNN's products. What
each is worth is measured in EXPERIMENTS.md; that they are equal is tested in tests/test_gpt.py.
"""

import math

import torch
import torch.nn.functional as F

CHUNK_BYTES = {"cpu": 2**21, "cuda": 2**29}  # float32 logits at a time: a core's cache; a GPU full
MIN_ROWS = 128  # fewer make the matrix products slow
VOCAB_MULTIPLE = {"cuda": 64}  # tensor cores want whole tiles; rows added to the head are zero


def compiled_for_cpu(x: torch.Tensor) -> bool:
    return torch.compiler.is_compiling() and x.device.type == "cpu"


def onednn_products(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and torch.get_float32_matmul_precision() != "highest"


def linear(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """x W^T + b. Compiled: the bias apart, where it is fused into what follows."""
    if layer.bias is None or not compiled_for_cpu(x):
        return layer(x)
    return F.linear(x, layer.weight) + layer.bias.to(x.dtype)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GPT-2's tanh form. Compiled: x sigmoid(2u) = x (1 + tanh u) / 2, for exp is vectorised and
    tanh hardly."""
    if not compiled_for_cpu(x):
        return F.gelu(x, approximate="tanh")
    return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x))


def attend(q_bhtk: torch.Tensor, k_bhtk: torch.Tensor, v_bhtk: torch.Tensor) -> torch.Tensor:
    """Causal softmax(q k^T / sqrt(K)) v, (B, H, T, K). Compiled, or with oneDNN's products (which
    make the backward pass of torch's CPU kernel ten times slower): as three plain products."""
    if not (compiled_for_cpu(q_bhtk) or onednn_products(q_bhtk)):
        return F.scaled_dot_product_attention(q_bhtk, k_bhtk, v_bhtk, is_causal=True)
    shape, (T, K) = v_bhtk.shape, q_bhtk.shape[2:]
    q, k, v = (x.flatten(0, 1) for x in (q_bhtk, k_bhtk, v_bhtk))
    future_tt = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    scores = torch.baddbmm(future_tt, q, k.mT, alpha=1 / math.sqrt(K))
    return torch.bmm(scores.softmax(-1).to(v.dtype), v).view(shape)


# a loop, unrolled, would be compiled for minutes and be no faster; torch.compiler.disable is the
# same but imports the compiler at once, a second in every process that only grows
@torch._disable_dynamo
def linear_cross_entropy(
    x_nd: torch.Tensor,
    head_vd: torch.Tensor,
    targets_n: torch.Tensor,
    rows: int = 0,
    multiple: int = 0,
) -> torch.Tensor:
    """Mean over N of -log softmax(x head^T)[target], in nats, without ever holding all logits.

    F.cross_entropy(F.linear(x, head), targets) for a few rows at a time (Liger's fused linear
    cross-entropy, arXiv 2410.10989): they stay in the cache, and their gradients are computed while
    they are there, already in the forward pass. Products in autocast's dtype where it is on, the
    rest in float32 or wider. rows: logits at a time; multiple: of which the vocabulary is made a
    multiple for the products; 0: what suits the device.
    """
    if not rows:
        rows = max(MIN_ROWS, CHUNK_BYTES.get(x_nd.device.type, 2**29) // (4 * len(head_vd)))
    wanted = torch.is_grad_enabled() and (x_nd.requires_grad or head_vd.requires_grad)
    device = x_nd.device.type
    pad = -len(head_vd) % (multiple or VOCAB_MULTIPLE.get(device, 1))
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_nd.dtype
    with torch.autocast(device, enabled=False):
        if wanted:
            return _LinearCrossEntropy.apply(x_nd, head_vd, targets_n, rows, pad, dtype)
        return chunks(x_nd, head_vd, targets_n, rows, pad, dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_nd, head_vd, targets_n, rows, pad, dtype):
        V, D = head_vd.shape
        dx_nd, dhead_vd = torch.empty_like(x_nd), head_vd.new_zeros(V + pad, D)
        loss = chunks(x_nd, head_vd, targets_n, rows, pad, dtype, (dx_nd, dhead_vd))
        ctx.save_for_backward(dx_nd, dhead_vd[:V])
        return loss

    @staticmethod
    def backward(ctx, grad):
        dx_nd, dhead_vd = ctx.saved_tensors
        return dx_nd * grad, dhead_vd * grad, None, None, None, None


def chunks(
    x_nd: torch.Tensor,
    head_vd: torch.Tensor,
    targets_n: torch.Tensor,
    rows: int,
    pad: int,
    dtype: torch.dtype,
    grads: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The mean loss; with `grads` (dx, dhead), its gradients are written into them:
    p = (softmax(logits) - onehot) / N, dx = p head, dhead = p^T x."""
    n, head = len(x_nd), F.pad(head_vd.to(dtype), (0, 0, 0, pad)) if pad else head_vd.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    total = torch.zeros((), dtype=wide, device=x_nd.device)
    for start in range(0, n, rows):
        at = slice(start, start + rows)
        x, target = x_nd[at].to(dtype), targets_n[at, None]
        p = F.linear(x, head).to(wide)  # logits; from here on in place, in the cache
        p[:, len(head_vd) :] = -math.inf  # of the rows added: probability 0
        at_target, top = p.gather(1, target), p.amax(1, keepdim=True)
        norm = p.sub_(top).exp_().sum(1, keepdim=True)
        total += (norm.log() + top - at_target).sum()
        if grads is None:
            continue
        p.mul_(1 / (n * norm)).scatter_add_(1, target, p.new_full((), -1 / n).expand(target.shape))
        p = p.to(dtype)
        dx_nd, dhead_vd = grads
        dx_nd[at] = p @ head
        if dhead_vd.dtype == dtype:
            dhead_vd.addmm_(p.T, x)
        else:
            dhead_vd += p.T @ x
    return total / n
