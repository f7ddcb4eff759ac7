"""Reinforcement learning: several losses and optimizers, target networks, rollouts between the steps."""

import copy
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical, Normal

from benchmarks.users.training import Training, mlp, program


class ActorCritic(nn.Module):
    def __init__(self, actions: int = 6, width: int = 128) -> None:
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(2, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten(),
            nn.Linear(512, width), nn.ReLU(),
        )  # fmt: skip
        self.actor, self.critic = nn.Linear(width, actions), nn.Linear(width, 1)

    def forward(
        self, x: torch.Tensor, action: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = self.trunk(x)
        chances = Categorical(logits=self.actor(hidden))
        action = chances.sample() if action is None else action
        return action, chances.log_prob(action), chances.entropy(), self.critic(hidden).squeeze(-1)


@program
def ppo(training: Training) -> dict[str, Any]:
    """Rollouts without gradients by the same model, epochs of shuffled parts, a clipped objective."""
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), 2.5e-4, eps=1e-5)

    def policy_loss(
        model: nn.Module, seen: torch.Tensor, action: torch.Tensor, old: torch.Tensor, gain: torch.Tensor,
        returns: torch.Tensor, values: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        _, log_prob, entropy, value = model(seen, action)
        ratio = (log_prob - old).exp()
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        policy = torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)).mean()
        clipped = values + (value - values).clamp(-0.2, 0.2)
        critic = 0.5 * torch.max((value - returns) ** 2, (clipped - returns) ** 2).mean()
        return policy - 0.01 * entropy.mean() + 0.5 * critic

    train_step = training.step(policy_loss)
    losses = []
    for iteration in range(2):
        for group in optimizer.param_groups:
            group["lr"] = (1 - iteration / 4) * 2.5e-4
        seen, rewards = torch.randn(8, 16, 2, 16, 16), torch.randn(8, 16)
        with torch.no_grad():
            rolled = [model(x) for x in seen]
            actions, old, _, values = (torch.stack(part) for part in zip(*rolled, strict=True))
            gains, last = torch.zeros_like(rewards), torch.zeros(16)
            for t in reversed(range(7)):
                delta = rewards[t] + 0.99 * values[t + 1] - values[t]
                gains[t] = last = delta + 0.99 * 0.95 * last
        data = [part.flatten(0, 1) for part in (seen, actions, old, gains, gains + values, values)]
        for rows in torch.randperm(128).split(64):
            part = [x[rows] for x in data]
            optimizer.zero_grad()

            def step(part: list[torch.Tensor] = part) -> torch.Tensor:
                loss = train_step(model, *part)
                loss.backward()
                return loss.detach()

            losses.append(training.run(train_step, step))
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return {"losses": losses, "model": model, "optimizer": optimizer}


class Actor(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.net = mlp(17, width, width, 12, activation=nn.ReLU)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, spread = self.net(x).chunk(2, -1)
        normal = Normal(mean, spread.clamp(-5, 2).exp())
        raw = normal.rsample()
        action = torch.tanh(raw)
        log_prob = normal.log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6)
        return action, log_prob.sum(-1)


