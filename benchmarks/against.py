"""What the transforms are measured against, outside JAX."""

import concurrent.futures
import importlib.util
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.timing import Contestant
from benchmarks.trees import Tree, size


def numpy_dot(tree: Tree) -> Contestant:
    """BLAS's dot on one thread a core: as fast as memory can be read."""
    arrays = [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(tree)]
    cores = len(os.sched_getaffinity(0))
    shares = [
        [piece for array in arrays for piece in [np.array_split(array, cores)[core]]]
        for core in range(cores)
    ]
    pool = concurrent.futures.ThreadPoolExecutor(cores)

    def dot(pieces: list[np.ndarray]) -> float:
        return sum(float(piece.dot(piece)) for piece in pieces)

    return Contestant(lambda: sum(pool.map(dot, shares)), moved=size(tree))


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def torch_clip(tree: Tree, max_norm: float) -> Contestant:
    """torch's clip of all gradients at once, in place."""
    import torch

    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    parameters: list[Any] = []
    for leaf in jax.tree.leaves(tree):
        values = torch.from_numpy(np.array(leaf.astype(jnp.float32)))
        values = values.to(kinds[leaf.dtype.name])
        parameters.append(torch.nn.Parameter(torch.zeros_like(values)))
        parameters[-1].grad = values
    originals = [parameter.grad.clone() for parameter in parameters]

    def prepare() -> None:
        for parameter, original in zip(parameters, originals, strict=True):
            parameter.grad.copy_(original)

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)

    return Contestant(clip, prepare, moved=3 * size(tree))
