// Budgets that go by a table of shares, on the GPU.
#pragma once

#include <concepts>

#include "../../../core/error.hpp"
#include "../../../core/share_table.hpp"
#include "../device/memory.cuh"

TESSERA_NAMESPACE_BEGIN
namespace cuda {

/// A budget whose numbers by layer and kv_head are the caller's memory.
template <class B>
concept tabled_budget = requires(B b) {
  { b.shares } -> std::same_as<share_table&>;
};

/// A budget's table in device memory, copied once; nothing for a budget that has none.
template <class Budget>
class budget_table {
 public:
  explicit budget_table(const Budget&) {}
  const Budget& on_device(const Budget& budget) const { return budget; }
};

template <tabled_budget Budget>
class budget_table<Budget> {
 public:
  explicit budget_table(const Budget& budget)
      : given_(budget.shares), table_(given_.data ? std::size_t(given_.layers) * std::size_t(given_.kv_heads) : 0) {
    if (!given_.data) return;
    check(cudaMemcpy(table_.data(), given_.data, table_.bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
    check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");  // streams of the caller's do not wait for it
  }

  /// The budget as kernels read it: its table is on the device.
  Budget on_device(Budget budget) const {
    require(budget.shares.data == given_.data && budget.shares.layers == given_.layers &&
                budget.shares.kv_heads == given_.kv_heads,
            "table of shares", "another", "the one that the operation was made with",
            "make the cache, or the operation, with this table");
    budget.shares.data = table_.data();
    return budget;
  }

 private:
  share_table given_;
  device_buffer<double> table_;
};

}  // namespace cuda
TESSERA_NAMESPACE_END
