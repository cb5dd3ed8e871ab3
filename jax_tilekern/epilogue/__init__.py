"""A JAX function of scalars as the epilogue of a product: traced, vectorised, and as CUDA.

``scalar_function.py`` traces it and refuses other functions, ``primitives.py`` has the table of the
CUDA for each primitive of JAX, and ``cuda_text.py`` writes the kernel's text.
``understood.py`` declares the parameters of primitives and refuses others. ``plain_data.py`` writes
the function as data, for another process that partitions the call.
"""
