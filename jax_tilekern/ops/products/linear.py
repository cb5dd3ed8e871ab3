"""``linear`` and ``gated_linear``: layers of neural networks, as products with epilogues."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from jax_tilekern.epilogue.scalar_function import Role, takes
from jax_tilekern.interop import compat
from jax_tilekern.interop.originals import jnp
from jax_tilekern.interop.result_types import product_type
from jax_tilekern.ops.jitted import jitted
from jax_tilekern.ops.products.fused_contraction import contract_with_epilogue
from jax_tilekern.ops.products.matmul import labelled_matrices, matmul, matrix_product
from jax_tilekern.ops.products.quantized_weights import QuantizedWeights

Activation = Callable[[Any], Any]


@jitted("precision", "preferred_element_type", functions=["activation"], weights=["w"])
def linear(
    x: ArrayLike,
    w: ArrayLike,
    bias: ArrayLike | None = None,
    activation: Activation | None = None,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
) -> Array:
    """Dense layer ``activation(x @ w + bias)``, in one kernel.

    Bias and activation are computed in the type in which the product is accumulated, and the result
    is rounded once. See :func:`matmul`, whose epilogue they are.

    Parameters
    ----------
    x
        Array of shape ``(..., k)``.
    w
        Array of shape ``(k, n)``, or :class:`QuantizedWeights`.
    bias
        Array of shape ``(n,)``, or any other that broadcasts to the result.
    activation
        A function of scalars, such as ``jax.nn.gelu``. As for ``jax.jit``, a call is traced once
        for each function object.
    precision, preferred_element_type
        As in :func:`matmul`.

    Returns
    -------
    Array
        Shape ``(..., n)``.

    Raises
    ------
    ValueError
        If shapes do not fit.
    TypeError
        If an operand is not an array, or the activation is not a function of scalars.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> x, w, bias = jnp.ones((64, 128)), jnp.ones((128, 32)), jnp.ones(32)
    >>> jax.grad(lambda w: jtk.linear(x, w, bias, jax.nn.gelu).sum())(w).shape
    (128, 32)
    """
    role = _role("linear", activation)
    epilogue, operands = (activation, ()) if bias is None else (_after_bias(activation), (bias,))
    return matrix_product(
        role,
        x,
        w,
        precision,
        preferred_element_type,
        epilogue=epilogue,
        operands=operands,
    )


@jitted(
    "precision",
    "preferred_element_type",
    functions=["activation", "epilogue"],
    weights=["w_gate", "w_up"],
)
def gated_linear(
    x: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike,
    activation: Activation = jax.nn.silu,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    epilogue: Callable[..., Any] | None = None,
) -> Any:
    """Gated linear unit ``activation(x @ w_gate) * (x @ w_up)``, in one or two kernels.

    On a Hopper GPU one kernel computes both products of 16-bit types, where it is predicted to be
    faster, and the result is rounded once. Elsewhere, and where a call is differentiated or its
    arrays are sharded by ``jit``, the kernel of the gate's product reads the other product, which
    is rounded to its type, and combines both. No other pass over memory is made in either case. On
    a GPU the result is written over the other product, unless the call is differentiated.

    Parameters
    ----------
    x, precision, preferred_element_type
        As in :func:`linear`.
    w_gate, w_up
        Arrays of shape ``(k, n)``, or :class:`QuantizedWeights`; those have two kernels.
    activation
        A function of scalars: ``jax.nn.silu`` makes a SwiGLU, ``jax.nn.gelu`` a GEGLU.
    epilogue
        A further function of the gated scalar, such as :func:`row_quantize`.

    Returns
    -------
    Array
        Shape ``(..., n)``. With an epilogue, an array for each scalar that it returns.

    Raises
    ------
    ValueError, TypeError
        As in :func:`linear`.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import jax_tilekern as jtk
    >>> x, w = jnp.ones((64, 128)), jnp.ones((128, 32))
    >>> jtk.gated_linear(x, w, w).shape
    (64, 32)
    """
    options: dict[str, Any] = {
        "precision": precision,
        "preferred_element_type": preferred_element_type,
    }
    given = w_gate, w_up
    x, w_gate, w_up = jnp.asarray(x), jnp.asarray(w_gate), jnp.asarray(w_up)
    if w_gate.shape[-2:] != w_up.shape[-2:]:
        raise ValueError(
            f"gated_linear: w_gate has shape {w_gate.shape}, w_up {w_up.shape}; the last two "
            "dimensions are the same"
        )
    role = _role("gated_linear", activation, epilogue)
    gated = _times(activation, epilogue)
    if any(isinstance(w, QuantizedWeights) for w in given):
        up = matmul(x, given[1], **options)
        return matrix_product(role, x, given[0], **options, epilogue=gated, operands=(up,))
    alike = (w_gate.shape, w_gate.dtype) == (w_up.shape, w_up.dtype)
    up = w_up if alike else matmul(x, w_up, **options)
    result = product_type(jnp.matmul, x, w_gate, **options)
    lhs, gate, contraction = labelled_matrices(x, w_gate)
    call: dict[str, Any] = {
        "contraction": contraction,
        "precision": compat.canonicalize_precision(precision),
        "product": result.dtype,
        "shape": result.shape,
        "epilogue": gated,
        "role": role,
    }
    if not alike:
        return contract_with_epilogue(lhs, gate, **call, operands=(up,), in_place=((0, 0),))
    _, up, _ = labelled_matrices(x, up)
    lhs, gate, up = compat.unify_varying(lhs, gate, up)
    return contract_with_epilogue(lhs, gate, second=up, **call, operands=())


# The accumulators and the operands of an epilogue may have different types.
_promoting: Any = jax.numpy_dtype_promotion("standard")
_plus: Callable[..., Any] = _promoting(operator.add)
_times_up: Callable[..., Any] = _promoting(operator.mul)


def _after_bias(activation: Activation | None) -> Callable[[Any, Any], Any]:
    if activation is None:
        return _plus
    return _named("bias", activation, lambda y, bias: activation(_plus(y, bias)))


def _times(
    activation: Activation, epilogue: Callable[..., Any] | None
) -> Callable[[Any, Any], Any]:
    def gated(y: Any, up: Any) -> Any:
        gate = activation(y)
        if not jax.tree_util.treedef_is_leaf(jax.tree.structure(gate)):
            raise TypeError(
                f"gated_linear: the activation returns {gate!r}; it must return one scalar"
            )
        value = _times_up(gate, up)
        return value if epilogue is None else epilogue(value)

    return _named("gate", activation, gated)


def _role(
    call: str, activation: Activation | None, epilogue: Callable[..., Any] | None = None
) -> Role:
    """Return what errors call the functions of a layer, which are functions or ``None``."""
    given = {"activation": activation, "epilogue": epilogue}
    for argument, function in given.items():
        if function is not None and not callable(function):
            raise TypeError(
                f"{call}: the {argument} is {function!r}; it must be a function of scalars"
            )
        if function is not None and not takes(function, 1):
            raise TypeError(f"{call}: the {argument} {function!r} does not take 1 argument")
    names = [getattr(x, "__name__", type(x).__name__) for x in given.values() if x is not None]
    return Role(call, "activation", " with the epilogue ".join(names), operand="bias")


def _named(what: str, activation: Activation, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = f"{what}_{getattr(activation, '__name__', '')}".rstrip("_")
    return function
