// What any store of a layout must keep to, whatever a token takes and wherever its rows lie.
#pragma once

#include "catch.hpp"

#include <iostream>
#include <string>
#include <vector>

#include <tessera/backend/cpu/store/kv_store.hpp>

#include "support/plain_head.hpp"
#include "support/shrink/shortest_failure.hpp"
#include "support/subsets.hpp"

namespace support {

/// What a row becomes when it is stored.
template <class Encoding>
std::vector<float> decoded_row(const float* row, int dim) {
  using unit = typename Encoding::stored_type;
  constexpr int elements = tessera::elements_of_unit<unit>;
  std::vector<unit> encoded(static_cast<std::size_t>(dim / elements));
  const float scale = tessera::encode_row<Encoding>(row, dim, encoded.data(), 1);
  std::vector<float> result;
  for (const auto& x : encoded) {
    if constexpr (elements > 1) {
      for (int i = 0; i < elements; ++i) result.push_back(x.element(i));
    } else {
      result.push_back(float(x) * scale);
    }
  }
  return result;
}

/// Element d of a row whose units lie `stride` apart, times its scale.
template <class Unit>
float element_of(const Unit* row, tessera::offset_t stride, int d, float scale) {
  if constexpr (constexpr int elements = tessera::elements_of_unit<std::remove_const_t<Unit>>; elements > 1) {
    return row[d / elements * stride].element(d % elements);
  } else {
    return float(row[d * stride]) * scale;
  }
}

/// One call of a store. `share`: of the slots that are kept, or of the positions that stay; rows, flags and slots are drawn from
/// `seed`. A copy is one of sequence id + 1, and what was in its place is cleared.
struct store_call {
  enum class verb { append, keep, clear, copy, truncate };
  verb made = verb::append;
  index_t layer = 0, id = 0;
  index_t tokens = 0;
  double share = 0;
  std::uint64_t seed = 0;
};

/// A store, and the plainest form of what it holds: they are compared after every call.
template <class Layout>
class followed_store {
  static constexpr int k_dim = Layout::k_dim, v_dim = Layout::v_dim;
  using encoding = typename Layout::encoding_type;

 public:
  static constexpr index_t layers = 2, sequences = 3;

  followed_store(index_t kv_heads, const tessera::cpu::column_set& with)
      : kv_heads_(kv_heads), with_(with), store_(layers, kv_heads, with), all_(layers * sequences) {
    for (layer_rows& stored : all_) stored.heads.resize(std::size_t(kv_heads));
    for (index_t id = 0; id < sequences; ++id) store_.open(id);
  }

  void make(const store_call& call) {
    rng random(call.seed);
    switch (call.made) {
      case store_call::verb::append:
        append(random, call);
        break;
      case store_call::verb::keep:
        keep(random, call);
        break;
      case store_call::verb::clear:
        clear(call.id);
        break;
      case store_call::verb::copy:
        copy((call.id + 1) % sequences, call.id);
        break;
      case store_call::verb::truncate:
        truncate(call);
    }
    for (index_t id = 0; id < sequences; ++id) {
      for (index_t layer = 0; layer < layers; ++layer) compare(layer, id);
    }
  }

 private:
  struct layer_rows {
    std::vector<plain_head> heads;
    index_t next = 0;
    tessera::segment_cursor text{};
  };
  layer_rows& rows_of(index_t layer, index_t id) { return all_[std::size_t(id * layers + layer)]; }

