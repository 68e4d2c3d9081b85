"""Compute the same clipped sum in every way, also with other libraries if they are installed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import optax_lsdp as lsdp
from benchmarks._models import Model

MICROBATCH = 16


def jax_privacy(model: Model, microbatch_size: int | None = None) -> Callable[..., Any]:
    """Return JAX Privacy's sum of clipped gradients."""
    from jax_privacy import clipping

    return clipping.clipped_grad(
        model.loss,
        l2_clip_norm=1.0,
        keep_batch_dim=False,
        microbatch_size=microbatch_size,
    )


def optax_clip(model: Model) -> Callable[..., Any]:
    """Return Optax's sum of clipped gradients."""

    def grad(params: Any, batch: Any) -> Any:
        rows = jax.vmap(jax.grad(model.loss), in_axes=(None, 0))(params, batch)
        leaves, structure = jax.tree.flatten(rows)
        sums, _ = optax.per_example_global_norm_clip(leaves, 1.0)
        return jax.tree.unflatten(structure, sums)

    return grad


def _torch_model(name: str) -> Any:
    """Return a model of the zoo in PyTorch."""
    from torch import nn

    if name == "MLP":
        dense = [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()]
        return nn.Sequential(nn.Flatten(), *dense, nn.Linear(1024, 10))
    convolutions = [
        nn.ZeroPad2d((3, 3, 3, 3)),
        nn.Conv2d(1, 16, 8, 2),
        nn.ReLU(),
        nn.MaxPool2d(2, 1),
    ]
    convolutions += [nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1)]
    return nn.Sequential(
        *convolutions, nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)
    )


def opacus_steps(name: str, model: Model) -> dict[str, Callable[[], Any]]:
    """Return whole PyTorch steps: not private, Opacus with hooks, Opacus with ghost clipping."""
    import numpy as np
    import torch
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    images, labels = (np.asarray(x) for x in model.batch)
    x = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
    y = torch.from_numpy(labels.astype(np.int64))
    loader = DataLoader(TensorDataset(x, y), batch_size=len(x))

    def plain() -> Callable[[], Any]:
        module, criterion = _torch_model(name), torch.nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

        def step() -> None:
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            optimizer.step()

        return step

    def private(mode: str) -> Callable[[], Any]:
        module, criterion = _torch_model(name), torch.nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        made = PrivacyEngine().make_private(
            module=module,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
            grad_sample_mode=mode,
        )
        module, optimizer = made[:2]
        criterion = made[2] if mode == "ghost" else criterion

        def step() -> None:
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            optimizer.step()

        return step

    return {"PyTorch": plain(), "Opacus": private("hooks"), "Opacus, ghost": private("ghost")}


def mean_gradient(model: Model) -> Callable[..., Any]:
    """Return the gradient of the mean loss: ordinary training."""

    def grad(params: Any, batch: Any) -> Any:
        return jax.grad(lambda p: jnp.mean(jax.vmap(model.loss, (None, 0))(p, batch)))(params)

    return grad


WAYS: dict[str, Callable[[Model], Callable[..., Any]]] = {
    "non-private": mean_gradient,
    "bookkeeping": lambda model: lsdp.clipped_grad(model.loss, clip_norm=1.0),
    "vmap": lambda model: lsdp.clipped_grad(model.loss, clip_norm=1.0, engine="vmap"),
    "JAX Privacy": jax_privacy,
    "JAX Privacy, microbatches": lambda model: jax_privacy(model, MICROBATCH),
    "Optax": optax_clip,
}


def ways(model: Model) -> dict[str, Callable[[], Callable[..., Any]]]:
    """Return a factory for each engine and peer; a peer may not be installed."""
    return {name: partial(way, model) for name, way in WAYS.items()}
