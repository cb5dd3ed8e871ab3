// A cubin as a custom call carries it: deflated, and then text, because XLA prints a call's
// attributes and four characters a byte would make programs many times larger.
//
// jax_tilekern/cubin.py packs, with Python's zlib and base64. It is unpacked here without zlib,
// which a machine with a C++ compiler need not have.
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

// The cubin, or nothing if the text is damaged.
std::optional<std::string> Unpack(const PackedCubin& packed);

}  // namespace tilekern
