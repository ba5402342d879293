// The GPU packs and appends what the CPU packs and appends.
#include "backend/cuda/device.hpp"
#include "catch.hpp"
#include "tessera/backend/cpu/store/pack.hpp"
#include "tessera/backend/cuda/store/append.cuh"
#include "tessera/backend/cuda/store/pack.cuh"

using namespace tessera;
using namespace gpu_test;

namespace {
std::mt19937 rng(21);

template <class T>
std::vector<T> random_elements(std::size_t n) {
  std::vector<T> values(n);
  if constexpr (element_block<T>) {
    for (auto& v : values) v = T::encode(random_elements<float>(std::size_t(T::elements)).data());
  } else {
    for (auto& v : values) v = T(score(int(rng() % 8) ? 0 : 3, rng));
  }
  return values;
}

/// K and V of a batch on the host and on the device behind one sort of table, with position and score columns.
/// `E`: an element type, or an encoding whose rows have scales.
template <class E, int D, class Table, int Dv>
struct store {
  using view_type = kv_view<E, D, Table, Dv>;
  using T = typename view_type::encoding_type::stored_type;
  index_t sequences, heads, capacity;  // capacity: slots of every (sequence, head)
  bool odd;                            // strides that forbid 16-byte accesses
  offset_t token_k, token_v;
  std::vector<T> k, v;
  std::vector<index_t> lengths, positions, table;
  std::vector<float> scores, k_scales, v_scales;
  std::vector<offset_t> begin;
  buffer<T> d_k, d_v;
  buffer<index_t> d_lengths, d_positions, d_table;
  buffer<float> d_scores, d_k_scales, d_v_scales;
  buffer<offset_t> d_begin;
  static constexpr index_t page = 16;

