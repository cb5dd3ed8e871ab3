"""Optimizers: ``muon``, which orthogonalises updates in batches of matrices."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, lax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp
from jax_tilekern.ops.arguments import check_choice
from jax_tilekern.ops.muon.newton_schulz import (
    COEFFICIENTS,
    METHODS,
    PRECONDITIONINGS,
    Method,
    Preconditioning,
    newton_schulz,
)
from jax_tilekern.ops.muon.newton_schulz_iteration import orthogonalized_in_loop

# optax.contrib.muon's presets.
_PRESETS: dict[str, Any] = {
    "standard": COEFFICIENTS,
    "dion": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}


def muon(
    learning_rate: Any,
    ns_coeffs: Any = COEFFICIENTS,
    ns_steps: int = 5,
    beta: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    weight_decay: ArrayLike = 0.0,
    weight_decay_mask: Any = None,
    mu_dtype: DTypeLike | None = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Preconditioning = "frobenius",
    adam_b1: ArrayLike = 0.9,
    adam_b2: ArrayLike = 0.999,
    adam_eps_root: ArrayLike = 0.0,
    adam_weight_decay: ArrayLike = 0.0,
    adam_learning_rate: Any = None,
    muon_weight_dimension_numbers: Any = None,
    consistent_rms: ArrayLike | None = None,
    ns: Method = "auto",
    mesh: Mesh | None = None,
    max_stack_bytes: int | None = None,
) -> Any:
    """Return the optimizer Muon, with the arguments of :func:`optax.contrib.muon`.

    Updates and states are those of optax within rounding errors. The matrices of one shape are
    stacked, and :func:`jax_tilekern.linalg.newton_schulz` orthogonalises a stack at once. On a mesh
    each device has some of a stack's matrices, so nothing is communicated inside the iteration.

    Parameters
    ----------
    learning_rate, ns_coeffs, ns_steps, beta, eps, weight_decay, weight_decay_mask, mu_dtype
        As in :func:`optax.contrib.muon`. Where ``ns_steps`` is a value of the program, as in
        ``optax.inject_hyperparams``, the iteration is the standard one, in a loop.
    nesterov, adaptive, preconditioning, adam_b1, adam_b2, adam_eps_root, adam_weight_decay
        As in :func:`optax.contrib.muon`.
    adam_learning_rate, muon_weight_dimension_numbers, consistent_rms
        As in :func:`optax.contrib.muon`.
    ns
        The ``method`` of :func:`jax_tilekern.linalg.newton_schulz`. ``"standard"`` is optax's
        iteration.
    mesh
        The devices that share stacks, by default those of ``jax.set_mesh``. Stacks are padded with
        zeros to a multiple of their number. Without a mesh nothing is padded, and devices share a
        stack as far as their number divides its size. Inside ``shard_map`` a device iterates on the
        matrices that it has.
    max_stack_bytes
        The most bytes of a stack on one device, by default 1 GiB. Larger stacks are divided, and
        one part is orthogonalised after the other; the iteration takes about four times as much
        memory. A stack has at least one matrix for each device.

    Returns
    -------
    optax.GradientTransformation
        Its state has the tree of optax's.

    Raises
    ------
    ImportError
        If optax is not installed, or has no ``contrib.MuonDimensionNumbers``.
    ValueError
        If the name of coefficients, of a preconditioning or of a method is unknown, or
        ``max_stack_bytes`` is not positive.
    TypeError
        If ``mesh`` is no mesh, or ``max_stack_bytes`` no integer.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> params = {"w": jnp.ones((8, 16)), "b": jnp.ones(16)}
    >>> optimizer = jtk.muon(0.02)
    >>> state = optimizer.init(params)
    >>> updates, state = jax.jit(optimizer.update)(params, state, params)
    >>> updates["w"].shape
    (8, 16)
    """
    optax = _optax()
    for name, value, known in (
        ("preconditioning", preconditioning, PRECONDITIONINGS),
        ("ns", ns, METHODS),
    ):
        check_choice("muon", name, value, known)
    if mesh is not None and not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"muon: mesh is a jax.sharding.Mesh, not {mesh!r}")
    most_bytes = 2**30 if max_stack_bytes is None else max_stack_bytes
    if isinstance(most_bytes, bool) or not isinstance(most_bytes, int | np.integer):
        raise TypeError(f"muon: max_stack_bytes is an integer, not {max_stack_bytes!r}")
    if most_bytes <= 0:
        raise ValueError(f"muon: max_stack_bytes is positive, not {max_stack_bytes}")
    if isinstance(ns_coeffs, str):
        check_choice("muon", "ns_coeffs", ns_coeffs, tuple(_PRESETS))
        ns_coeffs = _PRESETS[ns_coeffs]
    momentum = optax.contrib.scale_by_muon(ns_coeffs, ns_steps, beta, eps, mu_dtype)

    def numbers_of(params: Any) -> Any:
        return _dimension_numbers(optax, muon_weight_dimension_numbers, params)

    def matrices_of(params: Any) -> tuple[list[Array], list[Any], Any]:
        """Return the matrices of a tree, their dimension numbers and the tree's structure."""
        leaves, tree = jax.tree.flatten(params)
        structure: Any = tree
        return leaves, structure.flatten_up_to(numbers_of(params)), structure

    def orthogonalized(momenta: Any, coefficients: Array) -> Any:
        stacks = _Stacks.of(mesh, int(most_bytes))
        leaves, numbers, tree = matrices_of(momenta)

        in_loop = coefficients.ndim == 1 and isinstance(ns_steps, jax.Array)

        def iterate(stack: Array, coefficients: Array, eps: Array, *steps: Array) -> Array:
            if in_loop:
                return orthogonalized_in_loop(
                    stack, steps[0], coefficients, preconditioning=preconditioning, eps=eps
                )
            return newton_schulz(
                stack,
                steps=len(coefficients) if coefficients.ndim == 2 else ns_steps,
                coefficients=coefficients,
                preconditioning=preconditioning,
                eps=eps,
                method=ns,
            )

        scalars = (coefficients, jnp.asarray(eps), *((ns_steps,) if in_loop else ()))
        return tree.unflatten(stacks.apply(iterate, leaves, numbers, scalars))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        if nesterov:
            momenta = jax.tree.map(
                lambda m, g: beta * m + (1 - beta) * g,
                optax.tree.bias_correction(mu, beta, optax.safe_increment(count)),
                optax.tree.bias_correction(updates, beta, count),
            )
        else:
            momenta = optax.tree.bias_correction(mu, beta, count)
        result = orthogonalized(momenta, state.ns_coeffs)
        if adaptive:
            result = jax.tree.map(lambda m, x: jnp.sum(m.conj() * x) * x, momenta, result)
        mu = optax.tree.cast(mu, mu_dtype)
        return result, state._replace(count=count, mu=mu)

    def scale(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params

        def scaled(x: Array, numbers: Any) -> Array:
            fan_in, fan_out = (math.prod(x.shape[i] for i in axes) for axes in _axes(x, numbers))
            if consistent_rms is None:
                factor: ArrayLike = math.sqrt(max(1, fan_out / fan_in))
            else:
                factor = math.sqrt(max(fan_in, fan_out)) * jnp.asarray(consistent_rms)
            return jnp.asarray(factor, x.dtype) * x

        leaves, numbers, tree = matrices_of(updates)
        return tree.unflatten(map(scaled, leaves, numbers)), state

    def labels(params: Any) -> Any:
        return jax.tree.map(
            lambda _, numbers: "adam" if numbers is None else "muon", params, numbers_of(params)
        )

    scaled_by_muon = optax.chain(
        optax.GradientTransformation(momentum.init, update),
        optax.GradientTransformation(optax.init_empty_state, scale),
        optax.add_decayed_weights(weight_decay, weight_decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    adam = optax.adamw(
        learning_rate if adam_learning_rate is None else adam_learning_rate,
        b1=adam_b1,
        b2=adam_b2,
        eps=eps,
        eps_root=adam_eps_root,
        weight_decay=adam_weight_decay,
        mu_dtype=mu_dtype,
        nesterov=nesterov,
    )
    return optax.partition({"muon": scaled_by_muon, "adam": adam}, labels)


def _optax() -> Any:
    try:
        import optax
        import optax.contrib
    except ImportError as error:
        raise ImportError("jax_tilekern.muon needs optax: pip install optax") from error
    if not hasattr(optax.contrib, "MuonDimensionNumbers"):
        raise ImportError(f"jax_tilekern.muon needs optax 0.2.6 or newer, not {optax.__version__}")
    return optax


def _dimension_numbers(optax: Any, given: Any, params: Any) -> Any:
    """Return a tree of the numbers of each matrix, with ``None`` for other parameters."""
    if given is None:
        default = optax.contrib.MuonDimensionNumbers()
        return jax.tree.map(lambda x: default if x.ndim == 2 else None, params)
    if callable(given):
        given = given(params)

    def is_leaf(x: Any) -> bool:
        return x is None or isinstance(x, optax.contrib.MuonDimensionNumbers)

    # A leaf stands for all parameters below it.
    return jax.tree.map(
        lambda numbers, below: jax.tree.map(lambda _: numbers, below),
        given,
        params,
        is_leaf=is_leaf,
    )


def _axes(x: Array, numbers: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the axes of a parameter that are the rows and the columns of its matrices."""
    rows, columns = (
        tuple(i % x.ndim for i in ((axes,) if isinstance(axes, int) else axes))
        for axes in (numbers.reduction_axis, numbers.output_axis)
    )
    if x.ndim < 2 or set(rows) & set(columns):
        raise ValueError(
            f"a parameter of shape {x.shape} has no matrices with the dimension numbers {numbers}"
        )
    return rows, columns


class _Matrices(NamedTuple):
    """How a parameter is a batch of matrices."""

    order: tuple[int, ...]  # the axes of the batch, of the rows and of the columns
    shape: tuple[int, ...]  # of the parameter in this order
    flat: tuple[int, int, int]  # matrices, rows and columns

    @classmethod
    def of(cls, x: Array, numbers: Any) -> _Matrices:
        rows, columns = _axes(x, numbers)
        batch = tuple(i for i in range(x.ndim) if i not in rows + columns)
        order = batch + rows + columns
        count, m, n = (math.prod(x.shape[i] for i in axes) for axes in (batch, rows, columns))
        return cls(order, tuple(x.shape[i] for i in order), (count, m, n))

    def batch(self, x: Array) -> Array:
        return x.transpose(self.order).reshape(self.flat)

    def parameter(self, batch: Array) -> Array:
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return batch.reshape(self.shape).transpose(inverse)


class _Stacks(NamedTuple):
    """How the matrices of parameters are stacked."""

    devices: int  # They share a stack, whose size is a multiple of their number.
    max_bytes: int  # of a device's part

    @classmethod
    def of(cls, mesh: Mesh | None, max_bytes: int) -> _Stacks:
        context = jax.sharding.get_abstract_mesh()
        if AxisType.Manual in context.axis_types:
            return cls(1, max_bytes)
        return cls(max(1, (context if mesh is None else mesh).size), max_bytes)

    def apply(
        self,
        iterate: Callable[..., Array],
        leaves: Sequence[Array],
        numbers: Sequence[Any],
        scalars: Sequence[Array],
    ) -> list[Array]:
        """Apply a function of stacks ``(count, m, n)`` and of ``scalars`` to parameters."""
        matrices = [_Matrices.of(x, spec) for x, spec in zip(leaves, numbers, strict=True)]
        indices_by_type = defaultdict(list)
        for i, x in enumerate(leaves):
            indices_by_type[matrices[i].flat[1:], x.dtype].append(i)

        def results(leaves: Sequence[Array], scalars: Sequence[Array]) -> list[Array]:
            found = list(leaves)
            for indices in indices_by_type.values():
                batches = [matrices[i].batch(leaves[i]) for i in indices]
                applied = self._by_stacks(iterate, batches, scalars)
                for i, batch in zip(indices, applied, strict=True):
                    found[i] = matrices[i].parameter(batch)
            return found

        shardings = [compat.explicit_sharding(jax.typeof(x)) for x in leaves]
        if leaves and shardings[0] is not None:
            results = compat.with_automatic_axes(results, shardings)
        return results(leaves, scalars)

    def _by_stacks(
        self,
        iterate: Callable[..., Array],
        batches: Sequence[Array],
        scalars: Sequence[Array],
    ) -> list[Array]:
        """Apply a function to batches of equal matrices, a stack after the other."""
        matrix_bytes = math.prod(batches[0].shape[1:]) * batches[0].dtype.itemsize
        most = self.devices * max(1, self.max_bytes // max(1, matrix_bytes))
        parts: list[list[Array]] = [
            [batch[i : i + most] for i in range(0, max(1, len(batch)), most)] for batch in batches
        ]
        stacks: list[list[Array]] = [[]]
        for part in itertools.chain(*parts):
            if sum(map(len, stacks[-1])) + len(part) > most:
                stacks.append([])
            stacks[-1].append(part)
        results: list[Array] = []
        for stack in stacks:
            if results:
                # A stack is made when the ones before are done.
                stack, results = lax.optimization_barrier((stack, results))
            results += self._apply_to_stack(iterate, stack, scalars)
        remaining = iter(results)
        return [
            x[0] if len(x) == 1 else jnp.concatenate(x)
            for x in ([next(remaining) for _ in part] for part in parts)
        ]

    def _apply_to_stack(
        self,
        iterate: Callable[..., Array],
        parts: Sequence[Array],
        scalars: Sequence[Array],
    ) -> list[Array]:
        ends = list(itertools.accumulate(map(len, parts)))
        missing = -ends[-1] % self.devices
        padding = jnp.zeros((missing, *parts[0].shape[1:]), parts[0].dtype)
        result = iterate(jnp.concatenate([*parts, padding] if missing else parts), *scalars)
        return jnp.split(result, ends)[:-1]
