// Who calls a cache: several threads, a child of fork(), a thread with another floating-point mode.
#include "catch.hpp"

#include <atomic>
#include <thread>

#include <tessera/layout/dense_rows.hpp>
#include <tessera/layout/stored.hpp>
#include <tessera/methods/h2o.hpp>
#include <tessera/methods/quest.hpp>
#include <tessera/methods/snapkv.hpp>

#include "cache/callers/talk.hpp"
#include "support/host/flush_to_zero.hpp"
#include "support/host/forked.hpp"
#include "support/tolerance.hpp"

using namespace callers_test;

namespace {

using small = snapkv<fp32, 64>;

/// How often one of two threads, each with a cache, gets other bits than `right`.
int wrong_rounds(const talk<small>& of, cache<small>& one, cache<small>& other, const std::vector<float>& right) {
  std::atomic<int> wrong{0};
  const auto go = [&](cache<small>& kv) {
    for (index_t i = 0; i < support::scaled(20); ++i) wrong += !support::same_bits(of.held(kv), right);
  };
  std::thread beside([&] { go(one); });
  go(other);
  beside.join();
  return wrong;
}

}  // namespace

TEST_CASE("two copies of a cache, and two caches with one executor, may be called by a thread each") {
  const talk<small> of(150, 3);
  const auto workers = std::make_shared<cpu::executor>(3);
  auto one = of.made(workers);
  const auto right = of.held(one);
  auto copy = one, other = of.made(workers);
  CHECK(wrong_rounds(of, one, copy, right) == 0);
  CHECK(wrong_rounds(of, one, other, right) == 0);
}

TEST_CASE("a child of fork() goes on with its parent's cache, and ends it") {
  const talk<small> of(150, 3);
  auto kv = std::make_unique<cache<small>>(of.made(std::make_shared<cpu::executor>(3)));
  const auto right = of.held(*kv);
  CHECK(support::in_a_child([&] {
          if (!support::same_bits(of.held(*kv), right)) return 1;
          kv.reset();
          return 0;
        }) == 0);
  CHECK(support::same_bits(of.held(*kv), right));
}

TEST_CASE("outputs do not depend on the floating-point mode of the caller, and leave it as it is") {
  // Values around 1e-5 are subnormal in fp16.
  const talk<h2o<fp16, 64, 64, stored<dense_rows<fp16, 64>, runs>>> of(150, 4, 1e-5f);
  const talk<quest<fp16, 64>> by_pages(150, 4, 1e-5f);
  for (const int threads : {1, 3}) {
    CAPTURE(threads);
    const auto same_in_both_modes = [&](const auto& held) {
      auto plain = held.made(std::make_shared<cpu::executor>(threads));
      const auto right = held.held(plain);
      const support::odd_float_mode odd;
      auto kv = held.made(std::make_shared<cpu::executor>(threads));
      CHECK(support::same_bits(held.held(kv), right));
      CHECK_FALSE(support::rounds_to_nearest());
    };
    same_in_both_modes(of);
    same_in_both_modes(by_pages);
  }
}

TEST_CASE("operations that an engine calls itself calculate in the default floating-point mode, too") {
  constexpr int dim = 64;
  std::vector<float> rows(dim);
  for (int d = 0; d < dim; ++d) rows[std::size_t(d)] = 1e-39f * float(d + 1);  // subnormal in fp32
  const auto stored = [&] {
    std::vector<fp16> k(dim), v(dim);
    const index_t length = 0;
    kv_view<fp16, dim, contiguous> view;
    view.k = k.data(), view.v = v.data();
    view.k_strides = view.v_strides = {dim, dim, dim, 1};
    view.sequences = view.kv_heads = 1;
    view.lengths = &length;
    std::vector<float> small(dim);
    for (int d = 0; d < dim; ++d) small[std::size_t(d)] = 6e-8f * float(d + 1);  // subnormal in fp16
    const auto row = nhd_rows<const float>(small.data(), 1, 1, dim);
    cpu::append(view, row, row);
    std::vector<int> bits;
    for (const fp16 x : k) bits.push_back(x.bits);
    return bits;
  };
  const auto merged = [&] {
    std::vector<float> out(dim), lse{0.25f};
    const attention_part part{nhd_rows<const float>(rows.data(), 1, 1, dim),
                              nhd_rows<const float>(lse.data(), 1, 1, 1)};
    const std::vector<attention_part> both{part, part};
    cpu::merge_parts<dim>(both, nullptr, nhd_rows(out.data(), 1, 1, dim), rows_view<float>{});
    return out;
  };
  const auto bits = stored();
  const auto out = merged();
  CHECK(out.back() > 0);
  const support::odd_float_mode odd;
  CHECK(stored() == bits);
  CHECK(support::same_bits(merged(), out));
}