  store(index_t s, index_t h, index_t c, bool odd_ = false)
      : sequences(s),
        heads(h),
        capacity((c + page - 1) / page * page),
        odd(odd_),
        token_k(view_type::k_units + (odd_ ? 3 : 0)),
        token_v(view_type::v_units + (odd_ ? 1 : 0)),
        k(random_elements<T>(cells() * std::size_t(token_k))),
        v(random_elements<T>(cells() * std::size_t(token_v))),
        lengths(std::size_t(s * h)),
        positions(cells()),
        scores(cells()),
        k_scales(random_elements<float>(cells())),
        v_scales(random_elements<float>(cells())),
        d_k(k),
        d_v(v),
        d_lengths(lengths.size()),
        d_positions(cells()),
        d_table(cells() / page),
        d_scores(cells()),
        d_k_scales(cells()),
        d_v_scales(cells()),
        d_begin(std::size_t(s * h)) {
    for (std::size_t i = 0; i < cells(); ++i) positions[i] = index_t(i * 3 % 100003), scores[i] = score(0, rng);
    for (index_t r = 0; r < s * h; ++r) begin.push_back(offset_t(r) * capacity);
    // Pages lie scattered in one pool, an own row of the table per head.
    for (index_t i = 0; i < index_t(cells()) / page; ++i) table.push_back(i);
    std::shuffle(table.begin(), table.end(), rng);
    up();
  }
  std::size_t cells() const { return std::size_t(sequences) * std::size_t(heads) * std::size_t(capacity); }
  void up() {
    d_k.set(k), d_v.set(v), d_lengths.set(lengths), d_positions.set(positions), d_table.set(table),
        d_scores.set(scores), d_begin.set(begin), d_k_scales.set(k_scales), d_v_scales.set(v_scales);
  }
  view_type view(bool device) {
    view_type w;
    w.k = device ? d_k.data : k.data();
    w.v = device ? d_v.data : v.data();
    w.sequences = sequences, w.kv_heads = heads;
    w.lengths = device ? d_lengths.data : lengths.data();
    w.length_strides = {heads, 1};
    w.positions = device ? d_positions.data : positions.data();
    w.position_begin = device ? d_begin.data : begin.data();
    w.order = slot_order::ascending;  // numbers of any kind: they are moved, and nobody goes by them
    w.scales.k = device ? d_k_scales.data : k_scales.data();
    w.scales.v = device ? d_v_scales.data : v_scales.data();
    if constexpr (std::is_same_v<Table, ragged>) {
      w.k_strides = {0, 0, token_k, 1}, w.v_strides = {0, 0, token_v, 1};
      w.table = {device ? d_begin.data : begin.data(), heads};
    } else if constexpr (std::is_same_v<Table, block_table>) {
      w.k_strides = {page * token_k, 0, token_k, 1}, w.v_strides = {page * token_v, 0, token_v, 1};
      w.table = {device ? d_table.data : table.data(), page, offset_t(heads) * capacity / page, capacity / page};
      w.scales.outer = page;
    } else {
      w.k_strides = {heads * capacity * token_k, capacity * token_k, token_k, 1};
      w.v_strides = {heads * capacity * token_v, capacity * token_v, token_v, 1};
      w.scales.outer = offset_t(heads) * capacity, w.scales.head = capacity;
    }
    return w;
  }
};

std::vector<index_t> random_slots(index_t n, int kind, index_t row) {
  std::vector<index_t> slots;
  const unsigned keep = kind == 0 ? 25 : kind == 1 ? 99 : kind == 2 ? 3 : unsigned(row * 17 % 101);
  for (index_t i = 0; i < n; ++i) {
    // Kind 4: everything but one early slot, so that every tile leans on the one before it.
    if (kind == 4 ? i != index_t(row % 5) : kind == 5 ? i >= n / 2 : rng() % 100 < keep) slots.push_back(i);
  }
  return slots;
}

template <class T, int D, class Table, int Dv>
void compare_pack(index_t sequences, index_t heads, index_t capacity, int kind, bool in_place, bool odd,
                  bool towards_end) {
  using S = store<T, D, Table, Dv>;
  S from(sequences, heads, capacity, odd), fresh(sequences, heads, capacity, odd);
  S& to = in_place ? from : fresh;
  const index_t rows = sequences * heads;
  from.lengths.assign(std::size_t(rows), capacity);  // the CPU refuses slots that are not stored
  std::vector<index_t> indices(std::size_t(rows) * std::size_t(capacity), -1), counts;
  std::vector<index_t> ends(std::size_t(sequences), 0);
  const auto choose = [&] {
    counts.clear();
    std::fill(ends.begin(), ends.end(), 0);
    for (index_t r = 0; r < rows; ++r) {
      const index_t n = r == 1 ? 0 : r == 2 ? capacity : index_t(rng() % unsigned(capacity + 1));
      const auto slots = random_slots(n, kind, r);
      std::copy(slots.begin(), slots.end(), indices.begin() + offset_t(r) * capacity);
      counts.push_back(index_t(slots.size()));
      index_t& end = ends[std::size_t(r / heads)];
      end = std::max(end, slots.empty() ? 0 : slots.back() + 1);
    }
    for (index_t& end : ends) end += index_t(rng() % unsigned(capacity - end + 1));
  };
  choose();
  buffer<index_t> d_indices(indices), d_counts(counts), d_ends(ends);
  const auto device = cuda::device_info::current();
  using View = typename S::view_type;
  cudaStream_t stream;
  cuda::check(cudaStreamCreate(&stream), "cudaStreamCreate");
  const auto check_all = [&](auto op) {
    buffer<unsigned char> workspace(op.workspace_bytes());
    op.prepare(workspace.data, stream);
    cuda::pack_problem<View, View> problem{
        from.view(true), {d_indices.data, d_counts.data, nullptr, capacity}, to.view(true)};
    problem.positions = {to.d_positions.data, 0, 0, to.d_begin.data};
    problem.source_scores = {from.d_scores.data, 0, 0, from.d_begin.data};
    problem.scores = {to.d_scores.data, 0, 0, to.d_begin.data};
    problem.lengths = to.d_lengths.data;
    if (towards_end) problem.ends = d_ends.data;
    graph captured(stream, [&] { op.run(problem, workspace.data, stream); });
    cpu::executor here(1);
    for (int run = 0; run < scaled(3, 2); ++run) {
      if (run > 0) choose(), d_indices.set(indices), d_counts.set(counts), d_ends.set(ends);
      captured.launch();
      pack_problem<View, View> on_host{
          from.view(false), selection_view{indices.data(), counts.data(), nullptr, capacity}, to.view(false)};
      if (towards_end) on_host.ends = ends.data();
      const auto old_positions = from.positions;
      const auto old_scores = from.scores;
      cpu::pack(on_host, here);
      for (index_t r = 0; r < rows; ++r) {
        for (index_t i = 0; i < counts[std::size_t(r)]; ++i) {
          const auto source = std::size_t(from.begin[std::size_t(r)] +
                                          indices[std::size_t(r) * std::size_t(capacity) + std::size_t(i)]);
          const auto target =
              std::size_t(to.begin[std::size_t(r)] + on_host.target_slot(r / heads, counts[std::size_t(r)], i));
          to.positions[target] = old_positions[source], to.scores[target] = old_scores[source];
        }
      }
      INFO(sequences << " x " << heads << " x " << capacity << " kind " << kind << " in place " << in_place << " odd "
                     << odd << " towards end " << towards_end << " D " << D << " run " << run);
      REQUIRE(same_bits(to.d_k.get(), to.k));
      REQUIRE(same_bits(to.d_v.get(), to.v));
      REQUIRE(same_bits(to.d_k_scales.get(), to.k_scales));
      REQUIRE(same_bits(to.d_v_scales.get(), to.v_scales));
      REQUIRE(same_bits(to.d_positions.get(), to.positions));
      REQUIRE(same_bits(to.d_scores.get(), to.scores));
      REQUIRE(to.d_lengths.get() == counts);
    }
  };
  if (in_place)
    check_all(cuda::pack<View, View, true>(sequences + odd, heads, capacity, device));  // or for a larger batch
  else
    check_all(cuda::pack<View, View, false>(sequences, heads, capacity, device));
  cudaStreamDestroy(stream);
}

template <class T, int D, class Table, int Dv = D>
void compare_packs() {
  for (const bool in_place : {false, true}) {
    for (const int kind : scaled(cases(6), 2)) {
      for (const bool towards_end : {false, true}) {
        compare_pack<T, D, Table, Dv>(2, 3, scaled(300, 100), kind, in_place, false, towards_end);
        compare_pack<T, D, Table, Dv>(1, 4, 33, kind, in_place, kind % 2, towards_end);
      }
    }
    for (const bool towards_end : {false, true})
      compare_pack<T, D, Table, Dv>(1, 3, scaled(5000, 400), in_place ? 4 : 0, in_place, false, towards_end);
  }
}

template <class T, class E, int D, class Table, int Dv>
void compare_append(index_t sequences, index_t heads, index_t tokens, bool odd, bool per_sequence) {
  using S = store<T, D, Table, Dv>;
  const index_t capacity = 64 + 3 * tokens;
  S to(sequences, heads, capacity, odd);
  for (index_t r = 0; r < sequences * heads; ++r) {
    to.lengths[std::size_t(r)] = per_sequence && r % heads ? to.lengths[std::size_t(r - 1)] : index_t(rng() % 50);
  }
  to.up();
  std::vector<index_t> first, some;
  for (index_t b = 0; b < sequences; ++b)
    first.push_back(1000 * b), some.push_back(index_t(rng() % unsigned(tokens + 1)));
  buffer<index_t> d_first(first), d_some(some);
  const auto k = random_elements<E>(std::size_t(sequences) * tokens * heads * D),
             v = random_elements<E>(std::size_t(sequences) * tokens * heads * Dv);
  buffer<E> d_k(k), d_v(v);
  auto device_view = to.view(true), host_view = to.view(false);
  if (per_sequence) device_view.length_strides.head = host_view.length_strides.head = 0;
  const cuda::append<typename S::view_type, E> op(sequences + odd, heads);  // or for a larger batch
  cudaStream_t stream;
  cuda::check(cudaStreamCreate(&stream), "cudaStreamCreate");
  const bool ragged_steps = odd;
  graph captured(stream, [&] {
    op.run({device_view,
            nhd_rows<const E>(d_k.data, tokens, heads, D, sequences),
            nhd_rows<const E>(d_v.data, tokens, heads, Dv, sequences),
            to.d_lengths.data,
            ragged_steps ? d_some.data : nullptr,
            d_first.data,
            {to.d_positions.data, 0, 0, to.d_begin.data},
            {to.d_scores.data, 0, 0, to.d_begin.data}},
           nullptr, stream);
  });
  for (int step = 0; step < scaled(3, 2); ++step) {
    captured.launch();
    for (index_t b = 0; b < sequences; ++b) {
      const index_t added = ragged_steps ? some[std::size_t(b)] : tokens;
      auto one = host_view;
      auto from_k = nhd_rows<const E>(k.data() + std::size_t(b) * tokens * heads * D, added, heads, D);
      auto from_v = nhd_rows<const E>(v.data() + std::size_t(b) * tokens * heads * Dv, added, heads, Dv);
      for (index_t h = 0; h < heads; ++h) {  // one sequence at a time through the CPU's conversions
        const index_t length = one.length(b, h);
        for (index_t t = 0; t < added; ++t) {
          using encoding = encoding_of<T>;
          const float k_scale = encode_row<encoding>(from_k.row(0, t, h), D, one.key(b, h, length + t), 1);
          const float v_scale = encode_row<encoding>(from_v.row(0, t, h), Dv, one.value(b, h, length + t), 1);
          if constexpr (encoding::scaled) {
            const offset_t row = one.scales.index(one.table.locate(b, h, length + t), h);
            to.k_scales[std::size_t(row)] = k_scale, to.v_scales[std::size_t(row)] = v_scale;
          }
          const auto at = std::size_t(to.begin[std::size_t(b * heads + h)] + length + t);
          to.positions[at] = first[std::size_t(b)] + t, to.scores[at] = 0;
        }
      }
      for (index_t h = 0; h < (per_sequence ? 1 : heads); ++h) to.lengths[std::size_t(b * heads + h)] += added;
    }
    INFO(sequences << " x " << heads << " tokens " << tokens << " odd " << odd << " per sequence " << per_sequence
                   << " step " << step);
    REQUIRE(same_bits(to.d_k.get(), to.k));
    REQUIRE(same_bits(to.d_v.get(), to.v));
    REQUIRE(same_bits(to.d_k_scales.get(), to.k_scales));
    REQUIRE(same_bits(to.d_v_scales.get(), to.v_scales));
    REQUIRE(same_bits(to.d_positions.get(), to.positions));
    REQUIRE(same_bits(to.d_scores.get(), to.scores));
    REQUIRE(to.d_lengths.get() == to.lengths);
  }
  cudaStreamDestroy(stream);
}

template <class T, class E, int D, class Table, int Dv = D>
void compare_appends() {
  for (const bool per_sequence : {false, true}) {
    for (const index_t tokens : scaled(std::vector<index_t>{1, 3, 8, 200}, 2)) {
      compare_append<T, E, D, Table, Dv>(3, 2, tokens, false, per_sequence);
      compare_append<T, E, D, Table, Dv>(1, 5, tokens, true, per_sequence);
    }
  }
}
}  // namespace

