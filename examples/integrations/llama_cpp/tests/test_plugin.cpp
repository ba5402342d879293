// The plug-in: nodes as llama.cpp makes them against the definition in double, and a whole model through an unchanged
// libllama.
#include "catch.hpp"

#include <ggml-backend.h>

#include <cmath>
#include <cstdlib>
#include <numeric>

#include "plugin/step_node.hpp"
#include "tessera_llama/attend.hpp"
#include "tiny_llama.hpp"

using namespace llama_tests;
using tessera_plugin::read_options;

namespace {

ggml_backend_dev_t device() {
  static ggml_backend_reg_t registry = ggml_backend_load(TESSERA_PLUGIN);
  REQUIRE(registry != nullptr);
  return ggml_backend_reg_dev_get(registry, 0);
}

struct backend_freed {
  void operator()(ggml_backend* backend) const { ggml_backend_free(backend); }
};
using backend_pointer = std::unique_ptr<ggml_backend, backend_freed>;

backend_pointer backend_with(const char* read) {
  ::setenv("TESSERA_READ", read, 1);
  return backend_pointer(ggml_backend_dev_init(device(), nullptr));
}

/// A layer's memory as llama.cpp has it, [streams, cells, kv_heads, dim], and one attention over it.
struct one_layer {
  static constexpr int cells = 96, q_heads = 6, kv = 3, dim = 64, row = kv * dim;
  int rows, streams;
  std::mt19937 bits;
  ggml_context* memory;
  ggml_tensor *k, *v, *q, *mask, *out, *new_keys, *indices;
  ggml_cgraph* graph;

  /// `writes`: the graph writes the keys `new_keys` to the cells `indices` first.
  one_layer(int row_count, int stream_count, unsigned seed, bool writes = false)
      : rows(row_count), streams(stream_count), bits(seed), memory(ggml_init({64 << 20, nullptr, false})) {
    k = named("cache_k_l3"), v = named("cache_v_l3");
    q = ggml_new_tensor_4d(memory, GGML_TYPE_F32, dim, q_heads, rows, streams);
    mask = ggml_new_tensor_4d(memory, GGML_TYPE_F16, cells, rows, 1, streams);
    graph = ggml_new_graph(memory);
    new_keys = ggml_new_tensor_2d(memory, GGML_TYPE_F32, row, rows * streams);
    indices = ggml_new_tensor_1d(memory, GGML_TYPE_I64, rows * streams);
    if (writes) {
      ggml_tensor* const all = ggml_reshape_2d(memory, k, row, cells * streams);
      ggml_build_forward_expand(graph, ggml_set_rows(memory, all, new_keys, indices));
    }
    const auto view = [&](ggml_tensor* all) {
      ggml_tensor* const heads =
          ggml_view_4d(memory, all, dim, kv, cells, streams, dim * 2, row * 2, cells * row * 2, 0);
      return ggml_permute(memory, heads, 0, 2, 1, 3);
    };
    out = ggml_flash_attn_ext(memory, ggml_permute(memory, q, 0, 2, 1, 3), view(k), view(v), mask, 0.125f, 0, 0);
    ggml_build_forward_expand(graph, out);
    for (ggml_tensor* rows_of : {k, v}) {
      for (std::int64_t i = 0; i < ggml_nelements(rows_of); ++i) half(rows_of)[i] = ggml_fp32_to_fp16(normal());
    }
    for (std::int64_t i = 0; i < ggml_nelements(q); ++i) floats(q)[i] = 2 * normal();
    for (std::int64_t i = 0; i < ggml_nelements(new_keys); ++i) floats(new_keys)[i] = 3 * normal();
    for (int i = 0; i < rows * streams; ++i) reinterpret_cast<std::int64_t*>(indices->data)[i] = cell_of(i);
    for (std::int64_t i = 0; i < ggml_nelements(mask); ++i)
      half(mask)[i] = ggml_fp32_to_fp16(bits() % 3 ? 0.0f : -INFINITY);
    for (int i = 0; i < rows * streams; ++i) half(mask)[i * cells + cell_of(i) % cells] = 0;  // a row sees its own cell
  }
  ~one_layer() { ggml_free(memory); }
  one_layer(const one_layer&) = delete;

