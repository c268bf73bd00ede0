"""The gradient trees that are measured."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

Tree = dict[str, jax.Array]
Shapes = dict[str, tuple[int, ...]]


def matrices() -> Shapes:
    """24 matrices of 1024x1024: bytes are all that counts."""
    return {f"matrix{i:02d}": (1024, 1024) for i in range(24)}


def transformer() -> Shapes:
    """The leaves of a small language model, 19 million in 76."""
    width, vocabulary, layers = 512, 4096, 6
    shapes: Shapes = {"embedding": (vocabulary, width), "norm": (width,)}
    shapes["positions"] = (256, width)
    shapes["norm_bias"] = (width,)
    for i in range(layers):
        block = {
            "norm1": (width,),
            "norm1_bias": (width,),
            "qkv": (width, 3 * width),
            "qkv_bias": (3 * width,),
            "out": (width, width),
            "out_bias": (width,),
            "norm2": (width,),
            "norm2_bias": (width,),
            "up": (width, 4 * width),
            "up_bias": (4 * width,),
            "down": (4 * width, width),
            "down_bias": (width,),
        }
        shapes |= {f"layer{i}/{name}": shape for name, shape in block.items()}
    return shapes


def small(leaves: int = 300) -> Shapes:
    """Many leaves of 1000: calls and compilation are all that counts."""
    return {f"leaf{i:04d}": (1000,) for i in range(leaves)}


TREES: dict[str, Callable[[], Shapes]] = {
    "24 x 1024x1024": matrices,
    "transformer": transformer,
    "300 x 1000": small,
}


def fill(shapes: Shapes, dtype: str) -> Tree:
    """Normal numbers of standard deviation 0.01: norms far above a clip at 1e-3."""
    random = np.random.default_rng(0)
    return {
        name: jnp.asarray(0.01 * random.standard_normal(shape, np.float32), dtype)
        for name, shape in shapes.items()
    }


def abstract(shapes: Shapes, dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
    return {k: jax.ShapeDtypeStruct(s, jnp.dtype(dtype)) for k, s in shapes.items()}


def size(tree: Tree) -> int:
    """Bytes."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
