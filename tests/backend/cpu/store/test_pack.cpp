#include "catch.hpp"

#include <cstring>

#include <tessera/backend/cpu/store/pack.hpp>

#include "support/kv_tensor.hpp"
#include "support/subsets.hpp"

using namespace tessera;

TEST_CASE("pack in place and pack into fresh memory give the same rows") {
  support::rng random(111);
  for (index_t i = 0; i < support::scaled(300); ++i) {
    const index_t sequences = random.between(1, 3), kv_heads = random.between(1, 3);
    std::vector<index_t> lengths;
    for (index_t r = 0; r < sequences * kv_heads; ++r) lengths.push_back(random.between(1, 60));
    const support::kv_tensor<float, 64> source(random, sequences, kv_heads, lengths);
    auto in_place = source, fresh = source;
    const auto writable = [](support::kv_tensor<float, 64>& tensor) {
      const auto reading = tensor.view();
      kv_view<float, 64> view;
      view.k = tensor.k.data();
      view.v = tensor.v.data();
      view.k_strides = reading.k_strides;
      view.v_strides = reading.v_strides;
      view.sequences = reading.sequences;
      view.kv_heads = reading.kv_heads;
      view.lengths = reading.lengths;
      view.length_strides = {reading.length_strides.sequence, reading.length_strides.head};
      return view;
    };
    const auto chosen = support::random_subset(random, lengths, random.pick({0.0, 0.2, 0.9, 1.0}));
    cpu::executor workers(random.between(1, 3));
    cpu::pack(writable(in_place), chosen.view(), writable(in_place), workers);
    cpu::pack(source.view(), chosen.view(), writable(fresh), workers);
    for (index_t row = 0; row < chosen.rows(); ++row) {
      const index_t count = chosen.counts[std::size_t(row)];
      for (index_t slot = 0; slot < source.slots; ++slot) {
        const index_t from = slot < count ? chosen.row(row)[slot] : slot;
        const auto at = source.row(row / kv_heads, row % kv_heads, slot) * 64;
        const auto original = source.row(row / kv_heads, row % kv_heads, from) * 64;
        REQUIRE(std::equal(fresh.k.begin() + offset_t(at), fresh.k.begin() + offset_t(at) + 64,
                           source.k.begin() + offset_t(original)));
        REQUIRE(std::equal(fresh.v.begin() + offset_t(at), fresh.v.begin() + offset_t(at) + 64,
                           source.v.begin() + offset_t(original)));
      }
    }
    REQUIRE(in_place.k == fresh.k);
    REQUIRE(in_place.v == fresh.v);
  }
}

