"""One transformer layer, used by both halves, in training as in serving."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from hplm.errors import InvalidInput
from hplm.model.config import BackboneConfig

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Adapt = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in ACTIVATIONS:
        raise InvalidInput(f"activation {name!r} is not supported; known are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def unchanged(x: Tensor) -> Tensor:
    return x


class Layer(nn.Module):
    """BERT's post-norm layer over tokens x hidden; attention and adapter are handed in.

    The adapter sits after the attention sub-layer, before the residual (HMI 3.2.2).
    """

    def __init__(self, config: BackboneConfig) -> None:
        super().__init__()
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.attention_out = nn.Linear(config.hidden, config.hidden)
        self.attention_norm = nn.LayerNorm(config.hidden, config.norm_eps)
        self.ffn_in = nn.Linear(config.hidden, config.intermediate)
        self.ffn_out = nn.Linear(config.intermediate, config.hidden)
        self.ffn_norm = nn.LayerNorm(config.hidden, config.norm_eps)
        self.activation = activation(config.activation)

    def forward(self, x: Tensor, attend: Attend, adapt: Adapt = unchanged) -> Tensor:
        attended = self.attention_out(attend(*self.qkv(x).chunk(3, dim=-1)))
        x = self.attention_norm(x + adapt(attended))
        return self.ffn_norm(x + self.ffn_out(self.activation(self.ffn_in(x))))
