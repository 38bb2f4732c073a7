"""Models of PyTorch that tests make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="NOT CHECKED: torch is not installed")

from torch import Tensor, nn  # noqa: E402


class Applied(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arrays: Any) -> Any:
        return self.function(*arrays)


class Residual(nn.Module):
    """A block with a sum."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.second = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(torch.relu_(self.first(x))) + x)


class Small(nn.Module):
    """A bit of everything that networks for images have: a residual, a gate, branches, a transpose, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(True)
        )
        self.block = Residual(8)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.Hardsigmoid())
        self.depthwise = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8, padding="same"), nn.SiLU(inplace=True))
        self.pool = nn.MaxPool2d(3, 2, padding=1, ceil_mode=True)
        self.up = nn.ConvTranspose2d(16, 4, 2, stride=2)
        self.dropout = nn.Dropout()
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, scale: float = 2.0) -> dict[str, Tensor]:
        x = self.block(self.stem(x))
        y = self.depthwise(x * self.gate(x)) * scale
        up = self.up(torch.cat([self.pool(x), self.pool(y)], dim=1))
        scores = self.head(self.dropout(torch.flatten(y.mean((2, 3)), 1)))
        return {"scores": torch.softmax(scores, -1), "up": up}


def seeded(model: nn.Module) -> nn.Module:
    """A model for evaluation, whose parameters and statistics are drawn at random."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if not value.is_floating_point():
                continue
            drawn = (
                torch.randn(value.shape, generator=generator) / max(value[0].numel() if value.dim() else 1, 1) ** 0.5
            )
            value.copy_(1 + 0.2 * drawn.abs() if name.endswith("running_var") else drawn)
    return model.eval()


def numbers(shape: tuple[int, ...]) -> Any:
    """The same random tensor every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))
