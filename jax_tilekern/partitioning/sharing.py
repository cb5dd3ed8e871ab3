"""What calls of one program share: the reshard of an operand, and rows that one of them gathers."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Sharing:
    """What a call shares with others. It follows the text of the call as a second line."""

    readers: tuple[int, ...] = ()  # for each operand, how many calls like it read it, if any has
    gives: int | None = None  # the operand that is the last result
    is_taken: bool = False  # whether another call takes it
    takes: tuple[int, ...] = ()  # the operands that further operands are, as another call has them

    def text(self) -> str:
        """Return the line, which is empty if nothing is shared."""
        changed = {name: x for name, x in vars(self).items() if x != getattr(_NOTHING, name)}
        return json.dumps(changed) if changed else ""

    @classmethod
    def from_text(cls, line: str) -> Sharing:
        content = json.loads(line or "{}")
        for name in ("readers", "takes"):
            content[name] = tuple(content.get(name, ()))
        return cls(**content)


_NOTHING = Sharing()
