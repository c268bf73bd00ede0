"""Device care: which mesh axes a leaf is split over, and the one collective.

Nothing outside this room knows a mesh axis by name. A leaf's `Layout` says over
which axes it is a piece of a larger array:

- inside shard_map with check_vma=True the types say so (the varying axes);
- inside pmap and check_vma=False nothing says so: it must be stated;
- under jit with explicit axes the types say so, and the measuring runs in a
  nested shard_map; under jit with automatic axes XLA does it, unless stated
  PartitionSpecs and a mesh in scope allow the nested shard_map there too.
"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from optax_unitnorm import _leaves
from optax_unitnorm._types import Tree

Axis = Hashable
Dims = tuple[tuple[Axis, ...], ...]  # for each dimension, the axes that split it


class Layout(NamedTuple):
    """How one leaf lies on the devices.

    axes: the mapped axes it is split over, as the caller's code sees it.
    dims: the same by dimension; None where only the axes are known.
    nested: by dimension, the axes that a nested shard_map will split it over.
    """

    axes: tuple[Axis, ...] = ()
    dims: Dims | None = ()
    nested: Dims = ()

    def all_axes(self) -> tuple[Axis, ...]:
        return self.axes + sum(self.nested, ())

    def at(self, dim: int) -> tuple[Axis, ...]:
        """All axes that split a dimension, the outer ones first."""
        inner = self.nested[dim] if dim < len(self.nested) else ()
        return self.outer(dim) + inner

    def outer(self, dim: int) -> tuple[Axis, ...]:
        """The axes that split a dimension as the caller's code sees it."""
        return self.dims[dim] if self.dims and dim < len(self.dims) else ()


def is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


def check_statement(value: Any) -> Any:
    """Refuses a `sharded_over` that is wrong whatever the gradients are."""
    if value is None or isinstance(value, str) or _is_names(value):
        return value
    leaves = jax.tree.leaves(value, is_leaf=is_spec)
    for leaf in leaves if leaves else [value]:
        if not is_spec(leaf):
            raise TypeError(
                '`sharded_over` must be "auto", None, a mesh axis name, a tuple of '
                f"names or a tree of PartitionSpecs; got {leaf!r}."
            )
    return value


def _is_names(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(name, str) for name in value)


# ---------------------------------------------------------------- what types say
def varying(x: Any) -> frozenset[Axis]:
    """The axes over which a value differs between devices, as its type knows."""
    return _varying_of(jax.typeof(x))


def _varying_of(kind: Any) -> frozenset[Axis]:
    manual = getattr(kind, "manual_axis_type", None)  # jax >= 0.10
    return frozenset(kind.vma if manual is None else manual.varying)


def _unreduced(x: Any) -> bool:
    kind = jax.typeof(x)
    manual = getattr(kind, "manual_axis_type", None)
    spec = kind.sharding.spec
    return bool(getattr(manual, "unreduced", ()) or getattr(spec, "unreduced", ()))


class _Region(NamedTuple):
    """Where we are: the mapped axes, and those whose types are tracked."""

    mapped: tuple[Axis, ...]
    tracked: frozenset[Axis]


def _region() -> _Region:
    mapped = jax.sharding.get_abstract_mesh().manual_axes
    # The index along an axis varies over it, if anything is tracked at all.
    tracked = frozenset(a for a in mapped if a in varying(lax.axis_index(a)))
    return _Region(tuple(mapped), tracked)


def _is_bound(axis: Axis) -> bool:
    try:
        lax.axis_size(axis)
    except NameError:
        return False
    return True


def _entry(entry: Any) -> tuple[Axis, ...]:
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, tuple) else (entry,)


def _dims(spec: PartitionSpec, keep: Callable[[Axis], bool]) -> Dims:
    return tuple(tuple(a for a in _entry(e) if keep(a)) for e in spec)


def _explicit_dims(x: jax.Array) -> Dims:
    sharding = jax.typeof(x).sharding
    types = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    return _dims(sharding.spec, lambda axis: types.get(axis) == AxisType.Explicit)


