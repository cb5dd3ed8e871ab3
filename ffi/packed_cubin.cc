#include "packed_cubin.h"

#include <array>
#include <cstdint>
#include <vector>

namespace tilekern {
namespace {

// Decodes base85 with the alphabet of RFC 1924: five digits encode four bytes, most significant
// first. A shorter last group of n digits encodes n - 1 bytes.
constexpr std::string_view kDigits =
    "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~";

std::optional<std::string> FromBase85(std::string_view text) {
  std::array<int, 256> values;
  values.fill(-1);
  for (size_t i = 0; i < kDigits.size(); ++i) values[static_cast<uint8_t>(kDigits[i])] = i;
  std::string bytes;
  bytes.reserve(text.size() / 5 * 4 + 4);
  for (size_t at = 0; at < text.size(); at += 5) {
    const std::string_view group = text.substr(at, 5);
    uint64_t number = 0;
    for (size_t i = 0; i < 5; ++i) {
      // A shorter group is padded with the largest digit.
      const int value = i < group.size() ? values[static_cast<uint8_t>(group[i])] : 84;
      if (value < 0) return std::nullopt;
      number = number * 85 + static_cast<uint64_t>(value);
    }
    if (number > UINT32_MAX) return std::nullopt;
    for (size_t i = 0; i + 1 < group.size(); ++i) {
      bytes.push_back(static_cast<char>(number >> (24 - 8 * i)));
    }
  }
  return bytes;
}

// The bits of a deflate stream, least significant first in each byte. Bits past the end are zeros,
// and set `exhausted`.
class Bits {
 public:
  explicit Bits(std::string_view bytes) : bytes_(bytes) {}

  unsigned Take(int count) {
    unsigned bits = 0;
    for (int i = 0; i < count; ++i) bits |= Next() << i;
    return bits;
  }

  unsigned Next() {
    if (at_ >= 8 * bytes_.size()) {
      exhausted_ = true;
      return 0;
    }
    const unsigned bit = static_cast<uint8_t>(bytes_[at_ / 8]) >> (at_ % 8) & 1;
    ++at_;
    return bit;
  }

  void SkipToByte() { at_ = (at_ + 7) / 8 * 8; }
  bool exhausted() const { return exhausted_; }

 private:
  std::string_view bytes_;
  size_t at_ = 0;
  bool exhausted_ = false;
};

constexpr int kMaxCodeBits = 15;

// A canonical Huffman code (RFC 1951, 3.2.2): codes of one length are consecutive numbers in the
// order of their symbols, and follow those of shorter lengths.
class HuffmanCode {
 public:
  explicit HuffmanCode(const std::vector<uint8_t>& lengths) {
    for (uint8_t length : lengths) ++counts_[length];
    counts_[0] = 0;
    for (int length = 1; length <= kMaxCodeBits; ++length) {
      for (size_t symbol = 0; symbol < lengths.size(); ++symbol) {
        if (lengths[symbol] == length) symbols_.push_back(static_cast<int>(symbol));
      }
    }
  }

  // Returns the next symbol, or -1 if the bits are not a code.
  int Read(Bits& bits) const {
    int code = 0, first = 0, index = 0;
    for (int length = 1; length <= kMaxCodeBits; ++length) {
      code = code << 1 | static_cast<int>(bits.Next());
      const int count = counts_[length];
      if (code - first < count) return symbols_[index + code - first];
      index += count;
      first = (first + count) << 1;
    }
    return -1;
  }

 private:
  std::array<int, kMaxCodeBits + 1> counts_ = {};
  std::vector<int> symbols_;
};

// RFC 1951, 3.2.5: the smallest length or distance of each symbol, and its number of extra bits.
constexpr std::array<uint16_t, 29> kLengths = {3,  4,  5,  6,   7,   8,   9,   10,  11, 13,
                                               15, 17, 19, 23,  27,  31,  35,  43,  51, 59,
                                               67, 83, 99, 115, 131, 163, 195, 227, 258};
constexpr std::array<uint8_t, 29> kLengthBits = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2,
                                                 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0};
constexpr std::array<uint16_t, 30> kDistances = {
    1,   2,   3,   4,   5,   7,    9,    13,   17,   25,   33,   49,   65,    97,    129,
    193, 257, 385, 513, 769, 1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577};
constexpr std::array<uint8_t, 30> kDistanceBits = {0, 0, 0,  0,  1,  1,  2,  2,  3,  3,
                                                   4, 4, 5,  5,  6,  6,  7,  7,  8,  8,
                                                   9, 9, 10, 10, 11, 11, 12, 12, 13, 13};

// Inflates one stream into the expected number of bytes.
class Inflater {
 public:
  Inflater(std::string_view deflated, size_t bytes) : bits_(deflated), bytes_(bytes) {}

