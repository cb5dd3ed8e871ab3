"""The error of what a user gave."""


class BenchmarkError(ValueError):
    """An argument, a file or an environment that a command cannot use.

    The message says what is wrong with it and what would do.
    """
