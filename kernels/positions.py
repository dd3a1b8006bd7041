"""Where a token stands: sinusoids that are added to its state, or angles that turn q and k."""

import torch


def rope_angles(positions, head_dim, theta, scaling=()):
    """position * theta^(-2i/K), i in 0..K/2: (..., T) -> (..., T, K/2), float64 where there is."""
    exact = torch.float32 if positions.device.type == "mps" else torch.float64
    even = torch.arange(0, head_dim, 2, device=positions.device, dtype=exact)
    rates = theta ** (-even / head_dim)
    if scaling:
        # Pairs that turn less than `low` times in `length` positions are slowed down by `factor`,
        # those that turn more than `high` times stay; between, a blend [Llama 3.1's code].
        factor, low, high, length = scaling
        kept = ((length * rates / (2 * torch.pi) - low) / (high - low)).clamp(0, 1)
        rates = rates * (kept + (1 - kept) / factor)
    return positions[..., None].to(exact) * rates


def sinusoids(positions, width):
    """(..., T) -> (..., T, D): sine on even, cosine on odd dimensions [Vaswani et al. 2017]."""
    angles = rope_angles(positions, width, 10000.0)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., :width]


def rope(positions, head_dim, theta, scaling=()):
    """(..., T) -> cosines and sines (..., T, 1, K) that `rotate` takes [Su et al. 2021]."""
    angles = rope_angles(positions, head_dim, theta, scaling)
    angles = torch.cat([angles, angles], -1).unsqueeze(-2)
    return angles.cos(), angles.sin()


def rotate(x, angles):
    """Turn x (..., T, heads, K) by its positions: i and i + K/2 are the coordinates of a plane."""
    cosine, sine = angles
    left, right = x.chunk(2, -1)
    return x * cosine.to(x.dtype) + torch.cat([-right, left], -1) * sine.to(x.dtype)
