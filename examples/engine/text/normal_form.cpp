#include "normal_form.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <string>
#include <tessera/core/error.hpp>

namespace engine {
namespace {

struct class_run {
  char32_t first, last;
  std::uint8_t combining;
};
constexpr class_run runs[] = {
#include "normal_form.inc"
};
constexpr std::uint8_t replaced = 255;

std::uint8_t class_of(char32_t letter) {
  if (letter < runs[0].first) return 0;
  const auto* run = std::lower_bound(std::begin(runs), std::end(runs), letter,
                                     [](const class_run& item, char32_t code) { return item.last < code; });
  return run != std::end(runs) && letter >= run->first ? run->combining : 0;
}

// The letter that begins at `text`[i], which moves behind it.
char32_t next_letter(std::string_view text, std::size_t& i) {
  const auto first = static_cast<unsigned char>(text[i++]);
  if (first < 0xc0) return first;
  char32_t letter = first & (first < 0xe0 ? 31u : first < 0xf0 ? 15u : 7u);
  while (i < text.size() && (static_cast<unsigned char>(text[i]) & 0xc0) == 0x80)
    letter = letter << 6 | (static_cast<unsigned char>(text[i++]) & 63);
  return letter;
}

}  // namespace

void require_composed(std::string_view text) {
  std::uint8_t previous = 0;
  for (std::size_t i = 0; i < text.size();) {
    if (!(text[i] & 0x80)) {
      previous = 0;
      ++i;
      continue;
    }
    const std::size_t begin = i;
    const char32_t letter = next_letter(text, i);
    const std::uint8_t found = class_of(letter);
    if (found == replaced || (found != 0 && found < previous)) {
      char code[16];
      std::snprintf(code, sizeof code, "U+%04X", unsigned(letter));
      tessera::fail("text", std::string(code) + " at byte " + std::to_string(begin),
                    "text in Unicode's normal form C, which this model's tokenizer takes",
                    "convert it, as Python's unicodedata.normalize(\"NFC\", text) does");
    }
    previous = found;
  }
}

}  // namespace engine