  ggml_tensor* named(const char* name) {
    ggml_tensor* const made = ggml_new_tensor_3d(memory, GGML_TYPE_F16, row, cells, streams);
    ggml_set_name(made, name);
    return made;
  }
  /// Of the node's row i, from the begin of the layer's memory on.
  int cell_of(int i) const { return i / rows * cells + 7 + 11 * (i % rows); }
  float normal() { return std::normal_distribution<float>()(bits); }
  static float* floats(ggml_tensor* t) { return static_cast<float*>(t->data); }
  static ggml_fp16_t* half(ggml_tensor* t) { return static_cast<ggml_fp16_t*>(t->data); }
  double element(ggml_tensor* of, int stream, int cell, int head, int d) const {
    return ggml_fp16_to_fp32(half(of)[((stream * cells + cell) * kv + head) * dim + d]);
  }
  double query(int stream, int token, int head, int d) const {
    return floats(q)[((stream * rows + token) * q_heads + head) * dim + d];
  }
  std::vector<int> visible(int stream, int token) const {
    std::vector<int> result;
    for (int cell = 0; cell < cells; ++cell)
      if (half(mask)[(stream * rows + token) * cells + cell] == 0) result.push_back(cell);
    return result;
  }
  double product(int stream, int token, int head, int cell) const {
    double sum = 0;
    for (int d = 0; d < dim; ++d) sum += query(stream, token, head, d) * element(k, stream, cell, head / 2, d);
    return sum;
  }

  /// The largest distance of the output from the definition over the cells that `choose(stream, token, kv_head)` says.
  template <class Choose>
  double distance(const Choose& choose) const {
    double worst = 0;
    for (int stream = 0; stream < streams; ++stream) {
      for (int token = 0; token < rows; ++token) {
        for (int head = 0; head < q_heads; ++head) {
          std::vector<double> sum(dim, 0.0);
          double total = 0;
          for (const int cell : choose(stream, token, head / 2)) {
            const double weight = std::exp(product(stream, token, head, cell) / 8);
            total += weight;
            for (int d = 0; d < dim; ++d) sum[std::size_t(d)] += weight * element(v, stream, cell, head / 2, d);
          }
          for (int d = 0; d < dim; ++d) {
            const double got = floats(out)[((stream * rows + token) * q_heads + head) * dim + d];
            worst = std::max(worst, std::abs(sum[std::size_t(d)] / total - got));
          }
        }
      }
    }
    return worst;
  }
  void compute(const backend_pointer& backend) {
    REQUIRE(ggml_backend_graph_compute(backend.get(), graph) == GGML_STATUS_SUCCESS);
  }
};

/// The `keep` visible cells with the largest probabilities, summed over the group.
std::vector<int> best_cells(const one_layer& layer, int stream, int token, int kv_head, int keep) {
  std::vector<int> visible = layer.visible(stream, token);
  std::vector<double> mass(one_layer::cells, 0.0);
  for (int head = 2 * kv_head; head < 2 * kv_head + 2; ++head) {
    double total = 0;
    for (const int cell : visible) total += std::exp(layer.product(stream, token, head, cell) / 8);
    for (const int cell : visible)
      mass[std::size_t(cell)] += std::exp(layer.product(stream, token, head, cell) / 8) / total;
  }
  std::stable_sort(visible.begin(), visible.end(),
                   [&](int a, int b) { return mass[std::size_t(a)] > mass[std::size_t(b)]; });
  visible.resize(std::min(visible.size(), std::size_t(keep)));
  return visible;
}

/// The visible cells of the pages whose bounds are the largest, until `keep` are read. `own`: the cell whose page comes
/// first, or -1.
std::vector<int> best_pages(const one_layer& layer, int stream, int token, int kv_head, int keep, int page, int own) {
  std::vector<std::pair<double, int>> pages;  // minus the bound, so that they sort
  const std::vector<int> visible = layer.visible(stream, token);
  if (int(visible.size()) <= keep) return visible;
  for (int p = 0; p < one_layer::cells / page; ++p) {
    double bound = 0;
    for (int head = 2 * kv_head; head < 2 * kv_head + 2; ++head) {
      for (int d = 0; d < one_layer::dim; ++d) {
        double best = -INFINITY;
        for (int cell = p * page; cell < (p + 1) * page; ++cell)
          best = std::max(best, layer.query(stream, token, head, d) * layer.element(layer.k, stream, cell, kv_head, d));
        bound += best;
      }
    }
    pages.push_back({own >= 0 && own / page == p ? -1e30 : -bound, p});
  }
  std::sort(pages.begin(), pages.end());
  std::vector<int> result;
  for (std::size_t i = 0; i < pages.size() && int(result.size()) < keep; ++i)
    for (const int cell : visible)
      if (cell / page == pages[i].second) result.push_back(cell);
  return result;
}

/// Logits of the last row behind a prompt of 150 tokens in two chunks and steps of the given sizes.
template <class Decoder>
std::vector<float> logits_behind_steps(Decoder& decoder, llama_context* context, std::initializer_list<int> steps) {
  std::mt19937 bits(21);
  decode_text(decoder, context, random_tokens(bits, 100));
  decode_text(decoder, context, random_tokens(bits, 50));
  if constexpr (requires { decoder.end_prompt(0); }) decoder.end_prompt(0);
  for (const int count : steps) decode_text(decoder, context, random_tokens(bits, count));
  return logits_of(context);
}

}  // namespace