  void append(rng& random, const store_call& call) {
    layer_rows& stored = rows_of(call.layer, call.id);
    const index_t tokens = call.tokens;
    const auto k = normals(random, std::size_t(tokens * kv_heads_ * k_dim)),
               v = normals(random, std::size_t(tokens * kv_heads_ * v_dim));
    std::vector<std::uint8_t> flags;
    for (index_t t = 0; t < tokens; ++t) flags.push_back(random.chance(0.2));
    store_.append({call.layer, call.id}, tessera::nhd_rows<const float>(k.data(), tokens, kv_heads_, k_dim),
                  tessera::nhd_rows<const float>(v.data(), tokens, kv_heads_, v_dim), stored.next,
                  {stored.text, flags.data()});
    for (index_t t = 0; t < tokens; ++t) {
      const index_t segment = stored.text.advance(flags[std::size_t(t)] == 1);
      for (index_t h = 0; h < kv_heads_; ++h) {
        plain_head& head = stored.heads[std::size_t(h)];
        head.positions.push_back(stored.next + t);
        head.scores.push_back(0);
        head.segments.push_back(segment);
        head.keys.push_back(decoded_row<encoding>(k.data() + (t * kv_heads_ + h) * k_dim, k_dim));
        head.values.push_back(decoded_row<encoding>(v.data() + (t * kv_heads_ + h) * v_dim, v_dim));
      }
    }
    stored.next += tokens;
    const auto number = float(call.seed % 30);
    for (index_t h = 0; h < kv_heads_ && with_.scores; ++h) {
      auto& beside = store_.beside({call.layer, call.id});
      for (index_t s = 0; s < store_.lengths({call.layer, call.id})[std::size_t(h)]; ++s) {
        stored.heads[std::size_t(h)].scores[std::size_t(s)] += float(s) + number;
        beside.scores()[beside.begins()[std::size_t(h)] + s] += float(s) + number;
      }
    }
  }
  void keep(rng& random, const store_call& call) {
    const auto lengths = store_.lengths({call.layer, call.id});
    const auto chosen = random_subset(random, lengths, call.share);
    const bool dropped = store_.keep({call.layer, call.id}, chosen, workers_);
    must(dropped == (chosen.counts != lengths), "keep says whether it has dropped anything", dropped);
    for (index_t h = 0; h < kv_heads_; ++h)
      rows_of(call.layer, call.id).heads[std::size_t(h)].keep(chosen.row(h), chosen.counts[std::size_t(h)]);
  }
  void clear(index_t id) {
    store_.clear(id);
    for (index_t layer = 0; layer < layers; ++layer) {
      rows_of(layer, id) = {std::vector<plain_head>(std::size_t(kv_heads_)), 0, {}};
      must(store_.bytes({layer, id}) == 0, "a cleared place holds no bytes", store_.bytes({layer, id}));
    }
    shares_[std::size_t(id)] = false;
  }
  void copy(index_t from, index_t to) {
    clear(to);
    store_.copy(from, to);
    for (index_t layer = 0; layer < layers; ++layer) rows_of(layer, to) = rows_of(layer, from);
    shares_[std::size_t(from)] = shares_[std::size_t(to)] = true;
  }
  void truncate(const store_call& call) {
    layer_rows& stored = rows_of(call.layer, call.id);
    const auto position = index_t(call.share * double(stored.next));
    store_.truncate({call.layer, call.id}, position);
    for (plain_head& head : stored.heads) {
      std::vector<index_t> stays;
      for (std::size_t s = 0; s < head.positions.size() && head.positions[s] < position; ++s)
        stays.push_back(index_t(s));
      head.keep(stays.data(), index_t(stays.size()));
    }
    stored.next = position;
  }

  void compare(index_t layer, index_t id) {
    const std::vector<plain_head>& expected = rows_of(layer, id).heads;
    const auto view = store_.view({layer, id});
    tessera::offset_t least = 0;
    must(view.kv_heads == kv_heads_, "a view has all heads", view.kv_heads);
    for (index_t h = 0; h < kv_heads_; ++h) {
      const plain_head& head = expected[std::size_t(h)];
      const auto length = index_t(head.positions.size());
      must(store_.lengths({layer, id})[std::size_t(h)] == length && view.length(0, h) == length,
           "a store holds what was kept", "layer ", layer, ", id ", id, ", head ", h, ": ", view.length(0, h), " of ",
           length);
      least += length * Layout::token_bytes();
      for (index_t s = 0; s < length; ++s) compare_slot(layer, id, h, s, head);
    }
    must(shares_[std::size_t(id)] || store_.bytes({layer, id}) >= least, "a store takes the bytes of its tokens",
         store_.bytes({layer, id}));
  }
  void compare_slot(index_t layer, index_t id, index_t h, index_t s, const plain_head& head) {
    const auto view = store_.view({layer, id});
    const auto index = std::size_t(s);
    bool is_same =
        store_.position({layer, id}, h, s) == head.positions[index] && view.position(0, h, s) == head.positions[index];
    for (int d = 0; d < k_dim; ++d) {
      is_same &= element_of(view.key(0, h, s), view.k_strides.dim, d, view.key_scale(0, h, s)) ==
                 head.keys[index][std::size_t(d)];
    }
    for (int d = 0; d < v_dim; ++d) {
      is_same &= element_of(view.value(0, h, s), view.v_strides.dim, d, view.value_scale(0, h, s)) ==
                 head.values[index][std::size_t(d)];
    }
    auto& beside = store_.beside({layer, id});
    const auto column = beside.begins()[std::size_t(h)] + s;
    if (with_.scores) is_same &= beside.scores()[column] == head.scores[index];
    if (with_.segments) is_same &= beside.segments()[column] == head.segments[index];
    must(is_same, "rows, positions, scores and segments stay together", "layer ", layer, ", id ", id, ", head ", h,
         ", slot ", s);
  }

