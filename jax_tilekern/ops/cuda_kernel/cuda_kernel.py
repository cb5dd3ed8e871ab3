"""``cuda_kernel``: any CUDA source as a JAX operation."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jax_tilekern.compilation.compiler import Source, cuda_folder
from jax_tilekern.compilation.cubin import is_cubin
from jax_tilekern.compilation.image import Image, is_image
from jax_tilekern.inspection.kernel_report import KernelReport
from jax_tilekern.interop.custom_rules import custom_jvp, custom_vjp
from jax_tilekern.ops.arguments import check_callable
from jax_tilekern.ops.cuda_kernel.primitive import bind, input_types, tuned_call
from jax_tilekern.ops.cuda_kernel.settings import KernelSettings, Parameters, Use
from jax_tilekern.ops.cuda_kernel.tuning import checked
from jax_tilekern.plans.cuda_kernel import BatchAxis, plan_kernel
from jax_tilekern.plans.cxx import CXX_TYPES
from jax_tilekern.plans.gpu import Gpu, current_gpu, known_gpu
from jax_tilekern.plans.kernel_signature import has_dynamic_shared_memory, kernels_in


def cuda_kernel(
    source: str | bytes | os.PathLike[str],
    *,
    out: Any,
    grid: Any,
    block: Any,
    name: Any = None,
    cluster: Any = 1,
    shared_memory_bytes: Any = 0,
    scalars: Any = (),
    tensor_maps: Any = (),
    workspaces: Any = (),
    options: Any = (),
    headers: Mapping[str, str] | None = None,
    include: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    aliases: Mapping[int, int] | None = None,
    alignment: int = 1,
    batch_axis: BatchAxis | None = None,
    reference: Callable[..., Any] | None = None,
    sharding_rule: Any = None,
    tune: Mapping[str, Sequence[Any]] | None = None,
    debug: bool = False,
) -> CudaKernel:
    """Make a JAX operation from CUDA C++ source, PTX or a cubin.

    The source is compiled by NVRTC when a call is lowered, for the GPU at hand, and kept on disk;
    no ``nvcc`` is needed. PTX is assembled by nvJitLink. The operation works under ``jit``,
    ``vmap``, ``scan``, ``shard_map``, donation and CUDA graphs. Its derivatives are those of
    ``reference``, unless others are attached by :meth:`CudaKernel.defjvp`,
    :meth:`CudaKernel.defvjp` or :meth:`CudaKernel.deflinear`.

    What the kernel takes, in this order: a pointer to each input, each output and each workspace;
    each tensor map, as a ``const __grid_constant__`` parameter; each scalar; and, if ``batch_axis``
    is given, a ``long long`` for each input and output. Arrays are row-major. The types of the
    parameters are compared with the call's: a pointer is to the array's type, to a vector type of
    it such as ``float4``, to ``void`` or to ``char``.

    A setting marked *or function* is a value, or a function of it that is called as
    ``f(*inputs, **parameters)`` with a ``jax.ShapeDtypeStruct`` for each input and with the
    keywords of the call, which are static: for sizes at compile time, and scalars.

    Parameters
    ----------
    source
        The text, or the path of a file of it (:class:`pathlib.Path`): CUDA C++, or PTX, which
        begins with ``.version``; or a cubin, as bytes or a path. ``#include <tilekern/view.cuh>``
        finds the library's device code, ``<math.h>``, ``<cstdint>`` and the like the library's own,
        and ``<cuda_bf16.h>`` that of NVIDIA's wheels.
    out
        *Or function.* Shape and type of the output, as anything that has ``shape`` and ``dtype``;
        or a tuple of them, and then the call returns a tuple.
    grid, block, cluster
        *Or function.* Blocks of the grid, threads of a block, and blocks of a cluster (compute
        capability 9.0): a number, or up to three.
    name
        *Or function.* The kernel, as a C++ name expression such as ``"scale<float>"``. By default
        the only kernel of the source, if that is no template. :func:`cxx_type` spells types.
    shared_memory_bytes
        *Or function.* Dynamic shared memory of a block.
    scalars
        *Or function.* Numbers passed by value, as NumPy scalars, whose type is the parameter's:
        ``(np.float32(2), np.int64(x.size))``.
    tensor_maps
        *Or function.* Descriptors for TMA (:class:`TensorMap`).
    workspaces
        *Or function.* Bytes of each buffer that the kernel writes to and nobody reads; aligned to
        128 bytes, not initialised. With ``batch_axis``, one after the other for each element of
        the batch that a launch takes.
    options
        *Or function.* Further options of NVRTC, such as ``("-DTILE=32", "--use_fast_math")``.
    headers
        Further headers: the name as an ``#include`` has it, and the text.
    include
        A folder of further headers, or several, such as CUTLASS's ``include``. What the source
        includes is read when a call is lowered; the kernel is compiled again if it has changed.
    aliases
        Inputs that share an output's buffer, ``{input: output}``: the kernel updates them in place.
        XLA copies such an input first if something else still reads it.
    alignment
        Bytes that pointers to inputs and outputs are multiples of, a power of two. A call whose
        buffers fall short is an error. What XLA allocates has 16 bytes at least.
    batch_axis
        The dimension of the grid, ``"x"``, ``"y"`` or ``"z"``, in which the kernel takes a batch.
        ``vmap`` then makes one launch: the kernel finds its inputs and outputs at the strides, in
        elements, that it gets as its last parameters, 0 for an input without the batch. The grid of
        a single call has 1 there. Otherwise ``vmap`` repeats the launch with shifted pointers.
    reference
        The same function in JAX, ``reference(*inputs, **parameters)``, for other platforms and
        for derivatives that are not attached.
    sharding_rule
        *Or function.* How devices may share a call: a name for each dimension of each input and
        output, as in ``"rows k, k columns -> rows columns"``, and ``_`` for a dimension that every
        device needs whole. Each device calls the kernel on its part. A name that no output has is
        a dimension that the kernel *adds up* over: the devices' outputs are added up too. Without
        a rule every device of a sharded ``jit`` gathers the inputs and computes the whole call.
    tune
        Parameters on which the results do not depend, and the values to choose from, as in
        ``{"block": (64, 128)}``. Functions of settings get them as keywords; ``reference`` and
        rules do not. :func:`jax_tilekern.tune` measures all combinations for a call, and stores
        the fastest for its shapes and this GPU. Without a stored one, the first values are taken.
        A call may give values itself.
    debug
        Check the kernel: wait for every launch and name it in errors, define ``TILEKERN_DEBUG``,
        which checks the bounds of every access through ``tilekern::View``, and make it an error if
        an element of an output is not written. Slow, and not for CUDA graphs.

    Returns
    -------
    CudaKernel
        The operation: call it with arrays by position and parameters by keyword.

    Raises
    ------
    TypeError
        If the source is neither a text, nor bytes, nor a path, or ``reference`` is no function.
    ValueError
        If bytes are neither PTX nor a cubin, PTX or a cubin has headers, the source has not exactly
        one kernel and there is no ``name``, a header has the name of one of the library's,
        ``include`` is no folder, the kernel has dynamic shared memory of no size, or a plain value
        is none of those above.

    Examples
    --------
    >>> import jax, numpy as np
    >>> import jax_tilekern as jtk
    >>> saxpy = jtk.cuda_kernel(
    ...     '''
    ...     __global__ void saxpy(const float* x, const float* y, float* out, float a, int n) {
    ...       int i = blockIdx.x * blockDim.x + threadIdx.x;
    ...       if (i < n) out[i] = a * x[i] + y[i];
    ...     }
    ...     ''',
    ...     out=lambda x, y, a: x,
    ...     grid=lambda x, y, a: -(-x.size // 256),
    ...     block=256,
    ...     scalars=lambda x, y, a: (np.float32(a), np.int32(x.size)),
    ...     reference=lambda x, y, a: a * x + y,
    ... )
    >>> x = jax.numpy.arange(3.0)
    >>> saxpy(x, x, a=2.0)
    Array([0., 3., 6.], dtype=float32)
    """
    code = _code(source)
    if isinstance(code, Image):
        if headers or include:
            raise ValueError(f"{code.file} is compiled: it takes no headers and no include")
        own, dynamic = code.names, code.has_dynamic_shared_memory
        if name is None:
            name = _only_name(code.file, own)
        label = name if isinstance(name, str) else _label(own)
    else:
        own = tuple(kernel for kernel, *_ in kernels_in(code.text))
        dynamic = has_dynamic_shared_memory(code.text)
        for header in headers or ():
            if (cuda_folder() / header.removeprefix("tilekern/")).is_file():
                raise ValueError(f"header {header} would take the place of one of the library's")
        if name is None:
            name = _only_kernel(code.text)
        label = name.partition("<")[0] if isinstance(name, str) else _label(own)
        identifier = re.sub(r"\W+", "_", label).strip("_")
        file = code.file or f"{identifier or 'kernel'}.cu"
        code = Source(code.text, file, dict(headers or {}), _folders(include))
    if shared_memory_bytes == 0 and len(own) == 1 and dynamic:
        raise ValueError(
            f"kernel {label} declares extern __shared__ memory: give its bytes to "
            "shared_memory_bytes"
        )
    return CudaKernel(
        KernelSettings(
            label=label,
            source=code,
            out=out,
            name=name,
            grid=grid,
            block=block,
            cluster=cluster,
            shared_memory_bytes=shared_memory_bytes,
            scalars=scalars,
            tensor_maps=tensor_maps,
            workspaces=workspaces,
            options=options,
            aliases=dict(aliases or {}),
            alignment=alignment,
            batch_axis=batch_axis,
            reference=reference,
            sharding_rule=sharding_rule,
            tune=checked(label, tune or {}),
            debug=debug,
            linear={},
        )
    )


class CudaKernel:
    """A CUDA kernel as a JAX operation; made by :func:`cuda_kernel`."""

    def __init__(self, settings: KernelSettings) -> None:
        self._settings = settings
        self._jvp: Callable[..., Any] | None = None
        self._vjp: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    def __repr__(self) -> str:
        """Name the kernel."""
        return f"<cuda_kernel {self._settings.label}>"

    def __call__(self, *inputs: ArrayLike, **parameters: Any) -> Any:
        """Call the kernel.

        Parameters
        ----------
        *inputs
            Arrays, of any shape and type that the settings' functions take.
        **parameters
            What those functions get besides: static and hashable.

        Returns
        -------
        Array or tuple of Array
            As ``out`` says.

        Raises
        ------
        TypeError
            If a parameter is an array or not hashable, a setting has a value of the wrong type, or
            the kernel takes another type than the call passes.
        ValueError
            If the launch breaks a limit, the kernel takes another number of parameters, the
            sharding rule does not fit the shapes, or a setting's function raises an error.
        CompileError
            If NVRTC rejects the source; the message has its log.
        """
        static = Parameters(self._settings.label, parameters)
        arrays = [jnp.asarray(x) for x in inputs]

        def call(*arrays: Any) -> Any:
            use = Use(input_types([jax.typeof(x) for x in arrays]), static)
            self._settings.check_output_types(use)
            outputs = bind(*arrays, settings=self._settings, parameters=static, batches=())
            return tuple(outputs) if self._settings.returns_tuple(use) else outputs[0]

        own = self._settings.parameters_of_meaning(parameters)
        if self._jvp is not None:
            rule = self._jvp
            differentiable = custom_jvp(call)
            differentiable.defjvp(lambda primals, tangents: rule(primals, tangents, **own))
            return differentiable(*arrays)
        if self._vjp is not None:
            forward, backward = self._vjp
            with_cotangents = custom_vjp(call)
            with_cotangents.defvjp(
                lambda *arrays: forward(*arrays, **own),
                lambda residuals, cotangent: backward(residuals, cotangent, **own),
            )
            return with_cotangents(*arrays)
        return call(*arrays)

    def trace(self, *inputs: Any, **parameters: Any) -> jax.stages.Traced:
        """Trace a call, as that of a jitted function does; parameters are static.

        Parameters
        ----------
        *inputs
            Arrays or ``jax.ShapeDtypeStruct``.
        **parameters
            As for a call.
        """
        return jax.jit(lambda *inputs: self(*inputs, **parameters)).trace(*inputs)

    def defjvp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Attach a derivative in forward mode, as :meth:`jax.custom_jvp.defjvp` does.

        If the tangent's part is linear in the tangents, in terms of JAX or of kernels that say how
        they are transposed (:meth:`deflinear`), reverse mode follows.

        Parameters
        ----------
        rule
            ``rule(primals, tangents, **parameters)`` returns the output and its tangent.
        """
        self._check_rules("defjvp", rule=rule)
        self._jvp = rule
        return rule

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """Attach a derivative in reverse mode, as :meth:`jax.custom_vjp.defvjp` does.

        Parameters
        ----------
        forward
            ``forward(*inputs, **parameters)`` returns the output, and residuals for ``backward``.
        backward
            ``backward(residuals, cotangent, **parameters)`` returns a cotangent for each input.
        """
        self._check_rules("defvjp", forward=forward, backward=backward)
        self._vjp = forward, backward

    def deflinear(self, inputs: int | Sequence[int], transpose: Callable[..., Any]) -> None:
        """State that the kernel is linear in an input, or jointly in several.

        Derivatives in both modes follow, of any order. A kernel that is linear in each of several
        inputs on its own, as a product is, is told so by one call for each.

        Parameters
        ----------
        inputs
            Which, counted from 0.
        transpose
            ``transpose(cotangent, *inputs, **parameters)`` returns the cotangent of the input, or a
            tuple of those of ``inputs``. In the place of these inputs it gets
            ``jax.ShapeDtypeStruct``; ``cotangent`` is a tuple if the kernel returns one.
        """
        self._check_rules("deflinear", transpose=transpose)
        group = (inputs,) if isinstance(inputs, int) else tuple(inputs)
        taken = {i for other in self._settings.linear for i in other}
        if not group or min(group) < 0 or len({*taken, *group}) < len(taken) + len(group):
            raise ValueError(
                f"{self!r}.deflinear({inputs}): inputs are numbered from 0, and each is in one "
                f"rule; there are rules for {sorted(taken)}"
            )
        self._settings.linear[group] = transpose

    def report(self, *inputs: Any, gpu: Gpu | str | None = None, **parameters: Any) -> KernelReport:
        """Compile the kernel for a call, and report its resources; ``print`` it for a table.

        Parameters
        ----------
        *inputs
            Arrays or ``jax.ShapeDtypeStruct``, without the dimensions of ``vmap``.
        gpu
            A :class:`Gpu` or an architecture such as ``"sm_90"``; by default the GPU at hand.
        **parameters
            As for a call.

        Raises
        ------
        NoGpu
            If there is none at hand and none was named.
        """
        static = Parameters(self._settings.label, parameters)
        arrays = jax.eval_shape(lambda *inputs: [jnp.asarray(x) for x in inputs], *inputs)
        target = known_gpu(gpu) if isinstance(gpu, str) else gpu or current_gpu()
        call, _ = tuned_call(arrays, target, settings=self._settings, parameters=static, batches=())
        return KernelReport(call, plan_kernel(call, target))

    def _check_rules(self, method: str, **rules: Any) -> None:
        for argument, rule in rules.items():
            check_callable(f"kernel {self._settings.label}: {method}", argument, rule)
        if self._jvp or self._vjp or (self._settings.linear and method != "deflinear"):
            raise ValueError(f"{self!r} has a derivative already; {method} would be another")


def cxx_type(dtype: Any) -> str:
    """Return the C++ name of an element type in kernels.

    Parameters
    ----------
    dtype
        Anything that NumPy takes for a type, ``jnp.bfloat16`` for example.

    Returns
    -------
    str
        ``"float"``, ``"tilekern::bfloat16"`` (of ``<tilekern/types.cuh>``), ``"float2"`` for
        complex64, ...

    Raises
    ------
    TypeError
        If there is none.

    Examples
    --------
    >>> import jax_tilekern as jtk
    >>> jtk.cxx_type("float16")
    'tilekern::float16'
    """
    known = CXX_TYPES.get(np.dtype(dtype))
    if known is None:
        raise TypeError(f"no C++ type for elements of {np.dtype(dtype)}")
    return known


def _code(source: Any) -> Image | Source:
    """Return PTX, a cubin, or CUDA C++, whose file has no name if the source is no path."""
    if isinstance(source, os.PathLike):
        path = str(Path(source))
        content = Path(source).read_bytes()
        if is_image(content):
            return Image(content, path)
        if Path(source).suffix in (".ptx", ".cubin"):
            raise ValueError(f"{path} is neither PTX, which begins with .version, nor a cubin")
        return Source(content.decode(), path)
    if isinstance(source, bytes):
        if not is_image(source):
            raise ValueError(
                f"the source begins with {source[:8]!r}, unlike PTX and cubins; CUDA C++ is a "
                "string"
            )
        return Image(source, "the cubin" if is_cubin(source) else "the PTX")
    if isinstance(source, str):
        content = source.encode()
        return Image(content, "the PTX") if is_image(content) else Source(source, "")
    raise TypeError(
        f"the source is a {type(source).__name__}, not a string, bytes or a pathlib.Path"
    )


def _only_name(file: str, names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    raise ValueError(f"{file} has {len(names)} kernels ({', '.join(names)}): pass name=")


def _folders(include: Any) -> tuple[str, ...]:
    single = isinstance(include, str | os.PathLike)
    found = tuple(str(Path(x).resolve()) for x in ((include,) if single else include))
    for folder in found:
        if not os.path.isdir(folder):
            raise ValueError(f"include: {folder} is not a folder")
    return found


def _label(names: Sequence[str]) -> str:
    return " or ".join(names) or "without a name"


def _only_kernel(text: str) -> str:
    kernels = kernels_in(text)
    if len(kernels) == 1 and not kernels[0][1]:
        return kernels[0][0]
    found = ", ".join(name + "<...>" * template for name, template, _ in kernels) or "none"
    raise ValueError(
        "without a name, a source has one __global__ function that is no template; this one has "
        f"{found}: pass name="
        + ("" if kernels or "\n" in text else ", and the path of a file as a pathlib.Path")
    )