TEST_CASE("a budget that covers what rows see gives the definition, whatever the mask shows") {
  for (const char* read : {"top_k:96", "quest:96", "quest:1000:page=4"}) {
    const backend_pointer backend = backend_with(read);
    for (const auto& [rows, streams] : {std::pair{1, 1}, {3, 1}, {8, 1}, {1, 2}, {2, 3}}) {
      CAPTURE(read, rows, streams);
      one_layer layer(rows, streams, unsigned(rows + 10 * streams));
      layer.compute(backend);
      CHECK(layer.distance([&](int stream, int token, int) { return layer.visible(stream, token); }) < 1e-5);
    }
  }
}

TEST_CASE("top_k attends the cells with the largest probabilities") {
  const backend_pointer backend = backend_with("top_k:10");
  for (const auto& [rows, streams] : {std::pair{1, 1}, {4, 1}, {2, 2}}) {
    CAPTURE(rows, streams);
    one_layer layer(rows, streams, unsigned(40 + rows));
    layer.compute(backend);
    CHECK(layer.distance([&](int stream, int token, int head) { return best_cells(layer, stream, token, head, 10); }) <
          1e-5);
    CHECK(layer.distance([&](int stream, int token, int head) { return best_cells(layer, stream, token, head, 9); }) >
          1e-3);
  }
}

TEST_CASE("quest attends the pages with the largest bounds, also where cells are written or change unseen") {
  const backend_pointer backend = backend_with("quest:20:page=4");
  for (const bool writes : {false, true}) {
    for (const auto& [rows, streams] : {std::pair{1, 1}, {4, 1}, {2, 2}}) {
      CAPTURE(writes, rows, streams);
      one_layer layer(rows, streams, unsigned(60 + rows), writes);
      const auto is_right = [&] {
        layer.compute(backend);
        CHECK(layer.distance([&](int stream, int token, int head) {
          const int own = writes ? layer.cell_of(stream * layer.rows + token) % one_layer::cells : -1;
          return best_pages(layer, stream, token, head, 20, 4, own);
        }) < 1e-5);
      };
      is_right();
      for (std::int64_t i = 0; writes && i < ggml_nelements(layer.new_keys); ++i)
        layer.floats(layer.new_keys)[i] = layer.normal();
      is_right();
      for (std::int64_t i = 0; i < ggml_nelements(layer.k); ++i)
        layer.half(layer.k)[i] = ggml_fp32_to_fp16(layer.normal());
      is_right();  // as behind llama_state_seq_set_data
    }
  }
}