  index_t kv_heads_;
  tessera::cpu::column_set with_;
  tessera::cpu::kv_store<Layout> store_;
  std::vector<layer_rows> all_;                                     // [sequences, layers]
  std::vector<bool> shares_ = std::vector<bool>(sequences, false);  // pages, perhaps
  tessera::cpu::executor workers_{2};
};

/// Random calls of a store.
inline std::vector<store_call> random_store_calls(rng& random, index_t layers, index_t sequences, int count) {
  std::vector<store_call> calls;
  for (int i = 0; i < count; ++i) {
    store_call& call = calls.emplace_back();
    call.layer = random.between(0, layers - 1);
    call.id = random.between(0, sequences - 1);
    call.seed = std::uint64_t(random.between(0, 0x7ffffffe));
    if (random.chance(0.6)) {
      call.tokens = random.pick({1, 1, 3, 40});
    } else if (random.chance(0.3)) {
      call.made = store_call::verb::copy;
    } else if (random.chance(0.2)) {
      call.made = store_call::verb::truncate;
      call.share = random.pick({0.0, 0.5, 0.9, 1.0});
    } else if (random.chance(0.9)) {
      call.made = store_call::verb::keep;
      // Now and then everything goes: positions must not start anew.
      call.share = random.pick({0.0, 0.3, 0.95, 1.0});
    } else {
      call.made = store_call::verb::clear;
    }
  }
  return calls;
}

/// The initializer of a store_call.
inline std::string store_call_code(const store_call& call) {
  static constexpr const char* names[] = {"append", "keep", "clear", "copy", "truncate"};
  std::ostringstream text;
  text << "{store_call::verb::" << names[int(call.made)] << ", " << call.layer << ", " << call.id << ", " << call.tokens
       << ", " << call.share << ", " << call.seed << "u},";
  return text.str();
}

/// Fewer tokens.
inline std::vector<std::vector<store_call>> simpler_store_calls(const std::vector<store_call>& calls,
                                                                std::size_t index) {
  std::vector<std::vector<store_call>> lists;
  const index_t tokens = calls[index].tokens;
  for (const index_t fewer : {index_t(1), tokens / 2, tokens - 1}) {
    if (fewer < 1 || fewer >= tokens) continue;
    lists.push_back(calls);
    lists.back()[index].tokens = fewer;
  }
  return lists;
}

/// Rows, positions, scores and segments stay together through appends and keeps of several layers and sequences, whatever happens
/// to the others; a cleared place is empty and holds no bytes.
template <class Layout>
void obeys_the_laws_of_stores(std::uint64_t seed) {
  using followed = followed_store<Layout>;
  rng random(seed);
  for (index_t i = 0; i < scaled(40); ++i) {
    const index_t kv_heads = random.between(1, 4);
    const tessera::cpu::column_set with{random.chance(0.5), random.chance(0.5)};
    const auto calls = random_store_calls(random, followed::layers, followed::sequences, 30);
    const auto replay = [&](const std::vector<store_call>& list) {
      return failure_of([&] {
        followed store(kv_heads, with);
        for (const store_call& call : list) store.make(call);
      });
    };
    const auto found = replay(calls);
    if (found) std::cout << shortest_failure(calls, *found, replay, store_call_code, simpler_store_calls) << std::flush;
    CAPTURE(kv_heads, with.scores, with.segments);
    REQUIRE((found ? found->rule : "") == "");
  }
}

}  // namespace support
