"""A JAX function as the text of a CUDA kernel, in which threads evaluate lanes.

``callbacks.py`` takes calls of Python out of it, ``keys.py`` replaces typed random keys by their
data, ``text.py`` writes the kernel of a jaxpr. ``writer.py`` writes equations: scalars by
``epilogue/cuda_text.py``, arrays by ``arrays.py``, ``indexing.py``, ``reductions.py`` and
``sorts.py``, factorizations by ``linear_algebra.py`` and ``eigenvalues.py``, systems by
``tridiagonal.py``, functions of elements by ``special.py``, calls by ``calls.py``, loops and
branches by ``control_flow.py``. ``groups.py`` is the writer for a group of threads, which reads
jaxprs as ``flattened.py`` prepares them. ``values.py`` has the values that equations read and
write, ``refusals.py`` the reasons why primitives have no translation.
"""