class Twins(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.both = nn.ModuleList(mlp(23, width, width, 1, activation=nn.ReLU) for _ in range(2))

    def forward(self, x: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        joined = torch.cat([x, action], -1)
        first, second = (critic(joined).squeeze(-1) for critic in self.both)
        return first, second


@program
def sac(training: Training) -> dict[str, Any]:
    """Three optimizers; critics that are frozen for the actor's loss; a target that follows in place."""
    actor, critics = Actor(), Twins()
    target = copy.deepcopy(critics).requires_grad_(False)
    log_alpha = torch.zeros(1, requires_grad=True)
    of_critics = torch.optim.Adam(critics.parameters(), 1e-3)
    of_actor = torch.optim.Adam(actor.parameters(), 3e-4)
    of_alpha = torch.optim.Adam([log_alpha], 1e-3)

    def critic_loss(
        critics: nn.Module, target: nn.Module, actor: nn.Module, batch: dict[str, torch.Tensor], alpha: float
    ) -> torch.Tensor:
        with torch.no_grad():
            action, log_prob = actor(batch["next"])
            value = torch.min(*target(batch["next"], action)) - alpha * log_prob
            wanted = batch["reward"] + (1 - batch["done"]) * 0.99 * value
        first, second = critics(batch["seen"], batch["action"])
        return F.mse_loss(first, wanted) + F.mse_loss(second, wanted)

    def actor_loss(
        actor: nn.Module, critics: nn.Module, seen: torch.Tensor, alpha: float
    ) -> dict[str, torch.Tensor]:
        action, log_prob = actor(seen)
        value = torch.min(*critics(seen, action))
        return {"loss": (alpha * log_prob - value).mean(), "log_prob": log_prob.detach()}

    of_critic, of_policy = training.step(critic_loss), training.step(actor_loss)
    losses = []
    for number in range(4):
        batch = {"seen": torch.randn(256, 17), "next": torch.randn(256, 17), "action": torch.rand(256, 6)}
        batch |= {"reward": torch.randn(256), "done": (torch.rand(256) < 0.1).float()}
        alpha = log_alpha.exp().item()
        of_critics.zero_grad()

        def critic_step(batch: dict[str, torch.Tensor] = batch, alpha: float = alpha) -> torch.Tensor:
            loss = of_critic(critics, target, actor, batch, alpha)
            loss.backward()
            return loss.detach()

        losses.append(training.run(of_critic, critic_step))
        of_critics.step()
        if number % 2 == 0:
            continue
        critics.requires_grad_(False)
        of_actor.zero_grad()

        def actor_step(
            batch: dict[str, torch.Tensor] = batch, alpha: float = alpha
        ) -> tuple[torch.Tensor, torch.Tensor]:
            output = of_policy(actor, critics, batch["seen"], alpha)
            output["loss"].backward()
            return output["loss"].detach(), output["log_prob"]

        loss, log_prob = training.run(of_policy, actor_step)
        losses.append(loss)
        of_actor.step()
        critics.requires_grad_(True)
        of_alpha.zero_grad()
        (-log_alpha.exp() * (log_prob - 6)).mean().backward()
        of_alpha.step()
        with torch.no_grad():
            for old, new in zip(target.parameters(), critics.parameters(), strict=True):
                old.lerp_(new, 0.005)
    optimizers = [of_critics, of_actor, of_alpha]
    return {
        "losses": losses, "actor": actor, "critics": critics, "target": target, "alpha": log_alpha,
        "optimizers": optimizers,
    }  # fmt: skip


class Recurrent(nn.Module):
    """A world model: a recurrent state with a random part that is drawn straight through."""

    def __init__(self, width: int = 96, classes: int = 8, groups: int = 8) -> None:
        super().__init__()
        self.width, self.classes, self.groups = width, classes, groups
        stochastic = classes * groups
        self.encoder = mlp(32, 96, 96, activation=nn.ELU)
        self.enter = nn.Linear(stochastic + 4, width)
        self.cell = nn.GRUCell(width, width)
        self.prior, self.posterior = mlp(width, 96, stochastic), mlp(width + 96, 96, stochastic)
        self.decoder, self.reward = mlp(width + stochastic, 96, 32), mlp(width + stochastic, 96, 1)

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.view(-1, self.groups, self.classes)
        chances = 0.99 * logits.softmax(-1) + 0.01 / self.classes
        drawn = torch.distributions.OneHotCategorical(probs=chances).sample()
        return (drawn + chances - chances.detach()).flatten(1)

    def forward(self, seen: torch.Tensor, actions: torch.Tensor) -> dict[str, torch.Tensor]:
        batch, length, _ = seen.shape
        embedded = self.encoder(seen)
        h, z = seen.new_zeros(batch, self.width), seen.new_zeros(batch, self.groups * self.classes)
        states, priors, posteriors = [], [], []
        for t in range(length):
            h = self.cell(F.elu(self.enter(torch.cat([z, actions[:, t]], -1))), h)
            priors.append(self.prior(h))
            posteriors.append(self.posterior(torch.cat([h, embedded[:, t]], -1)))
            z = self.draw(posteriors[-1])
            states.append(torch.cat([h, z], -1))
        state = torch.stack(states, 1)
        both = torch.stack(priors, 1), torch.stack(posteriors, 1)
        return {
            "prior": both[0], "posterior": both[1], "seen": self.decoder(state), "state": state,
            "reward": self.reward(state).squeeze(-1),
        }  # fmt: skip


@program
def world_model(training: Training) -> dict[str, Any]:
    """Losses of several parts, two of them with one side detached; a loop over time; clipping, AdamW."""
    model = Recurrent()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-8, weight_decay=1e-6)

    def divergence(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        a, b = (x.unflatten(-1, (8, 8)).log_softmax(-1) for x in (first, second))
        return (a.exp() * (a - b)).sum((-1, -2)).clamp(min=1.0).mean()

    def train_step(
        model: nn.Module, seen: torch.Tensor, actions: torch.Tensor, reward: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        out = model(seen, actions)
        dynamics = divergence(out["posterior"].detach(), out["prior"])
        representation = divergence(out["posterior"], out["prior"].detach())
        loss = F.mse_loss(out["seen"], seen) + F.mse_loss(out["reward"], reward)
        return {"loss": loss + 0.5 * dynamics + 0.1 * representation, "dynamics": dynamics.detach()}

    train_step = training.step(train_step)
    losses = []
    for _ in range(3):
        data = torch.randn(16, 10, 32), torch.randn(16, 10, 4), torch.randn(16, 10)
        optimizer.zero_grad()

        def step(data: tuple[torch.Tensor, ...] = data) -> tuple[torch.Tensor, torch.Tensor]:
            out = train_step(model, *data)
            out["loss"].backward()
            return out["loss"].detach(), out["dynamics"]

        losses.append(training.run(train_step, step))
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
    return {"losses": losses, "model": model, "optimizer": optimizer}
