// The packed form of a cubin in a custom call: deflated, and then encoded as text, because XLA
// prints binary attributes with up to four characters per byte, which would make programs many
// times larger.
//
// jax_tilekern/compilation/cubin.py packs it, with Python's zlib and base64. This code unpacks it
// without zlib, which a machine with a C++ compiler need not have.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace tilekern {

struct PackedCubin {
  size_t bytes;           // of the cubin
  std::string_view text;  // a view of an attribute
};

// Returns the cubin, or nothing if the text is damaged.
std::optional<std::string> Unpack(const PackedCubin& packed);

}  // namespace tilekern
