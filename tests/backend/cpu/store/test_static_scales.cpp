// Rows of an engine whose fp8 has one scale for a tensor, or for each head: what append and pack make of them.
#include "catch.hpp"

#include <cstring>

#include <tessera/backend/cpu/attend/attend.hpp>
#include <tessera/backend/cpu/store/pack.hpp>

#include "backend/cpu/store/static_scales.hpp"
#include "support/tolerance.hpp"

using namespace tessera;
using support::scale_of;

namespace {

constexpr int dim = 64;
using engine = support::static_pages<dim>;

}  // namespace

TEST_CASE("append stores by an engine's scales, leaves them as they are, and saturates") {
  support::rng random(61);
  for (index_t turn = 0; turn < support::scaled(20); ++turn) {
    engine own(random, turn % 2 ? scale_of::tensor : scale_of::head);
    const auto k_scales = own.k_scales, v_scales = own.v_scales;
    const auto before_k = own.k, before_v = own.v;
    const index_t tokens = random.between(1, 20);
    const auto k = support::rows_of_any_size(random, std::size_t(engine::sequences * tokens * engine::heads * dim));
    const auto v = support::rows_of_any_size(random, k.size());
    auto view = own.view();
    cpu::append(view, nhd_rows<const bf16>(k.data(), tokens, engine::heads, dim, engine::sequences),
                nhd_rows<const bf16>(v.data(), tokens, engine::heads, dim, engine::sequences));
    REQUIRE((own.k_scales == k_scales && own.v_scales == v_scales));
    std::vector<bool> written(own.k.size(), false);
    for (index_t b = 0; b < engine::sequences; ++b) {
      for (index_t t = 0; t < tokens; ++t) {
        for (index_t h = 0; h < engine::heads; ++h) {
          const index_t slot = own.lengths[std::size_t(b)] + t;
          const auto scale = std::size_t(own.kind == scale_of::head ? h : 0);
          for (int d = 0; d < dim; ++d) {
            const auto from = std::size_t(((b * tokens + t) * engine::heads + h) * dim + d);
            // The quotient is rounded to fp32 before it is stored: two roundings, as the row's own scale has them.
            const auto want = [](bf16 x, float by) { return support::nearest_fp8(double(float(x) / by)).bits; };
            CAPTURE(float(k[from]), float(v[from]), k_scales[scale], v_scales[scale]);
            REQUIRE(view.key(b, h, slot)[d].bits == want(k[from], k_scales[scale]));
            REQUIRE(view.value(b, h, slot)[d].bits == want(v[from], v_scales[scale]));
            if (std::isfinite(float(k[from]))) REQUIRE(std::isfinite(float(view.key(b, h, slot)[d])));
            written[std::size_t(view.key(b, h, slot) + d - own.k.data())] = true;
          }
        }
      }
    }
    for (std::size_t i = 0; i < written.size(); ++i) {
      if (!written[i]) REQUIRE((own.k[i].bits == before_k[i].bits && own.v[i].bits == before_v[i].bits));
    }
  }
}

TEST_CASE("pack moves rows of an engine's scales as they are stored, and refuses to give them another scale") {
  support::rng random(62);
  for (const scale_of kind : {scale_of::tensor, scale_of::head}) {
    engine own(random, kind), other(random, kind);
    const auto before = own.k;
    const auto scales = own.k_scales;
    selection chosen;
    chosen.reset({17, 17, 0, 0, 33, 33});
    for (index_t row = 0; row < 6; ++row) {
      for (index_t slot = row % 3; slot < own.lengths[std::size_t(row / 2)]; slot += 3)
        chosen.row(row)[chosen.counts[std::size_t(row)]++] = slot;
    }
    cpu::executor workers(1);
    const auto view = own.view();
    CHECK_THROWS_WITH(cpu::pack(view, chosen.view(), other.view(), workers),
                      Catch::Contains("static scales of the two views is other ones"));
    engine moved = own;
    auto by_row = view;
    by_row.scales.token = 1;
    CHECK_THROWS_WITH(cpu::pack(by_row, chosen.view(), view, workers),
                      Catch::Contains("static scales of the two views"));
    CHECK(std::memcmp(own.k.data(), before.data(), before.size()) == 0);
    const auto to = moved.view(moved.k.data(), moved.v.data(), own.k_scales.data(), own.v_scales.data(),
                               moved.table.data(), moved.lengths.data());
    cpu::pack(view, chosen.view(), to, workers);
    cpu::pack(view, chosen.view(), view, workers);
    CHECK(own.k_scales == scales);
    engine untouched = own;
    std::memcpy(untouched.k.data(), before.data(), before.size());
    for (index_t row = 0; row < 6; ++row) {
      for (index_t i = 0; i < chosen.counts[std::size_t(row)]; ++i) {
        const auto from = untouched.view().key(row / 2, row % 2, chosen.row(row)[i]);
        REQUIRE(std::memcmp(view.key(row / 2, row % 2, i), from, dim) == 0);
        REQUIRE(std::memcmp(to.key(row / 2, row % 2, i), from, dim) == 0);
      }
    }
  }
}

TEST_CASE("attention over an engine's scales is attention over rows that have the same scale each") {
  support::rng random(63);
  for (const scale_of kind : {scale_of::tensor, scale_of::head}) {
    engine own(random, kind);
    const auto view = own.view();
    kv_view<fp8_elements<bf16>, dim, block_table> each;
    each.k = view.k, each.v = view.v, each.k_strides = view.k_strides, each.v_strides = view.v_strides;
    each.sequences = view.sequences, each.kv_heads = view.kv_heads;
    each.lengths = view.lengths, each.length_strides = {1, 0}, each.table = view.table;
    std::vector<float> k_scales, v_scales;
    for (index_t i = 0; i < engine::pages * engine::page; ++i) {
      for (index_t h = 0; h < engine::heads; ++h) {
        k_scales.push_back(own.k_scales[std::size_t(kind == scale_of::head ? h : 0)]);
        v_scales.push_back(own.v_scales[std::size_t(kind == scale_of::head ? h : 0)]);
      }
    }
    each.scales = {k_scales.data(), v_scales.data(), engine::page * engine::heads, 1, engine::heads};
    const auto q = support::normals(random, std::size_t(engine::sequences * 4 * dim));
    const std::vector<index_t> first{16, 0, 32};
    const auto attended = [&](const auto& of) {
      std::vector<float> out(q.size(), 7), lse(12, 7);
      cpu::decode_workspace workspace;
      cpu::executor workers(1);
      cpu::decode_attention(of, cpu::query_rows<float>{nhd_rows(q.data(), 1, 4, dim, 3), first.data()}, {}, nullptr,
                            cpu::attention_output{nhd_rows(out.data(), 1, 4, dim, 3), nhd_rows(lse.data(), 1, 4, 1, 3)},
                            workspace, workers);
      out.insert(out.end(), lse.begin(), lse.end());
      return out;
    };
    CHECK(support::same_bits(attended(view), attended(each)));
  }
}
