// The blocks of GGUF's tensors as numbers. The layouts are those of ggml's types of the same names.
#include "gguf_blocks.hpp"

#include <algorithm>
#include <cstring>
#include <tessera/core/types.hpp>

namespace engine {
namespace {

using tessera::bf16;
using tessera::fp16;

std::uint8_t byte_at(const std::byte* from, int index) { return std::to_integer<std::uint8_t>(from[index]); }
template <class T>
T read(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}
float half_at(const std::byte* from) { return float(read<fp16>(from)); }

void decode_f32(const std::byte* from, float* to) { *to = read<float>(from); }
void decode_f16(const std::byte* from, float* to) { *to = half_at(from); }
void decode_bf16(const std::byte* from, float* to) { *to = float(read<bf16>(from)); }

// 32 elements: a scale, perhaps a minimum, the fifth bits, and four bits of element i and of i + 16 in a byte.
template <bool HasMinimum, bool HasFifthBit>
void decode_nibbles(const std::byte* from, float* to) {
  const float scale = half_at(from), minimum = HasMinimum ? half_at(from + 2) : 0.0f;
  const std::byte* rest = from + (HasMinimum ? 4 : 2);
  const std::uint32_t fifth = HasFifthBit ? read<std::uint32_t>(rest) : 0;
  const std::byte* quads = rest + (HasFifthBit ? 4 : 0);
  constexpr int middle = HasMinimum ? 0 : (HasFifthBit ? 16 : 8);
  for (int i = 0; i < 16; ++i) {
    const int low = (byte_at(quads, i) & 15) | int(fifth >> i & 1) << 4;
    const int high = (byte_at(quads, i) >> 4) | int(fifth >> (i + 16) & 1) << 4;
    to[i] = float(low - middle) * scale + minimum;
    to[i + 16] = float(high - middle) * scale + minimum;
  }
}

void decode_q8_0(const std::byte* from, float* to) {
  const float scale = half_at(from);
  for (int i = 0; i < 32; ++i) to[i] = float(read<std::int8_t>(from + 2 + i)) * scale;
}

// 256 elements in 16 groups: four bits of scale and of minimum a group, two bits an element.
void decode_q2_k(const std::byte* from, float* to) {
  const std::byte *scales = from, *pairs = from + 16;
  const float scale = half_at(from + 80), minimum = half_at(from + 82);
  for (int group = 0; group < 16; ++group) {
    const int half = group / 8, shift = group % 8 / 2 * 2, column = group % 2 * 16;
    const std::uint8_t both = byte_at(scales, group);
    for (int i = 0; i < 16; ++i) {
      const int bits = byte_at(pairs, half * 32 + column + i) >> shift & 3;
      to[group * 16 + i] = scale * float(both & 15) * float(bits) - minimum * float(both >> 4);
    }
  }
}

// 256 elements in 16 groups: six bits of scale a group, three bits an element, the third of which lies apart.
void decode_q3_k(const std::byte* from, float* to) {
  const std::byte *thirds = from, *pairs = from + 32, *packed = from + 96;
  const float scale = half_at(from + 108);
  for (int group = 0; group < 16; ++group) {
    const int low = group < 8 ? byte_at(packed, group) & 15 : byte_at(packed, group - 8) >> 4;
    const int high = byte_at(packed, 8 + group % 4) >> (group / 4 * 2) & 3;
    const float own = scale * float((low | high << 4) - 32);
    const int half = group / 8, shift = group % 8 / 2 * 2, column = group % 2 * 16, third = half * 4 + group % 8 / 2;
    for (int i = 0; i < 16; ++i) {
      const int bits = byte_at(pairs, half * 32 + column + i) >> shift & 3;
      const bool is_set = byte_at(thirds, column + i) >> third & 1;
      to[group * 16 + i] = own * float(bits - (is_set ? 0 : 4));
    }
  }
}

// Six bits of scale and of minimum of eight groups, in twelve bytes.
void scale_and_minimum(const std::byte* packed, int group, int& scale, int& minimum) {
  if (group < 4) {
    scale = byte_at(packed, group) & 63;
    minimum = byte_at(packed, group + 4) & 63;
  } else {
    scale = (byte_at(packed, group + 4) & 15) | byte_at(packed, group - 4) >> 6 << 4;
    minimum = byte_at(packed, group + 4) >> 4 | byte_at(packed, group) >> 6 << 4;
  }
}

// 256 elements in 8 groups of 32: four or five bits an element.
template <bool HasFifthBit>
void decode_q45_k(const std::byte* from, float* to) {
  const float scale = half_at(from), minimum = half_at(from + 2);
  const std::byte *packed = from + 4, *fifths = from + 16, *quads = from + (HasFifthBit ? 48 : 16);
  for (int group = 0; group < 8; ++group) {
    int own_scale, own_minimum;
    scale_and_minimum(packed, group, own_scale, own_minimum);
    const float times = scale * float(own_scale), less = minimum * float(own_minimum);
    for (int i = 0; i < 32; ++i) {
      int bits = byte_at(quads, group / 2 * 32 + i) >> (group % 2 * 4) & 15;
      if (HasFifthBit) bits |= (byte_at(fifths, i) >> group & 1) << 4;
      to[group * 32 + i] = times * float(bits) - less;
    }
  }
}

// 256 elements in 16 groups: eight bits of scale a group, six bits an element.
void decode_q6_k(const std::byte* from, float* to) {
  const std::byte *quads = from, *pairs = from + 128, *scales = from + 192;
  const float scale = half_at(from + 208);
  for (int i = 0; i < 256; ++i) {
    const int half = i / 128, within = i % 128, part = within / 32, column = within % 32;
    const int low = byte_at(quads, half * 64 + part % 2 * 32 + column) >> (part / 2 * 4) & 15;
    const int high = byte_at(pairs, half * 32 + column) >> (part * 2) & 3;
    to[i] = scale * float(read<std::int8_t>(scales + i / 16)) * float((low | high << 4) - 32);
  }
}

constexpr gguf_encoding encodings[] = {{0, "F32", 1, 4, decode_f32},
                                       {1, "F16", 1, 2, decode_f16},
                                       {2, "Q4_0", 32, 18, decode_nibbles<false, false>},
                                       {3, "Q4_1", 32, 20, decode_nibbles<true, false>},
                                       {6, "Q5_0", 32, 22, decode_nibbles<false, true>},
                                       {7, "Q5_1", 32, 24, decode_nibbles<true, true>},
                                       {8, "Q8_0", 32, 34, decode_q8_0},
                                       {10, "Q2_K", 256, 84, decode_q2_k},
                                       {11, "Q3_K", 256, 110, decode_q3_k},
                                       {12, "Q4_K", 256, 144, decode_q45_k<false>},
                                       {13, "Q5_K", 256, 176, decode_q45_k<true>},
                                       {14, "Q6_K", 256, 210, decode_q6_k},
                                       {30, "BF16", 1, 2, decode_bf16}};

}  // namespace

const gguf_encoding* find_gguf_encoding(std::uint32_t id) {
  const auto found =
      std::find_if(std::begin(encodings), std::end(encodings), [&](const auto& e) { return e.id == id; });
  return found == std::end(encodings) ? nullptr : found;
}

}  // namespace engine
