"""Machine code that a user has: PTX, which is assembled, or a cubin, which is loaded as it is."""

from __future__ import annotations

import functools
import re
import struct
from dataclasses import dataclass, field

from jax_tilekern.compilation.cubin import is_cubin, kernels_of, signature, target_of

# The first directive of PTX, after comments.
_IS_PTX = re.compile(rb"(?:\s|//[^\n]*\n|/\*.*?\*/)*\.version\b", re.DOTALL)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")


def is_image(content: bytes) -> bool:
    """Return whether a content is PTX or a cubin."""
    return is_cubin(content) or _IS_PTX.match(content) is not None


@dataclass(frozen=True)
class Image:
    """PTX or a cubin.

    Attributes
    ----------
    content
        The text of the PTX, or the ELF image.
    file
        What messages call it.
    """

    content: bytes = field(repr=False)
    file: str

    @property
    def is_cubin(self) -> bool:
        """Whether it needs no assembler."""
        return is_cubin(self.content)

    @functools.cached_property
    def symbols(self) -> tuple[str, ...]:
        """Names of its kernels, as the driver knows them."""
        if self.is_cubin:
            try:
                return kernels_of(self.content)
            except (struct.error, ValueError) as error:
                raise ValueError(f"{self.file} is no whole cubin: {error}") from None
        return tuple(dict.fromkeys(_ENTRY.findall(self.text)))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its kernels in C++, without parameters."""
        return tuple(map(_name, self.symbols))

    @property
    def text(self) -> str:
        """The PTX."""
        return self.content.decode(errors="replace")

    @property
    def has_dynamic_shared_memory(self) -> bool:
        """Whether PTX declares shared memory whose size the launch gives."""
        return not self.is_cubin and re.search(r"\.extern\s+\.shared\b", self.text) is not None

    def symbol(self, name: str) -> str | None:
        """Return the symbol of a kernel, if there is just one of a name, with or without types."""
        if name in self.symbols:
            return name
        wanted = name.replace(" ", "")
        found = [s for s, own in zip(self.symbols, self.names, strict=True) if own == wanted]
        return found[0] if len(found) == 1 else None

    def check_target(self, arch: str) -> None:
        """Check that a GPU runs it.

        Raises
        ------
        ValueError
            If it is a cubin for another architecture.
        """
        if not self.is_cubin:
            return
        own, gpu = target_of(self.content), int(re.sub(r"\D", "", arch))
        if own // 10 != gpu // 10 or own > gpu:
            raise ValueError(
                f"{self.file} is a cubin for sm_{own}, which a GPU of {arch} does not run; compile "
                "it for that, or pass PTX or CUDA C++"
            )


def _name(symbol: str) -> str:
    found = signature(symbol)
    # Templates name their result, which is void.
    return found[0].removeprefix("void ").replace(" ", "") if found else symbol
