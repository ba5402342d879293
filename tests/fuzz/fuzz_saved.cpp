// Any bytes give a sequence or a tessera::error, and a sequence that was loaded goes on: also bytes that were changed and given checksums
// that hold. The first byte chooses the method; then come places and values of changes, or bytes as they are.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>
#include <tessera/cache.hpp>
#include <tessera/methods/h2o.hpp>
#include <tessera/methods/loopserve.hpp>
#include <tessera/methods/mosaickv.hpp>
#include <tessera/methods/quest.hpp>
#include <tessera/methods/sentencekv.hpp>
#include <tessera/methods/snapkv.hpp>
#include <vector>

namespace {

using namespace tessera;
using bytes_type = std::vector<unsigned char>;
constexpr int dim = 64, prompt = 80;
const model_shape shape{1, 2, 1};

rows_view<const float> rows(index_t tokens, index_t heads, int first) {
  static const std::vector<float> values = [] {
    std::vector<float> all(1 << 15);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = float(int(i * 2654435761u >> 8 & 255) - 128) / 64;
    return all;
  }();
  return nhd_rows(values.data() + first, tokens, heads, dim);
}

/// Gives every block of saved bytes a checksum that holds.
void sign(bytes_type& bytes) {
  std::size_t at = sizeof(detail::saved_preamble);
  for (std::uint64_t number = 0; at + sizeof(detail::block_header) <= bytes.size(); ++number) {
    detail::block_header header;
    std::memcpy(&header, bytes.data() + at, sizeof(header));
    const std::size_t left = bytes.size() - at - sizeof(header);
    if (left < 8 || header.bytes > left - 8) return;
    header = detail::block_header::describing(header.bytes, number);
    std::memcpy(bytes.data() + at, &header, sizeof(header));
    at += sizeof(header);
    const std::uint64_t sum = checksum(bytes.data() + at, std::size_t(header.bytes));
    std::memcpy(bytes.data() + at + header.bytes, &sum, 8);
    at += std::size_t(header.bytes) + 8;
  }
}

template <class Cache>
void go_on(Cache& held, index_t id) {
  std::vector<float> out(2 * dim * 4);
  const std::vector<std::uint8_t> boundaries(4, 0);
  for (int i = 0; i < 3; ++i) {
    const batch step = held.prepare_step({id}, 1, std::span(boundaries).first(1));
    held.decode(0, step, rows(1, 2, i), rows(1, 1, i), rows(1, 1, i), nhd_rows(out.data(), 1, 2, dim));
  }
  (void)held.positions(0, id, 0);
  held.truncate(id, (std::max)(held.settled(id), held.next_position(id) - 2));
  held.prefill(0, id, rows(4, 2, 0), rows(4, 1, 9), rows(4, 1, 5), boundaries);
  held.prefill_attention(0, id, rows(4, 2, 0), nhd_rows(out.data(), 4, 2, dim));
  held.end_prefill(id);
}

template <class Recipe>
void load_changed(std::span<const std::uint8_t> data, const Recipe& recipe = {}) {
  static const auto workers = std::make_shared<cpu::executor>(1);
  static const bytes_type saved = [&] {
    cache<Recipe> source(shape, recipe, workers);
    const index_t id = source.open();
    const std::vector<std::uint8_t> boundaries(prompt, 0);
    source.prefill(0, id, rows(prompt, 2, 0), rows(prompt, 1, 100), rows(prompt, 1, 1000), boundaries);
    source.end_prefill(id);
    bytes_type bytes;
    source.save(id, [&](const void* part, std::size_t count) {
      const auto* const first = static_cast<const unsigned char*>(part);
      bytes.insert(bytes.end(), first, first + count);
    });
    return bytes;
  }();
  bytes_type bytes = saved;
  const bool as_they_are = data[0] & 128;
  if (as_they_are) bytes.assign(data.begin() + 1, data.end());
  for (std::size_t i = 1; !as_they_are && i + 2 < data.size(); i += 3) {
    const std::size_t place = (data[i] | std::size_t(data[i + 1]) << 8) * (data[i + 2] >> 4 & 3 ? 1 : 7) % bytes.size();
    bytes[place] = data[i + 2] & 15;  // larger numbers are more tokens than a sequence may have
  }
  if (!as_they_are) sign(bytes);
  cache<Recipe> target(shape, recipe, workers);
  std::size_t read = 0;
  try {
    const index_t id = target.load([&](void* to, std::size_t wanted) {
      const std::size_t count = (std::min)(wanted, bytes.size() - read);
      std::memcpy(to, bytes.data() + read, count);
      read += count;
      return count;
    });
    go_on(target, id);
  } catch (const error&) {
  } catch (const std::bad_alloc&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 4) return 0;
  const std::span given(data, size);
  snapkv<fp16, dim> snap;
  snap.set_budget(40);
  mosaickv<fp16, dim> packed;
  packed.layout.rows.segment = 70;
  switch (data[0] & 7) {
    case 0:
      load_changed(given, snap);
      break;
    case 1:
      load_changed<quest<fp16, dim>>(given);
      break;
    case 2:
      load_changed<h2o<fp16, dim>>(given);
      break;
    case 3:
      load_changed<loopserve<fp16, dim>>(given);
      break;
    case 4:
      load_changed<sentencekv<fp16, dim>>(given);
      break;
    default:
      load_changed(given, packed);
  }
  return 0;
}