  std::optional<std::string> Run() {
    bool last = false;
    while (!last) {
      last = bits_.Next();
      const unsigned kind = bits_.Take(2);
      const bool good = kind == 0   ? Stored()
                        : kind == 1 ? Compressed(FixedLengths(), HuffmanCode(Repeated(30, 5)))
                        : kind == 2 ? Dynamic()
                                    : false;
      if (!good || bits_.exhausted()) return std::nullopt;
    }
    if (out_.size() != bytes_) return std::nullopt;
    return std::move(out_);
  }

 private:
  static std::vector<uint8_t> Repeated(size_t count, uint8_t length) {
    return std::vector<uint8_t>(count, length);
  }

  static HuffmanCode FixedLengths() {
    std::vector<uint8_t> lengths(288, 8);
    for (int symbol = 144; symbol < 256; ++symbol) lengths[symbol] = 9;
    for (int symbol = 256; symbol < 280; ++symbol) lengths[symbol] = 7;
    return HuffmanCode(lengths);
  }

  bool Stored() {
    bits_.SkipToByte();
    const unsigned count = bits_.Take(16);
    if ((bits_.Take(16) ^ count) != 0xffff || count > bytes_ - out_.size()) return false;
    for (unsigned i = 0; i < count; ++i) out_.push_back(static_cast<char>(bits_.Take(8)));
    return true;
  }

  bool Dynamic() {
    const size_t literals = bits_.Take(5) + 257, distances = bits_.Take(5) + 1;
    const size_t given = bits_.Take(4) + 4;
    constexpr std::array<uint8_t, 19> kOrder = {16, 17, 18, 0, 8,  7, 9,  6, 10, 5,
                                                11, 4,  12, 3, 13, 2, 14, 1, 15};
    std::vector<uint8_t> of_lengths(kOrder.size());
    for (size_t i = 0; i < given; ++i) of_lengths[kOrder[i]] = bits_.Take(3);
    const HuffmanCode code(of_lengths);
    std::vector<uint8_t> lengths;
    while (lengths.size() < literals + distances) {
      const int symbol = code.Read(bits_);
      if (symbol < 0 || bits_.exhausted()) return false;
      if (symbol < 16) {
        lengths.push_back(symbol);
        continue;
      }
      if (symbol == 16 && lengths.empty()) return false;
      const uint8_t repeated = symbol == 16 ? lengths.back() : 0;
      const unsigned count = symbol == 16   ? 3 + bits_.Take(2)
                             : symbol == 17 ? 3 + bits_.Take(3)
                                            : 11 + bits_.Take(7);
      lengths.insert(lengths.end(), count, repeated);
    }
    if (lengths.size() > literals + distances) return false;
    const auto end = lengths.begin() + literals;
    return Compressed(HuffmanCode({lengths.begin(), end}), HuffmanCode({end, lengths.end()}));
  }

  bool Compressed(const HuffmanCode& literals, const HuffmanCode& distances) {
    while (!bits_.exhausted()) {
      const int symbol = literals.Read(bits_);
      if (symbol == 256) return true;
      if (symbol < 0 || symbol > 285) return false;
      if (symbol < 256) {
        if (out_.size() == bytes_) return false;
        out_.push_back(static_cast<char>(symbol));
        continue;
      }
      const size_t length = kLengths[symbol - 257] + bits_.Take(kLengthBits[symbol - 257]);
      const int far = distances.Read(bits_);
      if (far < 0 || far > 29) return false;
      const size_t distance = kDistances[far] + bits_.Take(kDistanceBits[far]);
      if (distance > out_.size() || length > bytes_ - out_.size()) return false;
      // The copy is byte by byte, because source and destination may overlap.
      for (size_t i = 0; i < length; ++i) out_.push_back(out_[out_.size() - distance]);
    }
    return false;
  }

  Bits bits_;
  const size_t bytes_;
  std::string out_;
};

}  // namespace

std::optional<std::string> Unpack(const PackedCubin& packed) {
  const std::optional<std::string> deflated = FromBase85(packed.text);
  if (!deflated) return std::nullopt;
  return Inflater(*deflated, packed.bytes).Run();
}

}  // namespace tilekern