TEST_CASE(
    "rows packed towards an end lie before it in place and in fresh memory, and ends that cannot be are refused") {
  support::rng random(114);
  constexpr int dim = 64;
  for (index_t i = 0; i < support::scaled(300); ++i) {
    const index_t sequences = random.between(1, 3), kv_heads = random.between(1, 3), room = random.between(1, 70);
    const std::size_t slots = std::size_t(sequences * kv_heads * room);
    std::vector<index_t> lengths;
    for (index_t r = 0; r < sequences * kv_heads; ++r) lengths.push_back(random.between(0, room));
    const auto k = support::normals(random, slots * dim), v = support::normals(random, slots * dim);
    std::vector<index_t> positions(slots);
    for (std::size_t at = 0; at < slots; ++at) positions[at] = index_t(3 * at);
    auto k_here = k, v_here = v, k_there = k, v_there = v;
    auto positions_here = positions, positions_there = positions;
    const auto view_of = [&](auto& keys, auto& values, auto& columns) {
      kv_view<float, dim> view;
      view.k = keys.data(), view.v = values.data();
      view.k_strides = view.v_strides = {kv_heads * room * dim, room * dim, dim, 1};
      view.sequences = sequences, view.kv_heads = kv_heads;
      view.lengths = lengths.data(), view.length_strides = {kv_heads, 1};
      view.positions = columns.data(), view.position_strides = {kv_heads * room, room};
      return view;
    };
    const auto chosen = support::random_subset(random, lengths, random.pick({0.0, 0.2, 0.9, 1.0}));
    std::vector<index_t> ends(std::size_t(sequences), 0);
    for (index_t row = 0; row < chosen.rows(); ++row) {
      const index_t count = chosen.counts[std::size_t(row)];
      if (count > 0)
        ends[std::size_t(row / kv_heads)] = std::max(ends[std::size_t(row / kv_heads)], chosen.row(row)[count - 1] + 1);
    }
    for (index_t& end : ends) end = random.between(end, room);
    cpu::executor workers(random.between(1, 3));
    using view_type = kv_view<float, dim>;
    const view_type here = view_of(k_here, v_here, positions_here);
    pack_problem<view_type, view_type> in_place{here, chosen.view(), here};
    in_place.positions = {positions_here.data(), kv_heads * room, room};
    in_place.ends = ends.data();
    const auto spoiled = [&](index_t sequence, index_t end) {
      auto wrong = ends;
      wrong[std::size_t(sequence)] = end;
      auto p = in_place;
      p.ends = wrong.data();
      CHECK_THROWS_WITH(cpu::pack(p, workers), contains("end of packed rows (sequence " + std::to_string(sequence)));
    };
    for (index_t row = 0; row < chosen.rows(); ++row) {
      const index_t count = chosen.counts[std::size_t(row)];
      if (count > 0) spoiled(row / kv_heads, chosen.row(row)[count - 1]);
    }
    REQUIRE(k_here == k);
    auto elsewhere = in_place;
    elsewhere.source = view_of(k_there, v_there, positions_there);  // what is stored, before it moves
    std::vector<float> k_fresh = k, v_fresh = v;
    std::vector<index_t> positions_fresh = positions;
    elsewhere.target = view_of(k_fresh, v_fresh, positions_fresh);
    elsewhere.positions.data = positions_fresh.data();
    cpu::pack(in_place, workers);
    cpu::pack(elsewhere, workers);
    for (index_t row = 0; row < chosen.rows(); ++row) {
      const index_t count = chosen.counts[std::size_t(row)], end = ends[std::size_t(row / kv_heads)];
      for (index_t slot = 0; slot < room; ++slot) {
        const bool written = slot < end && slot >= end - count;
        const auto from = std::size_t(row * room + (written ? chosen.row(row)[slot - end + count] : slot));
        const auto to = std::size_t(row * room + slot);
        REQUIRE(positions_here[to] == positions[from]);
        REQUIRE(std::equal(k.begin() + offset_t(from) * dim, k.begin() + offset_t(from + 1) * dim,
                           k_here.begin() + offset_t(to) * dim));
        REQUIRE(std::equal(v.begin() + offset_t(from) * dim, v.begin() + offset_t(from + 1) * dim,
                           v_here.begin() + offset_t(to) * dim));
      }
    }
    REQUIRE(k_here == k_fresh);
    REQUIRE(v_here == v_fresh);
    REQUIRE(positions_here == positions_fresh);
  }
}

TEST_CASE("pack gathers from strided rows, a transposed V among them") {
  support::rng random(112);
  const support::kv_tensor<float, 64> source(random, 1, 1, {9});
  std::vector<float> transposed(64 * 9), k(64 * 3), v(64 * 3);
  for (std::size_t t = 0; t < 9; ++t) {
    for (std::size_t d = 0; d < 64; ++d) transposed[d * 9 + t] = source.v[t * 64 + d];
  }
  auto from = source.view();
  from.v = transposed.data();
  from.v_strides = {0, 0, 1, 9};
  kv_view<float, 64> to;
  to.k = k.data();
  to.v = v.data();
  to.k_strides = to.v_strides = {0, 0, 64, 1};
  to.sequences = to.kv_heads = 1;
  const std::vector<index_t> slots{1, 4, 8}, counts{3};
  cpu::executor workers(1);
  cpu::pack(from, selection_view{slots.data(), counts.data(), nullptr, 3}, to, workers);
  for (std::size_t i = 0; i < 3; ++i) {
    for (std::size_t d = 0; d < 64; ++d) {
      REQUIRE(k[i * 64 + d] == source.k[std::size_t(slots[i]) * 64 + d]);
      REQUIRE(v[i * 64 + d] == source.v[std::size_t(slots[i]) * 64 + d]);
    }
  }
}