# ---------------------------------------------------------------- layouts
def layouts(
    stated: Any,
    tree: Tree,
    leaves: _leaves.Counted,
    params: "list[Any] | None" = None,
) -> "list[Layout]":
    """The layout of each counted leaf, from types and from what was stated.

    `params`, the parameters beside the counted leaves as they entered the step,
    let "auto" notice gradients that vary where their parameter does not.
    """
    region = _region()

    def where(j: int) -> str:
        return repr(_leaves.paths(tree)[leaves.at[j]] or "the root")

    for j, x in enumerate(leaves.arrays):
        if _unreduced(x):
            raise ValueError(
                f"the gradients must be reduced before their norm is taken; got an "
                f"unreduced leaf at {where(j)}."
            )
    if isinstance(stated, str) and stated == "auto":
        found = _typed(region, leaves, params, where)
    else:
        found = _stated(stated, region, tree, leaves, where)
    return [
        layout._replace(nested=_both(layout.nested, _explicit_dims(x)))
        for layout, x in zip(found, leaves.arrays, strict=True)
    ]


def _typed(region: _Region, leaves: Any, params: Any, where: Any) -> "list[Layout]":
    silent = [a for a in region.mapped if a not in region.tracked]
    if silent and leaves.arrays:
        names = ", ".join(map(repr, silent))
        raise ValueError(
            f"`sharded_over` must be stated inside pmap and shard_map(check_vma="
            f"False), where types do not show how leaves lie on the devices; the "
            f"mapped axes are {names}. Is each leaf whole on every device? Then "
            f"sharded_over=None (and average the gradients over devices first, if "
            f"that is what you mean). Is it a piece of a larger array? Then "
            f"sharded_over={silent[0]!r}."
        )
    found: list[Layout] = []
    for j, x in enumerate(leaves.arrays):
        axes = tuple(a for a in region.mapped if a in varying(x))
        param = None if params is None else params[j]
        if axes and param is not None and jnp.shape(param) == x.shape:
            extra = [a for a in axes if a not in varying(param)]
            if extra:
                raise ValueError(
                    f"`sharded_over` must be stated for the gradient at {where(j)}: "
                    f"it varies over {extra[0]!r} and its parameter does not. It is "
                    f"a local or per-example gradient: average it over the devices "
                    f"first, or say sharded_over=None if each device shall use the "
                    f"norm of its own."
                )
        found.append(Layout(axes, None if axes else ()))
    return found


def _stated(
    stated: Any, region: _Region, tree: Tree, leaves: Any, where: Any
) -> "list[Layout]":
    names = (stated,) if isinstance(stated, str) else stated
    if names is None or _is_names(names):
        names = names or ()
        axes = tuple(a for a in names if _use(a, region))
        found = [Layout(axes, None if axes else ()) for _ in leaves.arrays]
    else:
        specs = _leaves.spread("sharded_over", stated, tree, is_spec)
        found = [_from_spec(specs[i], region) for i in leaves.at]
    for j, (layout, x) in enumerate(zip(found, leaves.arrays, strict=True)):
        for axis in layout.axes:
            if axis in region.tracked and axis not in varying(x):
                raise ValueError(
                    f"`sharded_over` must name only axes that a leaf is split over; "
                    f"got {axis!r} for {where(j)}, which is the same on all devices "
                    f"of that axis."
                )
    return found


def _both(first: Dims, second: Dims) -> Dims:
    dims = tuple(a + b for a, b in itertools.zip_longest(first, second, fillvalue=()))
    return dims if any(dims) else ()


def _use(axis: Axis, region: _Region) -> bool:
    if _is_bound(axis):
        return True
    if region.mapped:
        names = ", ".join(map(repr, region.mapped))
        raise ValueError(
            f"`sharded_over` must name a mapped axis; got {axis!r}, and the mapped "
            f"axes are {names}."
        )
    return False  # outside any mapped region names are ignored


