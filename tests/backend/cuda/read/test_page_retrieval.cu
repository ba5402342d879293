// Paged retrieval on the GPU reads what it reads on the CPU: the index to the bit, the choice but for rounding.
#include "backend/cuda/read/page_trial.cuh"

using namespace tessera;
using namespace gpu_test;

namespace {

kind pick_kind(support::rng& random) {
  return random.pick({kind::normal, kind::normal, kind::normal, kind::repeated, kind::integers, kind::specials});
}

template <class T, int D, bool listed>
void compare_hybrid(std::uint64_t seed, index_t cases, index_t longest) {
  support::rng random(seed);
  tally seen;
  for (index_t i = 0; i < support::scaled(cases); ++i) {
    const auto of = pick_kind(random);
    const auto made = random_problem<T, D, listed>(random, of, longest);
    const auto scorer = [&] {
      return hybrid_min_max{random.pick({1, 2, 3, 3, 5, 16, 300}), random.pick({1, 7, 16, 31, 60, D})};
    };
    trial<problem<T, D, listed>, hybrid_min_max>::run(random, made, scorer, estimate::hsa, false, seen);
  }
  CHECK(seen.open <= 0.02 * seen.rows + 3);
  CHECK((seen.attended > 0 || cases < 100 || support::scaled(100) < 100));
  UNSCOPED_INFO("rows " << seen.rows << ", decided by rounding " << seen.open);
}

template <class T, int D, bool listed>
void compare_quest(std::uint64_t seed, index_t cases, index_t longest) {
  support::rng random(seed);
  tally seen;
  for (index_t i = 0; i < support::scaled(cases); ++i) {
    const auto of = pick_kind(random);
    const auto made = random_problem<T, D, listed>(random, of, longest);
    // Sums of small integers are exact in any order: there every tie must be decided alike.
    const auto scorer = [&] { return page_min_max{random.pick({1, 2, 3, 16, 33}), D}; };
    trial<problem<T, D, listed>, page_min_max>::run(random, made, scorer, estimate::quest,
                                                    of == kind::integers && made.rule.soft_cap == 0, seen);
  }
  CHECK(seen.open <= 0.02 * seen.rows + 3);
}

template <class T, int D, bool listed>
void compare_sparq(std::uint64_t seed, index_t cases, index_t longest) {
  support::rng random(seed);
  tally seen;
  for (index_t i = 0; i < support::scaled(cases); ++i) {
    const auto made = random_problem<T, D, listed>(random, pick_kind(random), longest);
    const auto scorer = [&] { return chosen_channels{random.pick({1, 8, 32, D}), random.pick({-1, 0})}; };
    trial<problem<T, D, listed>, chosen_channels>::run(random, made, scorer, estimate::sparq, false, seen);
  }
  CHECK(seen.open <= 0.02 * seen.rows + 3);
}

}  // namespace