TEST_CASE("the device keeps the rows that the CPU keeps", "[gpu]") {
  if (gpu_missing()) return;
  compare_packs<bf16, 128, contiguous>();
  compare_packs<bf16, 128, ragged>();
  compare_packs<bf16, 128, block_table>();
  compare_packs<fp16, 64, ragged>();
  compare_packs<fp16, 80, block_table, 96>();
  compare_packs<float, 192, contiguous, 128>();
  compare_packs<float, 256, ragged>();
}

TEST_CASE("the device appends what the CPU appends", "[gpu]") {
  if (gpu_missing()) return;
  compare_appends<bf16, float, 128, contiguous>();
  compare_appends<fp16, float, 64, ragged>();
  compare_appends<bf16, bf16, 128, block_table>();
  compare_appends<float, fp16, 80, ragged, 96>();
  compare_appends<float, float, 64, contiguous>();
  compare_appends<fp16, bf16, 192, block_table, 128>();
}

TEST_CASE("the device refuses to write rows where several share a scale", "[gpu]") {
  if (gpu_missing()) return;
  store<fp8_elements<bf16>, 128, contiguous, 128> held(2, 2, 64);
  auto view = held.view(true);
  buffer<bf16> rows(random_elements<bf16>(2 * 2 * 128));
  const auto given = nhd_rows<const bf16>(rows.data, 1, 2, 128, 2);
  const cuda::append<decltype(view), bf16> append(2, 2);
  const cuda::pack<decltype(view), decltype(view), false> pack(2, 2, 64, cuda::device_info::current());
  const auto refused = [&](const char* name) {
    CHECK_THROWS_WITH(append.run({view, given, given}, nullptr, nullptr), contains(name));
    CHECK_THROWS_WITH(pack.run({view, {}, view}, nullptr, nullptr), contains(name));
    CHECK(same_bits(held.d_k_scales.get(), held.k_scales));
  };
  view.scales.token = 0;
  refused("stride of scales from token to token is 0");
  view.scales.token = 1, view.scales.head = 0;
  refused("stride of scales from head to head is 0");
  view.scales.head = held.capacity, view.scales.outer = 0;
  refused("stride of scales from sequence to sequence, or page to page is 0");
}

TEST_CASE("the device keeps and appends encoded rows as the CPU does, their scales too", "[gpu]") {
  if (gpu_missing()) return;
  compare_packs<fp8_elements<bf16>, 128, contiguous>();
  compare_packs<fp8_elements<fp16>, 80, ragged, 96>();
  compare_packs<fp8_elements<bf16>, 64, block_table>();
  compare_appends<fp8_elements<bf16>, bf16, 128, contiguous>();
  compare_appends<fp8_elements<fp16>, float, 80, ragged, 96>();
  compare_appends<fp8_elements<bf16>, fp16, 256, block_table, 64>();
  compare_packs<int8_elements<bf16>, 128, block_table>();
  compare_appends<int8_elements<bf16>, bf16, 128, block_table>();
  compare_packs<grouped_elements<bf16, 4, 64>, 128, block_table>();
  compare_packs<grouped_elements<bf16, 2, 16>, 80, ragged, 96>();
  compare_appends<grouped_elements<bf16, 4, 64>, bf16, 128, block_table>();
  compare_appends<grouped_elements<fp16, 4, 80>, float, 80, ragged>();
  compare_appends<grouped_elements<bf16, 2, 64>, bf16, 192, contiguous, 128>();
}