def _from_spec(spec: Any, region: _Region) -> Layout:
    spec = PartitionSpec() if spec is None else spec
    if not is_spec(spec):
        raise TypeError(f"`sharded_over` must hold PartitionSpecs; got {spec!r}.")
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    nested = _dims(spec, lambda a: types.get(a) == AxisType.Auto)
    rest = [a for dim in _dims(spec, lambda a: types.get(a) is None) for a in dim]
    mapped = [a for dim in _dims(spec, lambda a: a in region.mapped) for a in dim]
    axes = tuple(mapped) + tuple(a for a in rest if _use(a, region))
    outer = _dims(spec, lambda a: a in axes)
    return Layout(axes, outer, nested)


def need_dims(layout: Layout, path: str) -> None:
    """Norms along part of a leaf need to know which dimensions are split."""
    if layout.dims is None:
        raise ValueError(
            f"`sharded_over` must give the PartitionSpec of {path!r}: it is split "
            f"over {', '.join(map(repr, layout.axes))}, and norms along part of a "
            f"leaf need to know which dimension that splits."
        )


# ---------------------------------------------------------------- shapes, counts
def _size(axes: tuple[Axis, ...]) -> int:
    mesh = jax.sharding.get_abstract_mesh()
    sizes = dict(mesh.shape)
    return math.prod(sizes[a] if a in sizes else lax.axis_size(a) for a in axes)


