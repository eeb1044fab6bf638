"""A small mixture-of-experts language model: causal attention with rotary positions, RMSNorm, SwiGLU experts."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class ModelConfig:
    vocabulary: int = 2048
    layers: int = 6
    hidden: int = 256
    heads: int = 4
    experts: int = 32
    top_k: int = 4
    intermediate: int = 96
    context: int = 512
    dropout: float = 0.1


@dataclass
class MoERecord:
    """What one MoE block saw and returned; kept only while MoE.records is a list."""

    hidden_states: torch.Tensor  # [N, H] BF16
    topk_ids: torch.Tensor  # [N, k] int64
    topk_weights: torch.Tensor  # [N, k] FP32, sums to 1
    output: torch.Tensor  # [N, H] BF16


class MoE(nn.Module):
    """Softmax router, the top k renormalised; output[t] = sum over j of weights[t, j] * expert[ids[t, j]](x[t])."""

    def __init__(self, config):
        super().__init__()
        self.top_k = config.top_k
        self.experts = config.experts
        self.gate = nn.Parameter(0.02 * torch.randn(config.experts, config.hidden))
        self.gate_up_proj = nn.Parameter(0.02 * torch.randn(config.experts, 2 * config.intermediate, config.hidden))
        self.down_proj = nn.Parameter(0.02 * torch.randn(config.experts, config.hidden, config.intermediate))
        self.records = None

    def route(self, x):
        """Ids, weights, and the load-balancing loss of https://arxiv.org/abs/2101.03961: 1 for an even load."""
        with torch.autocast(x.device.type, enabled=False):
            probabilities = F.softmax(F.linear(x.float(), self.gate), dim=-1)
            weights, ids = probabilities.topk(self.top_k, dim=-1)
            weights = weights / weights.sum(dim=-1, keepdim=True)
            share = torch.bincount(ids.flatten(), minlength=self.experts).float() / ids.numel()
            balance = self.experts * (share * probabilities.mean(dim=0)).sum()
        return ids, weights, balance

    def apply_experts(self, x, ids, weights):
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.experts).tolist()
        rows = x.index_select(0, order // self.top_k)
        # unbind rather than indexing: its backward stacks 32 gradients once instead of adding 32 full-size ones.
        gate_up = self.gate_up_proj.to(x.dtype).unbind()
        down = self.down_proj.to(x.dtype).unbind()
        outputs = []
        for part, w_gate_up, w_down in zip(rows.split(counts), gate_up, down):
            gate, up = F.linear(part, w_gate_up).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * up, w_down))
        routes = torch.cat(outputs).index_select(0, order.argsort()).view(*ids.shape, -1)
        return (routes.float() * weights.unsqueeze(-1)).sum(dim=1).to(x.dtype)

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1]).to(torch.bfloat16)
        ids, weights, balance = self.route(x)
        y = self.apply_experts(x, ids, weights)
        if self.records is not None:
            if y.requires_grad:
                y.retain_grad()
            self.records.append(MoERecord(x, ids, weights, y))
        return y.view(shape), balance


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)
        half = config.hidden // config.heads // 2
        angle = torch.outer(torch.arange(config.context), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def rotate(self, x):
        """Rotary positions (https://arxiv.org/abs/2104.09864) on [batch, heads, time, dim]."""
        a, b = x.float().chunk(2, dim=-1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)

    def forward(self, x):
        batch, time, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, hidden))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.moe = MoE(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        y, balance = self.moe(self.moe_norm(x))
        return x + self.dropout(y), balance


class LanguageModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-6)
        nn.init.normal_(self.embedding.weight, std=0.02)
        for layer in self.layers:
            nn.init.normal_(layer.attention.qkv.weight, std=0.02)
            nn.init.normal_(layer.attention.out.weight, std=0.02 / (2 * config.layers) ** 0.5)

    def forward(self, tokens):
        """Tokens [batch, time] -> FP32 logits [batch, time, vocabulary] and the layers' mean balance loss."""
        x = self.embedding(tokens)
        balances = []
        for layer in self.layers:
            x, balance = layer(x)
            balances.append(balance)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return logits.float(), torch.stack(balances).mean()
