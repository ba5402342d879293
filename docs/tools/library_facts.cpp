// What the library says of itself, as parts of pages: which method runs where over which layout, and what caches take.
// docs/tools/library_facts.py puts what this program prints into the pages.
#include <tessera/layout/fixed_pages.hpp>
#include <tessera/layout/fp8_rows.hpp>
#include <tessera/layout/ragged_pages.hpp>
#include <tessera/tessera.hpp>

#include <cstdio>
#include <string>
#include <type_traits>

#include "every_method.hpp"

namespace {

using namespace tessera;

constexpr int dim = 128;

// --- methods, backends, layouts -------------------------------------------------------------------------------------

template <class Method>
constexpr bool packs = requires {
  requires Method::layout_type::rows_type::packs;
};

/// A method that packs by itself, asked to pack what it has packed.
template <class Method>
constexpr bool packs_twice = requires {
  requires Method::layout_type::rows_type::whole_rows::packs;
};

/// The CPU's store has packed rows in runs and in fixed pages, the device's beside ragged pages too; segments of a text
/// are not read over packed rows. Neither compiles.
template <class Method>
constexpr bool on_cpu =
    !packs<Method> ||
    (!std::is_same_v<typename Method::layout_type::placement_type, ragged_pages> && !Method::needs_step_segments);

template <class Method>
constexpr bool on_cuda = runs_on_devices<Method>;

template <class Method>
const char* where() {
  if constexpr (packs_twice<Method>) return "its own";
  return on_cpu<Method> ? (on_cuda<Method> ? "both" : "CPU") : (on_cuda<Method> ? "CUDA" : "no");
}

/// Where a sequence of a method can go back to.
template <class Method>
const char* goes_back() {
  constexpr takes_back taken = taken_back<Method>();
  return taken == takes_back::anything ? "any position"
         : taken == takes_back::answers ? "the last prompt's end"
                                        : "nowhere";
}

/// Whether a method takes drafts, and whether a step under way can be cancelled; of rows that are not packed.
template <class Method>
std::string takes_back_calls() {
  if (Method::retrieve_type::adds_up) return "no drafts";
  return taken_back<Method>() == takes_back::nothing ? "drafts" : "drafts, steps";
}

/// Name and cell of every method over a layout.
template <class Layout>
std::vector<std::pair<std::string, std::string>> cells() {
  std::vector<std::pair<std::string, std::string>> made;
  methods_test::for_every_method<typename Layout::element_type, dim, Layout>(
      [&]<class Method>() { made.emplace_back(Method::name, where<Method>()); });
  return made;
}

template <class T>
void print_matrix() {
  std::vector<std::string> back;
  methods_test::for_every_method<T, dim, dense<T, dim>>([&]<class Method>() {
    back.push_back(goes_back<Method>() + std::string(" | ") + takes_back_calls<Method>());
  });
  const auto runs_of = cells<dense<T, dim>>(), pages = cells<stored<dense_rows<T, dim>, fixed_pages<16>>>(),
             ragged_of = cells<stored<dense_rows<T, dim>, ragged_pages>>(),
             fp8_runs = cells<stored<fp8_rows<T, dim>, runs>>(),
             fp8_pages = cells<stored<fp8_rows<T, dim>, fixed_pages<16>>>(),
             packed = cells<mosaic_rows<dense<T, dim>>>();
  std::printf(
      "| method | dense rows in runs | in pages of 16 | in ragged pages | fp8 rows in runs | in pages of 16 | packed "
      "rows | goes back to | cancels |\n");
  std::printf("| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n");
  for (std::size_t i = 0; i < runs_of.size(); ++i) {
    std::printf("| `%s`", runs_of[i].first.c_str());
    for (const auto* each : {&runs_of, &pages, &ragged_of, &fp8_runs, &fp8_pages, &packed})
      std::printf(" | %s", (*each)[i].second.c_str());
    std::printf(" | %s |\n", back[i].c_str());
  }
}

// --- memory ---------------------------------------------------------------------------------------------------------

constexpr index_t layers = 32, q_heads = 32, kv_heads = 8, tokens = 131072, budget = 1024;
constexpr offset_t heads = offset_t(layers) * kv_heads;

std::string bytes_text(double bytes) {
  char text[32];
  const bool large = bytes >= double(1 << 30);
  std::snprintf(text, sizeof(text), "%.4g %s", bytes / (large ? 1 << 30 : 1 << 20), large ? "GiB" : "MiB");
  return text;
}

void print_row(const std::string& what, const std::string& formula, double bytes) {
  std::printf("| %s | %s | %s |\n", what.c_str(), formula.c_str(), bytes_text(bytes).c_str());
}

std::string count(offset_t number) {
  std::string text = std::to_string(number);
  for (int at = int(text.size()) - 3; at > 0; at -= 3) text.insert(std::size_t(at), ",");
  return text;
}

/// Extrema of `stored` tokens in pages of `page`.
offset_t index_bytes(index_t page, index_t stored_tokens) {
  return heads * page_row_elements(page, dim, ceil_div(stored_tokens, page)) * offset_t(sizeof(bf16));
}

void print_memory() {
  using rows = dense<bf16, dim>;
  constexpr offset_t token = rows::token_bytes(), narrow = stored<fp8_rows<bf16, dim>, runs>::token_bytes();
  const cache<full<bf16, dim>> everything({layers, q_heads, kv_heads}, {}, std::make_shared<cpu::executor>(1));

  std::printf("| what | bytes | in all |\n| --- | --- | --- |\n");
  print_row("everything, bf16: `full_bytes(131072)`", "32 x 8 x 131,072 x " + count(token),
            double(everything.full_bytes(tokens)));
  print_row("everything, `fp8_rows`", "32 x 8 x 131,072 x " + count(narrow), double(heads * tokens * narrow));
  print_row("1,024 tokens a head, with their positions (`snapkv` and its like, behind the prompt)",
            "32 x 8 x 1,024 x (" + count(token) + " + 4)",
            double(heads * budget * (token + offset_t(sizeof(index_t)))));
  print_row("scores of every token, where a scorer accumulates them (`h2o`)",
            "4 a stored token; for 1,024 tokens a head", double(heads * budget * offset_t(sizeof(float))));

  const planned<quest<bf16, dim>> pages(
      [] {
        quest<bf16, dim> method;
        method.set_budget(budget);
        return method;
      }(),
      tokens);
  const index_t page = pages.read.scorer.page;
  print_row("an index of extrema beside everything, pages of " + count(page) + " (`quest`)",
            "32 x 8 x " + count(ceil_div(tokens, page)) + " x 2 x 128 x 2", double(index_bytes(page, tokens)));

  const planned<rocketkv<bf16, dim>> two(
      [] {
        rocketkv<bf16, dim> method;
        method.set_budget(budget);
        return method;
      }(),
      tokens);
  const index_t kept = two.plan.retained, own = two.read.scorer.page;
  print_row("`rocketkv` at 1,024: " + count(kept) + " tokens a head stay",
            "32 x 8 x " + count(kept) + " x (" + count(token) + " + 4)",
            double(heads * kept * (token + offset_t(sizeof(index_t)))));
  print_row("its index, pages of " + count(own),
            "32 x 8 x " + count(ceil_div(kept, own)) + " x " + (own == 1 ? "" : "2 x ") + "128 x 2",
            double(index_bytes(own, kept)));

  const mosaickv<bf16, dim> mosaic;
  const auto& packed = mosaic.layout.rows;
  packed_format k = packed.key_format(), v = packed.value_format();
  k.element = v.element = resolved<bf16>(packed.element);
  const index_t block = mosaic.retrieve.mean_block(), segments = ceil_div(tokens, packed.segment);
  const double vectors = double(heads) * tokens * (k.row_bytes() + v.row_bytes());
  const double means = double(heads) * ceil_div(tokens, block) * k.row_bytes();
  const double bases = double(heads) * segments * (k.channels + v.channels) * dim * sizeof(float);
  print_row("`mosaickv`, packed vectors",
            "32 x 8 x 131,072 x (" + count(k.row_bytes()) + " + " + count(v.row_bytes()) + ")", vectors);
  print_row("its means of blocks of " + count(block),
            "32 x 8 x " + count(ceil_div(tokens, block)) + " x " + count(k.row_bytes()), means);
  print_row("its bases, " + count(segments) + " segments of " + count(packed.segment),
            "32 x 8 x " + count(segments) + " x (" + count(k.channels) + " + " + count(v.channels) + ") x 128 x 4",
            bases);
  print_row("`mosaickv` in all, beside a tail of less than " + count(packed.tail.tail) + " tokens", "",
            vectors + means + bases);

  const index_t window = snapkv<bf16, dim>{}.retain.scorer.window;
  print_row("remembered queries of a window of " + count(window) + ", while a prompt comes",
            "32 x " + count(window) + " x 32 x 128 x 4", double(layers) * window * q_heads * dim * sizeof(float));
}

}  // namespace

int main() {
  std::printf("@@ matrix\n");
  print_matrix<bf16>();
  std::printf("@@ memory\n");
  print_memory();
}