def global_shape(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """The shape of the whole array, -1 where it is not known.

    Called outside the nested shard_map, where nested axes are whole already.
    """
    if layout.dims is None:
        return (-1,) * len(shape)
    return tuple(n * _size(layout.outer(d)) for d, n in enumerate(shape))


def global_size(shape: tuple[int, ...], layout: Layout) -> int:
    """The number of elements of the whole array."""
    return math.prod(shape) * _size(layout.axes)


def is_local() -> bool:
    """Whether arrays here certainly lie on one device each.

    Only then may leaves be joined into one: joining sharded arrays would gather
    them. Under plain jit with several devices nothing shows how they lie.
    """
    mesh = jax.sharding.get_abstract_mesh()
    whole = bool(mesh.axis_types) and all(t == AxisType.Manual for t in mesh.axis_types)
    # A program may be compiled here for a mesh of devices that are elsewhere.
    alone = jax.device_count() == 1 and math.prod(mesh.axis_sizes) == 1
    return whole or alone


# ---------------------------------------------------------------- nested region
def manually(
    fn: Callable[..., Any],
    leaves: "list[jax.Array]",
    found: "tuple[Layout, ...]",
    *replicated: jax.Array,
    as_leaves: bool = False,
) -> Any:
    """fn(leaves, *replicated), with every nested axis mapped.

    The results are replicated, or lie as the leaves do.
    """
    names = {axis for layout in found for dim in layout.nested for axis in dim}
    if not names:
        return fn(leaves, *replicated)
    context = jax.sharding.get_abstract_mesh()
    meshes = [jax.typeof(x).sharding.mesh for x in leaves]
    mesh = context if context.axis_names else next(m for m in meshes if m.axis_names)
    # Explicit axes that split no leaf are mapped too: then leaves are known to be
    # local, and small ones may be packed.
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    names |= {axis for axis, kind in types if kind == AxisType.Explicit}
    specs = [PartitionSpec(*layout.nested) for layout in found]
    return jax.shard_map(
        fn,
        mesh=None if mesh is context else mesh,
        in_specs=(specs, *[PartitionSpec()] * len(replicated)),
        out_specs=specs if as_leaves else PartitionSpec(),
        axis_names=names,
    )(leaves, *replicated)


# ---------------------------------------------------------------- the collective
def embed(part: jax.Array, kept: tuple[int, ...], layout: Layout) -> jax.Array:
    """A device's partial sums along kept axes, placed in those of the whole leaf.

    part has shape (slots, *leaf dimensions); what other devices hold is zero.
    """
    start: list[Any] = [0] * part.ndim
    shape = list(part.shape)
    for dim in kept:
        axes = layout.at(dim)
        if axes:
            start[dim + 1] = lax.axis_index(axes) * part.shape[dim + 1]
            shape[dim + 1] *= _size(axes)
    if tuple(shape) == part.shape:
        return part
    # An index of zero varies like the others: the types must agree.
    zeros = jnp.zeros(shape, part.dtype)
    return lax.dynamic_update_slice(zeros, part, [jnp.int32(i) for i in start])


def piece(whole: jax.Array, layout: Layout) -> jax.Array:
    """A device's own piece of the norms along the kept axes of a whole leaf."""
    start: list[Any] = [0] * whole.ndim
    sizes = list(whole.shape)
    for dim, size in enumerate(whole.shape):
        axes = layout.at(dim)
        if size > 1 and axes:
            sizes[dim] = size // _size(axes)
            start[dim] = lax.axis_index(axes) * sizes[dim]
    if tuple(sizes) == whole.shape:
        return whole
    return lax.dynamic_slice(whole, [jnp.int32(i) for i in start], sizes)


class Column(NamedTuple):
    """Partial sums of one class of leaves: shape (slots, entries), and its axes."""

    axes: tuple[Axis, ...]
    parts: jax.Array


def reduce(
    columns: "list[Column]", order: float, *, watch: bool
) -> "tuple[jax.Array, jax.Array]":
    """All columns side by side, reduced over the axes of each, in one collective.

    A class that is whole along some of the axes is counted once: all devices
    but the first along those axes send zeros. (Dividing by the number of
    devices instead would round.)

    With `watch`, also tells whether all devices of some class sent the very
    same sum. It is decided from counts of each bit of the sums, which the same
    collective adds up: a bit is set on none or on all of them.
    """
    union = _ordered({axis for column in columns for axis in column.axes})
    never = jnp.zeros((), bool)
    if not union:
        return jnp.concatenate([c.parts for c in columns], axis=1), never
    split = [c for c in columns if c.axes]
    flat = [_first_only(c.parts, c.axes, union).ravel() for c in split]
    watched = [c for c in split if watch and _size(c.axes) > 1]
    if order == math.inf:
        sums = [jnp.sum(c.parts)[None] for c in watched]
        sent = jnp.concatenate(flat + sums + [-s for s in sums])
        received = _max_over(sent, union)
    else:
        pairs = [(_bits(c.parts), c) for c in watched]
        sent = jnp.concatenate(flat + [_first_only(b, c.axes, union) for b, c in pairs])
        received = lax.psum(sent, union)
    reduced: dict[int, jax.Array] = {}
    offset = 0
    for c in split:
        reduced[id(c)] = received[offset : offset + c.parts.size].reshape(c.parts.shape)
        offset += c.parts.size
    repeated = _repeated(received[offset:], watched, order) if watched else never
    return jnp.concatenate([reduced.get(id(c), c.parts) for c in columns], 1), repeated


def _ordered(axes: Any) -> tuple[Axis, ...]:
    order = {a: i for i, a in enumerate(jax.sharding.get_abstract_mesh().axis_names)}
    return tuple(sorted(axes, key=lambda a: (order.get(a, len(order)), str(a))))


def _first_only(
    parts: jax.Array, axes: tuple[Axis, ...], union: tuple[Axis, ...]
) -> jax.Array:
    missing = [axis for axis in union if axis not in axes]
    if not missing:
        return parts
    first = functools.reduce(
        jnp.logical_and, [lax.axis_index(axis) == 0 for axis in missing]
    )
    return jnp.where(first, parts, 0)


def _bits(parts: jax.Array) -> jax.Array:
    total = jnp.sum(parts).astype(jnp.float32)
    word = lax.bitcast_convert_type(total, jnp.uint32)
    bits = (word >> jnp.arange(32, dtype=jnp.uint32)) & jnp.uint32(1)
    return bits.astype(parts.dtype)


def _repeated(received: jax.Array, watched: "list[Column]", order: float) -> jax.Array:
    same: list[jax.Array] = []
    if order == math.inf:
        tops, bottoms = received[: len(watched)], -received[len(watched) :]
        return jnp.any((tops == bottoms) & (tops > 0))
    for i, column in enumerate(watched):
        bits = received[32 * i : 32 * (i + 1)]
        devices = _size(column.axes)
        same.append(jnp.all((bits == 0) | (bits == devices)) & jnp.any(bits > 0))
    return functools.reduce(jnp.logical_or, same)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _max_over(x: jax.Array, axes: tuple[Axis, ...]) -> jax.Array:
    return lax.pmax(x, axes)


@_max_over.defjvp
def _max_over_jvp(axes: Any, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "`ord` must be finite where a norm over devices is differentiated: the "
        "largest of sharded elements has no derivative here; got inf."
    )


def can_repeat(found: "list[Layout]") -> bool:
    """Whether leaves were said to be split and no type can tell."""
    tracked = _region().tracked
    return any(axis not in tracked for layout in found for axis in layout.axes)


def largest(values: jax.Array) -> jax.Array:
    """The elementwise largest over the devices on which values differ.

    Where leaves said to be whole vary, each device has a norm of its own; what
    is recorded must be the same everywhere. NaN counts as the largest.
    """
    axes = _ordered(varying(values))
    if not axes:
        return values
    values = lax.stop_gradient(values)
    bad = jnp.isnan(values)
    sent = jnp.concatenate([jnp.where(bad, -jnp.inf, values), bad.astype(values.dtype)])
    received = lax.pmax(sent, axes)
    return jnp.where(received[values.size :] > 0, jnp.nan, received[: values.size])


# They name an axis and send nothing over it.
_SILENT = frozenset({"axis_index", "pvary", "pcast"})


def communicates(jaxpr: Any) -> bool:
    """Whether a program, or any program inside it, sends something over an axis."""
    for equation in jaxpr.eqns:
        named = equation.params.get("axes", equation.params.get("axis_name"))
        axes = named if isinstance(named, (tuple, list, frozenset)) else (named,)
        over = [a for a in axes if a is not None and not isinstance(a, int)]
        if over and equation.primitive.name not in _SILENT:
            return True
        for value in equation.params.values():
            for body in value if isinstance(value, (tuple, list)) else (value,):
                body = getattr(body, "jaxpr", body)
                if hasattr(body, "eqns") and communicates(body):
                    return True
    return False


def same_type(x: Any, kind: Any) -> bool:
    """Whether a value has a type, its weakness aside: both sides of a branch must."""
    own = jax.typeof(x)
    return (
        (own.shape, own.dtype) == (kind.shape, kind.dtype)
        and _varying_of(own) == _varying_of(kind)
        and own.sharding.spec == kind.sharding.spec
    )


def stated_now(built_with: Any, given: Any) -> Any:
    """What the training step says replaces "auto", and only "auto"."""
    check_statement(given)
    return given if isinstance(built_with, str) and built_with == "auto" else built_with


# ---------------------------------------------------------------- concrete arrays
def leads_over_devices(value: Any) -> bool:
    """Whether a concrete array's leading axis is one copy a device, as by pmap."""
    if not isinstance(value, jax.Array) or _leaves.is_traced(value):
        return False
    if not value.ndim or len(value.sharding.device_set) == 1:
        return False
    return value.sharding.shard_shape(value.shape)[0] < value.shape[0]


def copies(value: Any) -> "list[np.ndarray]":
    """What each device of this process holds of a replicated or pmapped value."""
    if not isinstance(value, jax.Array):
        return [np.asarray(value)]
    shards = [np.asarray(shard.data) for shard in value.addressable_shards]
    if leads_over_devices(value):
        return [np.asarray(row) for shard in shards for row in shard]
    return shards
