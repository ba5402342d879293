// Rows, columns and views of memory that may be written, wherever some that are only read are asked for.
#include <tessera/backend/cpu/attend/attend.hpp>
#include <tessera/backend/cpu/choose/score_and_choose.hpp>
#include <tessera/backend/cpu/store/pack.hpp>

using namespace tessera;

template <class A, class B>
inline constexpr bool becomes = std::is_convertible_v<A, B> && !std::is_convertible_v<B, A>;
static_assert(becomes<rows_view<float>, rows_view<const float>>);
static_assert(becomes<slot_column<float>, slot_column<const float>>);
static_assert(becomes<kv_view<bf16, 64, csr_table>, kv_view<const bf16, 64, csr_table>>);
static_assert(becomes<kv_view<fp8_elements<bf16>, 64>, kv_view<const fp8_elements<bf16>, 64>>);
static_assert(!std::is_convertible_v<rows_view<float>, rows_view<const bf16>>);
static_assert(std::is_aggregate_v<rows_view<float>> && std::is_trivially_copyable_v<kv_view<float, 64>>);
static_assert(std::is_same_v<common_element<float, const float>, float>);

using view_type = kv_view<float, 64, block_table>;
using read_view = kv_view<const float, 64, block_table>;

// What an engine writes to elsewhere, next to what it only reads.
void call(const view_type& view, const rows_view<float>& rows, const rows_view<const float>& read,
          const slot_column<float>& column, selection_view kept, cpu::executor& workers) {
  cpu::append(view, rows, read);
  cpu::append(view, read, rows);
  append_problem append{view, rows, rows};
  static_assert(std::is_same_v<decltype(append), append_problem<view_type, float>>);
  append.v = rows;
  pack_problem<read_view, view_type> pack{view, kept, view};
  pack.source_scores = column;
  choose_problem<read_view> choose{view, 0, 1, rows};
  choose.lse = rows;
  choose.scores = column;
  const cpu::query_rows queries{rows, nullptr};
  static_assert(std::is_same_v<decltype(queries), const cpu::query_rows<float>>);
  cpu::prefill_attention(view, queries, logit_rule{}, {rows, {}}, workers);
  const attention_part part{rows, rows};
  cpu::merge_parts<64>(std::span(&part, 1), nullptr, rows, {});
}
