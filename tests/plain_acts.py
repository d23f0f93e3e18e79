"""Activations in plain torch, by the kinds of the kernels: what judges kernels, their twins and random programs."""

import torch
import torch.nn.functional as F

TORCH = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "srelu": lambda x: torch.relu(x).square(),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "clamped_silu": lambda g: g.clamp(max=7.0) * torch.sigmoid(1.702 * g.clamp(max=7.0)),
    "situ": lambda g: 1.702 * torch.tanh(g / 1.702) * torch.sigmoid(g),
}
"""Activations, those of gates included."""

UPS = {
    "clamped_swiglu": lambda u: u.clamp(-7, 7) + 1,
    "situglu": lambda u: 7 * torch.tanh(u / 7),
}
"""What the other half goes through, of gated kinds where that is no identity."""
