// Rows of an engine whose fp8 has one scale for a tensor, or for each head: the device appends and packs as the CPU does.
#include "backend/cpu/store/static_scales.hpp"
#include "backend/cuda/device.hpp"
#include "catch.hpp"
#include "tessera/backend/cpu/store/pack.hpp"
#include "tessera/backend/cuda/store/append.cuh"
#include "tessera/backend/cuda/store/pack.cuh"

using namespace tessera;
using namespace gpu_test;
using support::scale_of;

namespace {

constexpr int row_dim = 128;
using engine = support::static_pages<row_dim>;

/// The device's copy of an engine's memory.
struct device_pages {
  buffer<fp8> k, v;
  buffer<float> k_scales, v_scales;
  buffer<index_t> table, lengths;
  explicit device_pages(const engine& of)
      : k(of.k), v(of.v), k_scales(of.k_scales), v_scales(of.v_scales), table(of.table), lengths(of.lengths) {}
  engine::view_type view(const engine& of) {
    return of.view(k.data, v.data, k_scales.data, v_scales.data, table.data, lengths.data);
  }
};

void same(const engine& host, device_pages& device) {
  REQUIRE(same_bits(device.k.get(), host.k));
  REQUIRE(same_bits(device.v.get(), host.v));
  REQUIRE(same_bits(device.k_scales.get(), host.k_scales));
  REQUIRE(same_bits(device.v_scales.get(), host.v_scales));
}

}  // namespace

TEST_CASE("the device appends by an engine's scales as the CPU does, to the bit", "[gpu]") {
  if (gpu_missing()) return;
  support::rng random(71);
  for (const scale_of kind : {scale_of::tensor, scale_of::head}) {
    for (const index_t tokens : {1, 3, 20}) {
      engine host(random, kind);
      device_pages device(host);
      const auto k =
          support::rows_of_any_size(random, std::size_t(engine::sequences * tokens * engine::heads * row_dim));
      const auto v = support::rows_of_any_size(random, k.size());
      const auto rows = [&](const bf16* from) {
        return nhd_rows<const bf16>(from, tokens, engine::heads, row_dim, engine::sequences);
      };
      cpu::append(host.view(), rows(k.data()), rows(v.data()));
      const buffer<bf16> d_k(k), d_v(v);
      const auto view = device.view(host);
      const cuda::append<engine::view_type, bf16> op(engine::sequences, engine::heads);
      op.run({view, rows(d_k.data), rows(d_v.data)}, nullptr, nullptr);
      cuda::check(cudaDeviceSynchronize(), "append");
      same(host, device);
    }
  }
}

TEST_CASE("the device packs rows of an engine's scales as they are stored", "[gpu]") {
  if (gpu_missing()) return;
  support::rng random(72);
  for (const scale_of kind : {scale_of::tensor, scale_of::head}) {
    engine host(random, kind), other(random, kind);
    device_pages device(host), elsewhere(other);
    selection chosen;
    chosen.reset({17, 17, 0, 0, 33, 33});
    for (index_t row = 0; row < 6; ++row) {
      for (index_t slot = row % 3; slot < host.lengths[std::size_t(row / 2)]; slot += 3)
        chosen.row(row)[chosen.counts[std::size_t(row)]++] = slot;
    }
    const selection_view on_host = chosen.view();
    std::vector<index_t> slots;
    for (index_t row = 0; row < 6; ++row) {
      const index_t* from = on_host.row(row);
      slots.insert(slots.end(), from, from + on_host.count(row));
      slots.resize(std::size_t(row + 1) * 33);
    }
    const buffer<index_t> d_slots(slots), d_counts(std::vector<index_t>(chosen.counts));
    const selection_view on_device{d_slots.data, d_counts.data, nullptr, 33};
    const auto view = device.view(host);
    using view_type = engine::view_type;
    const cuda::pack<view_type, view_type, true> op(engine::sequences, engine::heads, 48, cuda::device_info::current());
    buffer<unsigned char> workspace(op.workspace_bytes());
    op.prepare(workspace.data, nullptr);
    const cuda::pack<view_type, view_type, false> fresh(engine::sequences, engine::heads, 48,
                                                        cuda::device_info::current());
    CHECK_THROWS_WITH(fresh.run({view, on_device, elsewhere.view(other)}, nullptr, nullptr),
                      contains("static scales of the two views"));
    op.run({view, on_device, view}, workspace.data, nullptr);
    cuda::check(cudaDeviceSynchronize(), "pack");
    cpu::executor workers(1);
    cpu::pack(host.view(), on_host, host.view(), workers);
    same(host, device);
  }
}