TEST_CASE("hybrid sparse attention on the device reads what the CPU reads", "[gpu]") {
  if (gpu_missing()) return;
  compare_hybrid<bf16, 64, false>(301, 500, 200);
  compare_hybrid<fp16, 128, true>(302, 300, 200);
  compare_hybrid<fp16, 128, true>(303, 12, gpu_test::scaled(9'000, 700));
}

TEST_CASE("Quest on the device reads what the CPU reads", "[gpu]") {
  if (gpu_missing()) return;
  compare_quest<bf16, 64, false>(304, 400, 200);
  compare_quest<bf16, 64, false>(305, 10, gpu_test::scaled(9'000, 700));
}

TEST_CASE("SparQ on the device reads what the CPU reads, and knows the mass of it", "[gpu]") {
  if (gpu_missing()) return;
  compare_sparq<bf16, 64, false>(306, 300, 200);
  compare_sparq<fp16, 128, true>(307, 150, 200);
  compare_sparq<bf16, 64, false>(308, 8, gpu_test::scaled(9'000, 700));
}

TEST_CASE("a captured choice follows a cache that grows, and plans that change", "[gpu]") {
  if (gpu_missing()) return;
  support::rng random(309);
  auto made = random_problem<bf16, 64, false>(random, kind::normal, 300);
  while (made.tokens != 1 || made.longest() < 300) made = random_problem<bf16, 64, false>(random, kind::normal, 300);
  const auto full = made.lengths;
  std::vector<hybrid_min_max> scorers;
  std::vector<index_t> reads;
  const auto plans = [&] {
    std::vector<read_plan> result;
    for (std::size_t s = 0; s < scorers.size(); ++s) result.push_back(read_plan::fitted_to(scorers[s], reads[s]));
    return result;
  };
  for (index_t s = 0; s < made.kv.sequences; ++s) scorers.push_back({3 - s % 3, 20}), reads.push_back(40 - s);
  using made_type = decltype(made);
  using view_type = made_type::view_type;
  on_device<made_type> device(made, plans(), false);
  cuda::read_bounds bounds{300, 50, 1, 3, 0, 0};
  const cuda::choose_pages<view_type, hybrid_min_max> choose(scorers[0], selection_unit::token, bounds,
                                                             made.kv.sequences, made.kv.kv_heads, made.q_heads(), 1,
                                                             cuda::device_info::current());
  const offset_t stride = choose.max_chosen();
  buffer<index_t> out(std::size_t(made.rows() * stride)), counts(std::size_t(made.rows()));
  buffer<unsigned char> workspace(choose.workspace_bytes());
  cuda::page_problem<view_type> p;
  p.view = device.view();
  p.plans = device.plans.data;
  p.index = device.index();
  p.unfolded = 1;
  p.q = made.queries(device.at());
  p.first_position = device.first.data;
  p.rule = device.rule();
  p.out = out.data;
  p.out_stride = stride;
  p.counts = counts.data;
  cudaStream_t stream;
  cuda::check(cudaStreamCreate(&stream), "cudaStreamCreate");
  {
    gpu_test::graph captured(stream, [&] { choose.run(p, workspace.data, stream); });
    tally seen;
    const index_t steps = gpu_test::scaled(300, 5);
    for (index_t step = 1; step <= steps; ++step) {
      for (std::size_t r = 0; r < full.size(); ++r) made.lengths[r] = std::min(full[r], step);
      device.lengths.set(made.lengths);
      if (step == steps / 2) {  // other counts and channels; other pages would need another index
        for (std::size_t s = 0; s < scorers.size(); ++s) scorers[s].channels = 31 + int(s), reads[s] = 50 - int(s) * 9;
        device.plans.set(plans());
      }
      for (auto& at : made.first)
        at = made.kv.positions.empty() ? step - 1 : made.kv.positions[std::size_t(step - 1)] + 7;
      device.first.set(made.first);
      out.fill(0x77);
      captured.launch();
      agrees_with_the_cpu<made_type, hybrid_min_max, bf16, 64>(made, scorers, estimate::hsa, selection_unit::token,
                                                               reads, out.get(), stride, counts.get(), {}, false, seen);
    }
    device.index_is_the_cpus();
    CHECK(seen.open <= 0.02 * seen.rows + 3);
  }
  cudaStreamDestroy(stream);
}

TEST_CASE("outputs get the mean of V for the mass that they lack", "[gpu]") {
  if (gpu_missing()) return;
  support::rng random(310);
  for (index_t i = 0; i < support::scaled(100); ++i) {
    auto made = random_problem<bf16, 64, false>(random, kind::normal, 300);
    for (auto& n : made.lengths) n = std::max(n, made.tokens);
    if (*std::min_element(made.kv.lengths.begin(), made.kv.lengths.end()) < made.tokens) continue;
    if (random.chance(0.3)) made.kv.v[std::size_t(random.between(0, index_t(made.kv.v.size()) - 1))] = bf16(infinity);
    made.kv.remember();
    on_device<decltype(made)> device(made, std::vector<read_plan>(std::size_t(made.kv.sequences)), false);
    using view_type = decltype(made)::view_type;
    const index_t rows = made.rows(), query_rows = made.group * made.tokens;
    std::vector<float> mass, out = support::normals(random, std::size_t(rows * query_rows * 64));
    for (index_t r = 0; r < rows * query_rows; ++r) mass.push_back(random.chance(0.3) ? 1.0f : float(random.uniform()));
    buffer<float> d_mass(mass), d_out(out);
    buffer<double> sums(std::size_t(rows * 64));
    const cuda::mean_value<view_type> mean(rows);
    buffer<unsigned char> workspace(mean.workspace_bytes());
    auto before = made.lengths;
    for (auto& n : before) n -= made.tokens;
    device.lengths.set(before);
    mean.build(device.view(), sums.data, workspace.data, nullptr);
    device.lengths.set(made.lengths);
    cuda::mean_value_problem<view_type> p;
    p.view = device.view();
    p.sums = sums.data;
    p.mass = d_mass.data;
    p.out = nhd_rows(d_out.data, made.tokens, made.q_heads(), 64, made.kv.sequences);
    p.tokens = made.tokens;
    mean.run(p, nullptr, nullptr);
    cuda::check(cudaDeviceSynchronize(), "add_mean_value");
    const auto got = d_out.get();
    const auto got_sums = sums.get();
    for (index_t s = 0; s < made.kv.sequences; ++s) {
      for (index_t h = 0; h < made.kv.kv_heads; ++h) {
        const index_t row = s * made.kv.kv_heads + h, n = made.lengths[std::size_t(row)];
        for (int d = 0; d < 64; ++d) {
          double sum = 0;
          index_t t = 0;
          for (index_t slot = 0; slot < n; ++slot) {
            const float x = made.kv.v_float[made.kv.row(s, h, slot) * 64 + std::size_t(d)];
            sum += std::isfinite(x) ? double(x) : 0.0;
            if (slot < n - made.tokens) continue;
            for (index_t g = 0; g < made.group; ++g) {
              const std::size_t at =
                  std::size_t(((s * made.tokens + t) * made.q_heads() + h * made.group + g) * 64 + d);
              const double a = double(mass[std::size_t(row * query_rows + t * made.group + g)]);
              REQUIRE(double(got[at]) == Approx(a * double(out[at]) + (1 - a) * sum / (slot + 1)).margin(1e-5));
            }
            ++t;
          }
          REQUIRE(got_sums[std::size_t(row * 64 + d)] == Approx(sum).margin(1e-9));
        }
      }
    }
  }
}

TEST_CASE("paged retrieval refuses what it cannot do", "[gpu]") {
  if (gpu_missing()) return;
  using view_type = kv_view<const bf16, 64>;
  const auto device = cuda::device_info::current();
  const auto make = [&](index_t page, index_t read, index_t q_heads, index_t tokens) {
    return cuda::choose_pages<view_type, hybrid_min_max>({}, selection_unit::token, {100, read, page, 3, 0, 0}, 1, 2,
                                                         q_heads, tokens, device);
  };
  REQUIRE_NOTHROW(make(3, 10, 8, 1));
  REQUIRE_THROWS_WITH(make(0, 10, 8, 1), contains("page is 0"));
  REQUIRE_THROWS_WITH(make(4, 10, 8, 1), contains("page is 4"));
  REQUIRE_THROWS_WITH(make(3, 0, 8, 1), contains("read is 0"));
  REQUIRE_THROWS_WITH(make(3, 10, 7, 1), contains("multiple of kv_heads"));
  REQUIRE_THROWS_WITH(make(3, 10, 8, 9), contains("tokens is 9"));
  const auto op = make(2, 10, 8, 1);
  REQUIRE_NOTHROW(op.require_covered(read_plan(10, 2, 64)));
  REQUIRE_THROWS_WITH(op.require_covered(read_plan(11, 2, 64)), contains("read 11"));
  REQUIRE_THROWS_WITH(op.require_covered(read_plan(10, 1, 64)), contains("page 1"));
  REQUIRE_THROWS_WITH(op.require_covered(read_plan(10, 4, 64)), contains("page 4"));
  REQUIRE_THROWS_WITH(op.require_covered(read_plan(10, 3, 64, 1)), contains("tail 1"));
  cuda::page_problem<view_type> p;
  p.view.sequences = 1, p.view.kv_heads = 2;
  p.q = nhd_rows<const bf16>(nullptr, 1, 8, 64);
  p.out_stride = 9;
  REQUIRE_THROWS_WITH(op.run(p, nullptr, nullptr), contains("out_stride is 9"));
  p.out_stride = 10;
  REQUIRE_THROWS_WITH(op.run(p, nullptr, nullptr), contains("plans of the sequences"));
  const read_plan plan;
  p.plans = &plan;
  REQUIRE_THROWS_WITH(op.run(p, nullptr, nullptr), contains("data of the page index"));
  p.q.tokens = 2;
  REQUIRE_THROWS_WITH(op.run(p, nullptr, nullptr), contains("shape of a call"));
  bf16 some{};
  REQUIRE_THROWS_WITH((cuda::index_pages<view_type>{}.fold(p.view, {&some, 1, 0}, &plan, 0, nullptr)),
                      contains("newest is 0"));
  REQUIRE_THROWS_WITH((cuda::index_pages<view_type>{}.fold(p.view, {&some, 1, 0}, nullptr, 1, nullptr)),
                      contains("plans of the sequences"));
}
