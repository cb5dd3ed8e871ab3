"""A JAX function of scalars as the epilogue of a product: traced, vectorised, and as CUDA.

``scalar_function.py`` traces it and says what is no function of scalars, ``primitives.py`` has the
table of what each primitive of JAX is in CUDA, and ``cuda_text.py`` writes the kernel's text.
``understood.py`` declares the parameters of primitives and refuses others. ``plain_data.py`` writes
the function as data, for another process that partitions the call.
"""
