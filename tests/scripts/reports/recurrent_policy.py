"""A recurrent policy: arguments of steps times environments beside hidden states.

Source: https://github.com/ikostrikov/pytorch-a2c-ppo-acktr-gail/issues/193
"""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--out", default="model.pt")
args = parser.parse_args()

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
STEPS, ENVIRONMENTS, WIDTH = 4, 16, 16


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        return x + self.net(x)


class Policy(nn.Module):
    def __init__(self, observation=6, actions=3, depth=3):
        super().__init__()
        self.first = nn.Linear(observation, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(depth))
        self.gru = nn.GRUCell(WIDTH, WIDTH)
        self.actor, self.critic = nn.Linear(WIDTH, actions), nn.Linear(WIDTH, 1)

    def forward(self, x, hidden, masks):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        x, masks = x.view(-1, len(hidden), WIDTH), masks.view(-1, len(hidden), 1)
        outputs = []
        for step, mask in zip(x, masks, strict=True):
            hidden = self.gru(step, hidden * mask)
            outputs.append(hidden)
        x = torch.cat(outputs)
        return self.actor(x), self.critic(x), hidden


policy = Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=0.003, eps=1e-5)


def take(each, picked):
    return each[:, picked].flatten(0, 1)


for update in range(1, 6):
    rows = STEPS * ENVIRONMENTS
    observations, masks = (
        torch.randn(STEPS, ENVIRONMENTS, 6),
        (torch.rand(STEPS, ENVIRONMENTS, 1) > 0.2).double(),
    )
    hidden = torch.zeros(ENVIRONMENTS, WIDTH)
    with torch.no_grad():
        logits, values, _ = policy(observations.view(rows, -1), hidden, masks.view(rows, 1))
        actions = torch.distributions.Categorical(logits=logits).sample()
        old = torch.distributions.Categorical(logits=logits).log_prob(actions).view(STEPS, -1)
        returns = observations.sum(-1, keepdim=True)
        advantages = returns - values.view(STEPS, -1, 1)
        advantages = (advantages - advantages.mean()) / advantages.std()
    for picked in torch.randperm(ENVIRONMENTS).split(6):
        logits, values, _ = policy(take(observations, picked), hidden[picked], take(masks, picked))
        distribution = torch.distributions.Categorical(logits=logits)
        log = distribution.log_prob(take(actions.view(STEPS, -1), picked))
        ratio = (log - take(old, picked)).exp()
        gain = take(advantages, picked).squeeze(-1)
        surrogate = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        loss = (
            0.5 * (values - take(returns, picked)).square().mean()
            - surrogate
            - 0.01 * distribution.entropy().mean()
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
    print(f"update {update} loss {loss.item():.12f} surrogate {surrogate.item():.12f}")
torch.save(policy.state_dict(), args.out)