TEST_CASE("segments are numbered as tokens are appended, and move with them") {
  support::rng random(113);
  constexpr index_t sequences = 2, kv_heads = 2, room = 40;
  constexpr int dim = 64;
  std::vector<float> k(sequences * kv_heads * room * dim), v(k.size());
  std::vector<index_t> lengths(sequences * kv_heads, 0), segments(sequences * kv_heads * room, -1);
  std::vector<segment_cursor> texts(sequences);
  kv_view<float, dim> view;
  view.k = k.data();
  view.v = v.data();
  view.k_strides = view.v_strides = {kv_heads * room * dim, room * dim, dim, 1};
  view.sequences = sequences;
  view.kv_heads = kv_heads;
  view.lengths = lengths.data();
  view.length_strides = {kv_heads, 1};
  const slot_column<index_t> column{segments.data(), kv_heads * room, room, nullptr};
  std::vector<std::vector<index_t>> expected(sequences);
  std::vector<segment_cursor> own(sequences);
  for (const index_t tokens : {9, 1, 14}) {
    const auto rows = support::normals(random, std::size_t(sequences * tokens * kv_heads * dim));
    std::vector<std::uint8_t> flags;
    for (index_t t = 0; t < sequences * tokens; ++t) flags.push_back(random.chance(0.3));
    const std::vector<index_t> added{tokens, tokens / 2};  // of the second text fewer
    append_problem<kv_view<float, dim>, float> p;
    p.view = view;
    p.k = p.v = nhd_rows(rows.data(), tokens, kv_heads, dim, sequences);
    p.lengths = lengths.data();
    p.new_tokens = added.data();
    p.segments = column;
    const auto before = lengths;
    CHECK_THROWS_WITH(cpu::append(p), contains("boundaries and texts is null"));
    p.boundaries = flags.data();
    p.texts = texts.data();
    flags[0] = 3;
    CHECK_THROWS_WITH(cpu::append(p), contains("boundaries[0] is 3; expected 0 or 1"));
    REQUIRE(lengths == before);
    flags[0] = 1;
    cpu::append(p);
    for (index_t b = 0; b < sequences; ++b) {
      for (index_t t = 0; t < added[std::size_t(b)]; ++t) {
        expected[std::size_t(b)].push_back(own[std::size_t(b)].advance(flags[std::size_t(b * tokens + t)] == 1));
      }
    }
  }
  const auto held = [&](index_t b, index_t h) {
    const index_t* row = column.row(b, h, kv_heads);
    return std::vector<index_t>(row, row + lengths[std::size_t(b * kv_heads + h)]);
  };
  for (index_t b = 0; b < sequences; ++b) {
    for (index_t h = 0; h < kv_heads; ++h) REQUIRE(held(b, h) == expected[std::size_t(b)]);
  }
  const auto chosen = support::random_subset(random, lengths, 0.5);
  cpu::executor workers(1);
  pack_problem<kv_view<float, dim>, kv_view<float, dim>> move{view, chosen.view(), view};
  move.source_segments = {segments.data(), kv_heads * room, room, nullptr};
  move.segments = column;
  move.lengths = lengths.data();
  cpu::pack(move, workers);
  for (index_t row = 0; row < chosen.rows(); ++row) {
    std::vector<index_t> kept;
    for (index_t i = 0; i < chosen.counts[std::size_t(row)]; ++i) {
      kept.push_back(expected[std::size_t(row / kv_heads)][std::size_t(chosen.row(row)[i])]);
    }
    REQUIRE(held(row / kv_heads, row % kv_heads) == kept);
  }
}

