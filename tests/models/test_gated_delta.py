"""A gated delta net alone: any course of prefill chunks and verify steps equals a loop over tokens, in float64.

The courses are those of `test_layers.py`: poisoned pages, rejected drafts, states on block boundaries.
"""

import torch
import torch.nn.functional as F
from hypothesis import given, settings

from hybrid_kv.models.mixers.gated_delta import GatedDeltaMixer
from tests.models.test_layers import NAME, courses


class Delta:
    """`GatedDeltaMixer` and the loop; as `test_layers.Mixer`."""

    dtype, poison, hidden, key_dim, value_dim = torch.float64, torch.nan, 5, 2, 3

    def __init__(self, kernel, rng):
        self.key_heads, self.shared = (int(n) for n in rng.integers(1, 3, 2))
        self.heads, self.scale = self.key_heads * self.shared, float(rng.integers(1, 3))
        sizes = (self.key_heads, self.heads, self.key_dim, self.value_dim, kernel)
        # A large epsilon: heads whose output happens to be small would magnify rounding.
        self.layer = GatedDeltaMixer(NAME, self.hidden, *sizes, int(rng.integers(1, 7)), 0.01, self.scale).double()
        for parameter in self.layer.parameters():
            parameter.copy_(torch.from_numpy(rng.normal(size=parameter.shape)))
        self.keys, self.values = self.key_heads * self.key_dim, self.heads * self.value_dim
        self.channels = 2 * self.keys + self.values
        self.state_shape = (self.heads, self.value_dim, self.key_dim)

    def draw(self, rng, count):
        return torch.from_numpy(rng.normal(size=(count, self.hidden)))

    def run(self, x, context):
        return self.layer(x, context)

    def plain(self, x):
        """Outputs, and window and state after 0, 1, … tokens."""
        layer, kernel = self.layer, self.layer.conv_weight.shape[1]
        window, state = torch.zeros(kernel - 1, self.channels).double(), torch.zeros(self.state_shape).double()
        outputs, windows, states = [], [window], [state]
        for token in x:
            conv_in, gate, beta, dt = layer.in_proj(token).split((self.channels, self.values, self.heads, self.heads))
            window = torch.cat([window, conv_in[None]])
            q, k, v = F.silu((window * layer.conv_weight.T).sum(0)).split((self.keys, self.keys, self.values))
            q, k, v = q.view(self.key_heads, -1), k.view(self.key_heads, -1), v.view(self.heads, -1)
            window, state, y = window[1:], state.clone(), []
            for h in range(self.heads):
                unit_q, unit_k = (
                    part / (part.dot(part) + 1e-6).sqrt() for part in (q[h // self.shared], k[h // self.shared])
                )
                decayed = state[h] * torch.exp(-layer.A_log[h].exp() * F.softplus(dt[h] + layer.dt_bias[h]))
                error = v[h] - decayed @ unit_k
                state[h] = decayed + self.scale * beta[h].sigmoid() * torch.outer(error, unit_k)
                read = state[h] @ unit_q / self.key_dim**0.5
                y.append(read / (read.square().mean() + 0.01).sqrt() * layer.norm.weight)
            outputs.append(layer.out_proj(torch.cat(y) * F.silu(gate)))
            windows.append(window)
            states.append(state)
        return torch.stack(outputs), windows, states


@settings(max_examples=settings.default.max_examples // 3)
@given(courses(Delta))
def test_any_course_equals_the_loop(course):
    while course.live():
        course.step()
