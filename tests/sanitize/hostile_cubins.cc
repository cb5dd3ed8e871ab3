// Packed cubins as no one packs them: they are refused or unpacked, and memory stays inside.
#include <cstdint>
#include <random>

#include "check.h"
#include "packed_cubin.h"

namespace {

struct Good {
  size_t bytes;
  std::string text;
};

// One for each kind of deflate block: stored, with fixed codes, with codes of its own.
const Good kGood[] = {
    {24, "0T=-1|9?eHMgRc<0|W&I2M7rY3k(eo4-gR&69"},
    {99, "t9SKrQ%EjN%FI)!rx6nX"},
    {500,
     "B~iJJMKK5*sDx%9q6&ye$Q;x9&iiZ0vTVa#0FJ3?#h@R`4*{;$hrOD!yGlGrBKECj&Nk-yi5Y4k+cxaZ7TJSduUR>Iu>="
     "{@ePhoMg%cqkSHaIAmJsn3&x#okBc3|^Ydka{wePlW!5<`)8=3Mx6fNPq8uTgE=MJKYsDU30b=^lMq8{rOfjqJV?"
     "eupvNt"
     "_y}_QT~f<v&5m30|j9K)*OLs^e>+ZXI*c)H7Ns#E~*2@>qC>>wkx7pP>ybJtGqPsYj?J8EC$qSJ9UEe8k2c_ip|TGYy("
     "PW"
     "^yk$60FG=eVP<6Eb_;Rwe<>?gdb&bCM}dWipQ{=Qgm5=PEx3+m)Jb~0R"}};

}  // namespace

void CheckHostileCubins(Counts& counts) {
  std::mt19937 random(1);
  int refused = 0;
  constexpr int kRounds = 20000;
  for (const auto& [bytes, text] : kGood) {
    const auto cubin = tilekern::Unpack({bytes, text});
    counts.Check(cubin && cubin->size() == bytes, "a good cubin is unpacked");
    counts.Check(!tilekern::Unpack({bytes - 1, text}), "a cubin of more bytes is refused");
    counts.Check(!tilekern::Unpack({bytes + 1, text}), "a cubin of fewer bytes is refused");
    counts.Check(!tilekern::Unpack({SIZE_MAX, text}), "a cubin of all memory is refused");
    for (size_t kept = 0; kept + 1 < text.size(); ++kept) {
      counts.Check(!tilekern::Unpack({bytes, text.substr(0, kept)}), "half a cubin is refused");
    }
    for (int round = 0; round < kRounds; ++round) {
      std::string damaged = text;
      for (int changes = 1 + static_cast<int>(random() % 4); changes > 0; --changes) {
        // Digits mostly, of which any other character would be refused at once.
        damaged[random() % damaged.size()] = static_cast<char>('0' + random() % 75);
      }
      const auto unpacked = tilekern::Unpack({bytes, damaged});
      if (unpacked && unpacked->size() != bytes) {
        counts.Check(false, "a damaged cubin has another size");
      }
      refused += !unpacked;
      ++counts.passed;
    }
  }
  std::printf("%d of %d damaged cubins refused\n", refused, 3 * kRounds);
}
