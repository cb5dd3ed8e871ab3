"""``cache``: show the contents of the kernel cache, or clear it."""

from __future__ import annotations

import argparse
from datetime import datetime

from jax_tilekern.cli.console import size
from jax_tilekern.compilation import kernel_cache

HELP = "show or clear the cache of compiled kernels"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--clear", action="store_true", help="delete every compiled kernel")


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return its exit status: 1 if kernels were to be deleted and remain."""
    info = kernel_cache.clear() if arguments.clear else kernel_cache.info()
    held = f"{info.entries} kernels, {size(info.bytes)}"
    if arguments.clear:
        left = kernel_cache.info().entries
        print(f"{info.location}: {held} deleted" + (f", {left} left" if left else ""))
        return 1 if left else 0
    print(f"folder       {info.location}")
    print(f"entries      {info.entries}")
    print(f"size         {size(info.bytes)} of at most {size(kernel_cache.LIMIT_BYTES)}")
    if info.oldest_use is not None:
        print(f"oldest use   {datetime.fromtimestamp(info.oldest_use):%Y-%m-%d %H:%M}")
    return 0