TEST_CASE("rows are not written where several share a scale, and the scale stays") {
  constexpr int dim = 64;
  constexpr index_t slots = 4, heads = 2;
  std::vector<fp8> k(2 * heads * slots * dim), v(k.size());
  std::vector<float> scales(64, 0.25f);
  std::vector<index_t> lengths(2, 0);
  kv_view<fp8_elements<bf16>, dim> view;
  view.k = k.data();
  view.v = v.data();
  view.k_strides = view.v_strides = {heads * slots * dim, slots * dim, dim, 1};
  view.sequences = 2;
  view.kv_heads = heads;
  view.lengths = lengths.data();
  view.length_strides = {1, 0};
  view.scales = {scales.data(), scales.data() + 32, heads * slots, slots, 1};
  const std::vector<bf16> rows(2 * 2 * heads * dim, bf16(100.0f));
  const auto given = nhd_rows(rows.data(), 2, heads, dim, 2);
  const auto before = k;
  const auto refused = [&](const row_scales<float>& shared, const char* name) {
    auto of_tensor = view;
    of_tensor.scales = shared;
    cpu::executor workers(1);
    const std::vector<index_t> none(4, 0);
    CHECK_THROWS_WITH(cpu::append(of_tensor, given, given), contains(name));
    CHECK_THROWS_WITH(cpu::pack(of_tensor, selection_view{none.data(), none.data(), nullptr, 0}, of_tensor, workers),
                      contains(name));
    CHECK(scales == std::vector<float>(64, 0.25f));
    CHECK(std::memcmp(k.data(), before.data(), k.size()) == 0);
  };
  refused({scales.data(), scales.data() + 32, 0, 0, 0}, "stride of scales from token to token is 0");
  refused({scales.data(), scales.data() + 32, heads * slots, 0, 1}, "stride of scales from head to head is 0");
  refused({scales.data(), scales.data() + 32, 0, slots, 1},
          "stride of scales from sequence to sequence, or page to page is 0");
  auto without = view;
  without.scales.k = nullptr;
  CHECK_THROWS_WITH(cpu::append(without, given, given), contains("memory of the problem is null"));
  CHECK_NOTHROW(cpu::append(view, given, given));
  CHECK(scales[0] == 100.0f / 448);
}

TEST_CASE("appended positions go on behind the stored ones, or nothing is written") {
  constexpr int dim = 64;
  std::vector<float> k(6 * dim, 7.0f), v = k;
  std::vector<index_t> positions{3, 9, -1, -1, -1, -1}, length{2}, first{9};
  kv_view<float, dim> view;
  view.k = k.data();
  view.v = v.data();
  view.k_strides = view.v_strides = {6 * dim, 6 * dim, dim, 1};
  view.sequences = view.kv_heads = 1;
  view.lengths = length.data();
  const std::vector<float> rows(2 * dim, 1.0f);
  append_problem<kv_view<float, dim>, float> p;
  p.view = view;
  p.k = p.v = nhd_rows(rows.data(), 2, 1, dim);
  p.lengths = length.data();
  p.positions = {positions.data(), 6, 6};
  const auto sentence = contains("position of the first new token (sequence 0, kv_head 0) is");
  CHECK_THROWS_WITH(cpu::append(p), sentence);  // after the length, 2: slots 3 and 9 are what an eviction left
  p.first_position = first.data();
  CHECK_THROWS_WITH(cpu::append(p), sentence);
  CHECK(length[0] == 2);
  CHECK(positions == std::vector<index_t>{3, 9, -1, -1, -1, -1});
  CHECK(k == std::vector<float>(6 * dim, 7.0f));
  first[0] = 10;
  cpu::append(p);
  CHECK(positions == std::vector<index_t>{3, 9, 10, 11, -1, -1});
}
