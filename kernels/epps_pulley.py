"""How far points are from a standard normal: what SIGReg keeps small."""

import torch
import torch.nn.functional as F

from .cross_entropy import upcast

REACH = 3.0
POINTS = 17


def epps_pulley(z, seed, slices=256):
    """(N, D) -> (): the mean over random directions, drawn by `seed`, of
    N * integral |phi(t) - exp(-t^2/2)|^2 exp(-t^2/2) dt over |t| <= REACH, phi being the
    characteristic function of the projections [Epps & Pulley 1983; LeJEPA]."""
    z = upcast(z)
    # Drawn where z is: numbers from another device would have to be waited for.
    chance = torch.Generator(z.device).manual_seed(seed)
    directions = torch.randn(z.shape[1], slices, generator=chance, device=z.device,
                             dtype=torch.float64)
    directions = F.normalize(directions, dim=0).to(z.dtype)  # (D, slices)
    t = torch.linspace(0, REACH, POINTS, device=z.device, dtype=z.dtype)
    normal = (-t.square() / 2).exp()
    with torch.autocast(z.device.type, enabled=False):
        angle = (z @ directions)[..., None] * t  # (N, slices, points)
        error = (angle.cos().mean(0) - normal).square() + angle.sin().mean(0).square()
        # Twice the half [0, REACH]: the integrand is even.
        return 2 * len(z) * torch.trapezoid(error * normal, t).mean()