TEST_CASE("prompts and other forms stay with llama.cpp") {
  ::setenv("TESSERA_READ", "top_k:10:dense_layers=3", 1);
  const read_options options = read_options::of_environment();
  one_layer step(2, 1, 1), prompt(9, 1, 1);
  CHECK(is_claimed(options, step.out));
  CHECK_FALSE(is_claimed(options, prompt.out));
  CHECK_FALSE(is_claimed(read_options::of("everything"), step.out));
  CHECK_FALSE(is_claimed(read_options::of("top_k:10:dense_layers=4"), step.out));  // the layer is number 3
  ggml_flash_attn_ext_add_sinks(step.out, ggml_new_tensor_1d(step.memory, GGML_TYPE_F32, one_layer::q_heads));
  CHECK_FALSE(is_claimed(options, step.out));
  one_layer biased(2, 1, 1);
  const float slope = 8;
  std::memcpy(reinterpret_cast<char*>(biased.out->op_params) + sizeof(float), &slope, sizeof slope);
  CHECK_FALSE(is_claimed(options, biased.out));
}

TEST_CASE("settings that are none are refused in a sentence, and no backend is made") {
  const auto refuses = [](const char* text, const char* sentence) {
    CAPTURE(text);
    CHECK_THROWS_WITH(read_options::of(text), contains(sentence));
    CHECK(backend_with(text) == nullptr);
  };
  refuses("snapkv:256", "TESSERA_READ is 'snapkv:256'; expected everything, top_k:CELLS or quest:CELLS");
  refuses("top_k", "cells of TESSERA_READ is missing");
  refuses("top_k:0", "cells of TESSERA_READ is '0'; expected 1 to");
  refuses("top_k:many", "cells of TESSERA_READ is 'many'");
  refuses("top_k:64:page=4", "setting of TESSERA_READ is 'page=4'; expected dense_layers or step_tokens");
  refuses("quest:64:page=0", "page of TESSERA_READ is '0'; expected 1 to");
  refuses("everything:5", "TESSERA_READ is 'everything:5'");
  ::setenv("TESSERA_THREADS", "none", 1);
  CHECK(backend_with("top_k:64") == nullptr);
  ::unsetenv("TESSERA_THREADS");
  CHECK(backend_with("top_k:64") != nullptr);
}

TEST_CASE("a mask with a bias fails the graph") {
  const backend_pointer backend = backend_with("top_k:10");
  one_layer layer(1, 1, 5);
  layer.half(layer.mask)[3] = ggml_fp32_to_fp16(-1.5f);
  CHECK(ggml_backend_graph_compute(backend.get(), layer.graph) == GGML_STATUS_FAILED);
}

TEST_CASE("an unchanged libllama reads by the plug-in") {
  device();
  const auto logits_with = [](const char* read, std::initializer_list<int> steps) {
    ::setenv("TESSERA_READ", read, 1);
    plain_decoder decoder;
    const auto context = tiny_model().context(512, 1, decoder);
    return logits_behind_steps(decoder, context.get(), steps);
  };
  for (const auto& steps : {std::initializer_list<int>{1, 1, 1}, {2, 1, 4, 1}}) {
    ::setenv("TESSERA_READ", "everything", 1);
    plain_llama plain;
    const auto exact = logits_behind_steps(plain, plain.context.get(), steps);
    for (const char* read : {"everything", "top_k:512", "quest:512", "quest:512:page=4"}) {
      CAPTURE(read);
      CHECK(relative_distance(logits_with(read, steps), exact) < 2e-3);
    }
    for (const char* read : {"top_k:8", "quest:8", "quest:8:page=4"}) {
      CAPTURE(read);
      CHECK(relative_distance(logits_with(read, steps), exact) > 1e-2);  // it does read less
    }
  }
  // The library's own cache with the same choice.
  ::setenv("TESSERA_READ", "everything", 1);
  attention own(tiny_model().get(), {"exact_topk", 12});
  const auto context = tiny_model().context(256, 1, own);
  const auto chosen = logits_behind_steps(own, context.get(), {1, 1, 1, 1});
  CHECK(relative_distance(logits_with("top_k:12", {1, 1, 1, 1}), chosen) < 5e-3);
}
