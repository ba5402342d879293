// The operators torch.ops.tessera over an engine's own pages: a method's first stage, and what follows from its choice.
//
// The engine's tensors go in as they are and are changed in place: pools k, v [pages, page, kv_heads, dim] in any strides
// (of NHD and HND pools, views), tables [sequences, blocks] or [sequences, kv_heads, blocks], lengths [sequences, kv_heads] and
// positions [sequences, kv_heads, at least blocks * page], int32. New rows and queries are [sequences, tokens, heads, dim].
#include <ATen/DeviceGuard.h>
#include <torch/library.h>

#include <string>
#include <tuple>

#include "page_tensors.hpp"

namespace tessera_torch {
namespace {

Tensor open(const std::string& library, std::int64_t layers, std::int64_t q_heads, std::int64_t kv_heads,
            at::IntArrayRef sliding, std::int64_t window, double scale, double soft_cap,
            c10::optional<std::int64_t> budget, const std::vector<std::string>& settings, std::int64_t prompt,
            const maybe_tensor& sinks, at::ArrayRef<double> table, at::ArrayRef<double> rope_frequencies) {
  return guarded([&](registry& all) {
    cache_request request =
        request_of(layers, q_heads, kv_heads, sliding, window, scale, soft_cap, budget, settings, sinks, table);
    request.workers = all.executor();
    request.shape.rope_frequencies.assign(rope_frequencies.begin(), rope_frequencies.end());
    request.tokens = index_t(prompt);
    std::unique_ptr<any_pages> made(
        symbol_of<decltype(&tessera_torch_make_pages)>(library, "tessera_torch_make_pages")(request));
    constexpr at::ScalarType types[] = {at::kFloat, at::kHalf, at::kBFloat16};  // by element_kind
    const at::ScalarType dtype = types[int(made->element())];
    return all.add(engine_pages{std::move(made), index_t(q_heads), index_t(kv_heads), dtype, sinks});
  });
}

void close(std::int64_t number) {
  guarded([&](registry& here) { here.pages.erase(number); });
}

void append(const Tensor& handle, const Tensor& k, const Tensor& v, const Tensor& tables, const Tensor& lengths,
            const maybe_tensor& positions, const maybe_tensor& scores, const Tensor& new_k, const Tensor& new_v,
            const Tensor& first_position, const maybe_tensor& new_tokens) {
  const at::OptionalDeviceGuard device(at::device_of(k));
  guarded([&](registry& all) {
    auto& here = all.find_pages(handle);
    const paged_layer layer = layer_of(here, k, v, tables, lengths, positions, scores);
    here.pages->append(layer, rows_beside(here, layer, new_k, "new_k", here.kv_heads),
                       rows_beside(here, layer, new_v, "new_v", here.kv_heads),
                       counts_in(new_tokens, "new_tokens", {layer.sequences}, k.device()),
                       counts_in(first_position, "first_position", {layer.sequences}, k.device()), current_stream(k));
  });
}

/// Of each row of slots the first `counts` mean something.
std::tuple<Tensor, Tensor> choose(const Tensor& handle, std::int64_t index, const Tensor& k, const Tensor& v,
                                  const Tensor& tables, const Tensor& lengths, const maybe_tensor& positions,
                                  const maybe_tensor& scores, const Tensor& q, const Tensor& first_position,
                                  const maybe_tensor& valid, const maybe_tensor& budgets, const maybe_tensor& tails,
                                  std::int64_t granularity, const maybe_tensor& query_counts,
                                  const maybe_tensor& query_sums, const maybe_tensor& query_products) {
  const at::OptionalDeviceGuard device(at::device_of(k));
  return guarded([&](registry& all) {
    auto& here = all.find_pages(handle);
    const paged_layer layer = layer_of(here, k, v, tables, lengths, positions, scores);
    const Tensor slots = at::full({layer.sequences, layer.kv_heads, layer.capacity()}, -1, lengths.options());
    const Tensor counts = at::zeros({layer.sequences, layer.kv_heads}, lengths.options());
    scratch_tensors scratch{k.device(), {}};
    std::vector<Tensor> statistics;
    for (const maybe_tensor* x : {&query_counts, &query_sums, &query_products}) {
      if (*x) statistics.push_back(**x);
    }
    Tensor kept;  // what the statistics are pointed to by
    const auto of_sequences = [&](const auto& x, const char* name) -> const index_t* {
      return counts_in(x, name, {layer.sequences}, k.device());
    };
    const choice_queries by{rows_beside(here, layer, q, "q", here.q_heads),
                            of_sequences(valid, "valid"),
                            of_sequences(first_position, "first_position"),
                            of_sequences(budgets, "budgets"),
                            of_sequences(tails, "tails"),
                            index_t(granularity),
                            statistics.empty() ? nullptr : sums_of(here, layer, statistics, k.device(), kept)};
    for (const auto& [numbers, name, least] :
         {std::tuple(by.budgets, "budgets", 1), std::tuple(by.tails, "tails", 0)}) {
      for (index_t b = 0; k.is_cpu() && numbers && b < layer.sequences; ++b)
        tessera::require(numbers[b] >= least, std::string(name) + " of sequence " + std::to_string(b), numbers[b],
                         "at least " + std::to_string(least), "pass a number of tokens");
    }
    here.pages->choose(layer, index_t(index), by, chosen_in(slots, counts, layer), scratch.source(), current_stream(k));
    return std::make_tuple(slots, counts);
  });
}

void pack(const Tensor& handle, const Tensor& k, const Tensor& v, const Tensor& tables, const Tensor& lengths,
          const maybe_tensor& positions, const maybe_tensor& scores, const Tensor& slots, const Tensor& counts,
          const maybe_tensor& ends) {
  const at::OptionalDeviceGuard device(at::device_of(k));
  guarded([&](registry& all) {
    auto& here = all.find_pages(handle);
    const paged_layer layer = layer_of(here, k, v, tables, lengths, positions, scores);
    tessera::require(positions.has_value(), "positions", "None", "a position of every slot",
                     "keep them where rows are packed: slots are no positions then");
    scratch_tensors scratch{k.device(), {}};
    here.pages->pack(layer, chosen_in(slots, counts, layer), counts_in(ends, "ends", {layer.sequences}, k.device()),
                     scratch.source(), current_stream(k));
  });
}

/// Pages that no layer needs, of lengths [layers, sequences, kv_heads]: freed [table rows, blocks], freed_count [table rows].
std::tuple<Tensor, Tensor> free_pages(const Tensor& handle, const Tensor& tables, const Tensor& lengths,
                                      const Tensor& held, std::int64_t page, std::int64_t room) {
  const at::OptionalDeviceGuard device(at::device_of(lengths));
  return guarded([&](registry& all) {
    auto& here = all.find_pages(handle);
    paged_layer layer = tables_of(here, tables, lengths, page);
    const std::int64_t rows = tables.numel() / std::max<std::int64_t>(1, tables.size(-1));
    tessera::require(lengths.dim() == 3 && lengths.size(0) >= 1, "shape of lengths", text_of(lengths.sizes()),
                     "[layers, sequences, kv_heads]", "pass the lengths of every layer that shares the tables");
    layer.lengths = counts_in(lengths, "lengths", {lengths.size(0), layer.sequences, layer.kv_heads}, lengths.device());
    const Tensor freed = at::full({rows, tables.size(-1)}, -1, lengths.options());
    const Tensor freed_count = at::zeros({rows}, lengths.options());
    here.pages->free_pages(
        layer,
        {index_t(lengths.size(0)), lengths.stride(0), index_t(room), counts_in(held, "held", {rows}, lengths.device()),
         freed.data_ptr<index_t>(), freed_count.data_ptr<index_t>()},
        current_stream(lengths));
    return std::make_tuple(freed, freed_count);
  });
}

/// out [sequences, tokens, q_heads, dim] of q's dtype, and the log-sum-exps [sequences, tokens, q_heads] in fp32.
std::tuple<Tensor, Tensor> attend(const Tensor& handle, std::int64_t index, const Tensor& q, const Tensor& k,
                                  const Tensor& v, const Tensor& tables, const Tensor& lengths,
                                  const maybe_tensor& positions, const maybe_tensor& scores,
                                  const Tensor& first_position, const maybe_tensor& slots, const maybe_tensor& counts) {
  const at::OptionalDeviceGuard device(at::device_of(k));
  return guarded([&](registry& all) {
    auto& here = all.find_pages(handle);
    const paged_layer layer = layer_of(here, k, v, tables, lengths, positions, scores);
    const tensor_rows queries = rows_beside(here, layer, q, "q", here.q_heads);
    tessera::require(queries.tokens <= 8, "tokens of q", queries.tokens, "1 to 8",
                     "a step has few; give prompts to the engine's own attention");
    const Tensor out = at::empty(q.sizes(), q.options().dtype(at::kFloat));
    const Tensor lse = at::empty(q.sizes().slice(0, 3), out.options());
    scratch_tensors scratch{k.device(), {}};
    const tensor_rows out_rows = rows_of(out, 1, 2), lse_rows = rows_of(lse.unsqueeze(3), 1, 2);
    here.pages->attend(layer, index_t(index), queries,
                       counts_in(first_position, "first_position", {layer.sequences}, k.device()),
                       chosen_in(slots, counts, layer), out_rows, lse_rows, scratch.source(), current_stream(k));
    return std::make_tuple(out.to(q.scalar_type()), lse);
  });
}

// Shapes alone, for torch.compile.
std::tuple<Tensor, Tensor> choose_shape(const Tensor&, std::int64_t, const Tensor& k, const Tensor&,
                                        const Tensor& tables, const Tensor& lengths, const maybe_tensor&,
                                        const maybe_tensor&, const Tensor&, const Tensor&, const maybe_tensor&,
                                        const maybe_tensor&, const maybe_tensor&, std::int64_t, const maybe_tensor&,
                                        const maybe_tensor&, const maybe_tensor&) {
  return {at::empty_symint({lengths.sym_size(0), lengths.sym_size(1), tables.sym_size(-1) * k.sym_size(1)},
                           lengths.options()),
          at::empty_like(lengths)};
}
std::tuple<Tensor, Tensor> free_shape(const Tensor&, const Tensor& tables, const Tensor& lengths, const Tensor&,
                                      std::int64_t, std::int64_t) {
  const c10::SymInt rows = tables.dim() == 3 ? tables.sym_size(0) * tables.sym_size(1) : tables.sym_size(0);
  return {at::empty_symint({rows, tables.sym_size(-1)}, lengths.options()),
          at::empty_symint({rows}, lengths.options())};
}
std::tuple<Tensor, Tensor> attend_shape(const Tensor&, std::int64_t, const Tensor& q, const Tensor&, const Tensor&,
                                        const Tensor&, const Tensor&, const maybe_tensor&, const maybe_tensor&,
                                        const Tensor&, const maybe_tensor&, const maybe_tensor&) {
  return {at::empty_symint(q.sym_sizes(), q.options()),
          at::empty_symint(q.sym_sizes().slice(0, 3), q.options().dtype(at::kFloat))};
}

}  // namespace
}  // namespace tessera_torch

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def(
      "pages_open(str library, int layers, int q_heads, int kv_heads, int[] sliding, int window, float scale, "
      "float soft_cap, int? budget, str[] settings, int prompt, Tensor? sinks=None, float[] table=[], "
      "float[] rope_frequencies=[]) -> Tensor",
      &tessera_torch::open);
  m.def("pages_close(int handle) -> ()", &tessera_torch::close);
  m.def(
      "pages_append(Tensor pages, Tensor(a!) k, Tensor(b!) v, Tensor tables, Tensor(c!) lengths, Tensor(d!)? "
      "positions, "
      "Tensor(e!)? scores, Tensor new_k, Tensor new_v, Tensor first_position, Tensor? new_tokens=None) -> ()");
  m.def(
      "pages_choose(Tensor pages, int layer, Tensor k, Tensor v, Tensor tables, Tensor lengths, Tensor? positions, "
      "Tensor? scores, Tensor q, Tensor first_position, Tensor? valid=None, Tensor? budgets=None, Tensor? tails=None, "
      "int granularity=1, Tensor? query_counts=None, Tensor? query_sums=None, Tensor? query_products=None) -> "
      "(Tensor slots, Tensor counts)");
  m.def(
      "pages_pack(Tensor pages, Tensor(a!) k, Tensor(b!) v, Tensor tables, Tensor(c!) lengths, Tensor(d!)? positions, "
      "Tensor(e!)? scores, Tensor slots, Tensor counts, Tensor? ends=None) -> ()");
  m.def(
      "pages_free(Tensor pages, Tensor tables, Tensor lengths, Tensor(a!) held, int page, int room=0) -> "
      "(Tensor freed, Tensor freed_count)");
  m.def(
      "pages_attend(Tensor pages, int layer, Tensor q, Tensor k, Tensor v, Tensor tables, Tensor lengths, "
      "Tensor? positions, Tensor? scores, Tensor first_position, Tensor? slots=None, Tensor? counts=None) -> "
      "(Tensor out, Tensor lse)");
}

namespace {
void implement_pages(torch::Library& m) {
  m.impl("pages_append", &tessera_torch::append);
  m.impl("pages_choose", &tessera_torch::choose);
  m.impl("pages_pack", &tessera_torch::pack);
  m.impl("pages_free", &tessera_torch::free_pages);
  m.impl("pages_attend", &tessera_torch::attend);
}
}  // namespace

TORCH_LIBRARY_IMPL(tessera, CPU, m) { implement_pages(m); }
#ifdef TESSERA_TORCH_CUDA
TORCH_LIBRARY_IMPL(tessera, CUDA, m) { implement_pages(m); }
#endif
TORCH_LIBRARY_IMPL(tessera, Meta, m) {
  using at::Tensor;
  using maybe = c10::optional<Tensor>;
  m.impl("pages_choose", &tessera_torch::choose_shape);
  m.impl("pages_free", &tessera_torch::free_shape);
  m.impl("pages_attend", &tessera_torch::attend_shape);
  m.impl("pages_append", [](const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const maybe&,
                            const maybe&, const Tensor&, const Tensor&, const Tensor&, const maybe&) {});
  m.impl("pages_pack", [](const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const maybe&,
                          const maybe&, const Tensor&, const Tensor&, const maybe&) {});
}
