// The settings rows and rotate of every method of the tool, in the formats that it was built with.
#include <cmath>
#include <map>
#include <random>
#include <string>
#include <tessera/core/error.hpp>
#include <tessera/layout/fp8_rows.hpp>
#include <tessera/layout/int2_rows.hpp>
#include <tessera/layout/int4_rows.hpp>
#include <tessera/layout/int8_rows.hpp>
#include <tessera/math/hadamard.hpp>

#include "catch.hpp"
#include "engine/files/safetensors.hpp"
#include "examples/temporary_folder.hpp"
#include "examples/tool/evaluation_bench.hpp"
#include "laws/stores.hpp"
#include "tool/agree/agreement.hpp"
#include "tool/compress.hpp"
#include "tool/rows/row_settings.hpp"
#include "tool/run/session_file.hpp"

using engine::dtype;
using engine::safetensors_file;
using tessera::index_t;
using tool::setting;

namespace {

constexpr index_t kv_heads = 2, q_heads = 6, tokens = 150, dim = 64, steps = 5;
using tensors = std::map<std::string, std::vector<float>>;

std::vector<std::int64_t> shape_of(const std::string& name) {
  const index_t rows = name.ends_with("_decode") ? steps : tokens;
  if (name.starts_with("q")) return {rows, q_heads, dim};
  return name.ends_with("_decode") ? std::vector<std::int64_t>{rows, kv_heads, dim}
                                   : std::vector<std::int64_t>{kv_heads, rows, dim};
}

tensors random_layer() {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  tensors all;
  for (const char* name : {"k", "v", "q", "k_decode", "v_decode", "q_decode"}) {
    const auto shape = shape_of(name);
    all[name].resize(std::size_t(shape[0] * shape[1] * shape[2]));
    for (float& value : all[name]) value = normal(random);
  }
  return all;
}

/// K and V as rows of a format hold them.
template <class Rows>
tensors decoded(tensors all) {
  for (const char* name : {"k", "v", "k_decode", "v_decode"}) {
    for (std::size_t row = 0; row < all[name].size(); row += dim) {
      const auto held = support::decoded_row<typename Rows::encoding_type>(all[name].data() + row, dim);
      std::copy(held.begin(), held.end(), all[name].begin() + std::ptrdiff_t(row));
    }
  }
  return all;
}

tensors decoded(const std::string& format, const tensors& all) {
  if (format == "fp8") return decoded<tessera::fp8_rows<tessera::fp32, dim>>(all);
  if (format == "int8") return decoded<tessera::int8_rows<tessera::fp32, dim>>(all);
  if (format == "int4") return decoded<tessera::int4_rows<tessera::fp32, dim>>(all);
  if (format == "int2") return decoded<tessera::int2_rows<tessera::fp32, dim>>(all);
  tensors rounded = all;
  for (const char* name : {"k", "v", "k_decode", "v_decode"}) {
    for (float& value : rounded[name]) value = float(tessera::bf16(value));
  }
  return rounded;
}

/// What compress makes of a layer of fp32 tensors.
class result {
 public:
  result(const tensors& layer, const tool::method_info& method, std::optional<index_t> budget,
         std::vector<setting> settings) {
    engine::safetensors_writer writer;
    for (const auto& [name, values] : layer) writer.add_rounded(name, shape_of(name), values, dtype::f32);
    std::vector<std::uint8_t> flags(tokens, 0);
    for (index_t token = 5; token < tokens; token += 7) flags[std::size_t(token)] = 1;
    writer.add("boundaries", {tokens}, std::span<const std::uint8_t>(flags));
    writer.add("boundaries_decode", {steps}, std::span<const std::uint8_t>(flags.data(), steps));
    std::vector<float> scores;
    for (index_t i = 0; i < kv_heads * tokens; ++i) scores.push_back(float(i * 37 % 101));
    writer.add_rounded("scores", {kv_heads, tokens}, scores, dtype::f32);
    writer.write(folder_ / "in");
    for (setting& one : tool_tests::needed_settings(method.name, 1, kv_heads)) settings.push_back(std::move(one));
    tool::compress_options options{method.name, budget, std::move(settings),
                                   std::make_shared<tessera::cpu::executor>(2)};
    if (method.needs_rope) options.rope_theta = 10000.0f;
    tool::compress(safetensors_file::open(folder_ / "in"), options).file.write(folder_ / "out");
  }

  std::vector<std::int64_t> whole(const std::string& name) const {
    const auto file = safetensors_file::open(folder_ / "out");
    return file.to_int64(name, file.at(name).shape);
  }
  std::vector<float> real(const std::string& name) const {
    const auto file = safetensors_file::open(folder_ / "out");
    return file.to_fp32(name, file.at(name).shape);
  }
  double number(const std::string& key) const {
    const auto file = safetensors_file::open(folder_ / "out");
    return std::stod(file.metadata().at(key));
  }

 private:
  engine_tests::temporary_folder folder_;
};

bool built_without_tail(const std::string& format) {
  try {
    (void)tool::find_method("full").configured({{"rows", format}});
    return true;
  } catch (const tessera::error&) {
    return false;
  }
}

void check_near(const std::vector<float>& got, const std::vector<float>& expected, float most) {
  REQUIRE(got.size() == expected.size());
  float worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) worst = std::max(worst, std::abs(got[i] - expected[i]));
  CHECK(worst <= most);
}

void check_sets(const result& got, const result& expected) {
  for (const char* name : {"keep.indptr", "keep.indices", "attend.indptr", "attend.indices"}) {
    CAPTURE(name);
    CHECK(got.whole(name) == expected.whole(name));
  }
}

std::optional<index_t> budget_of(const tool::method_info& method, index_t tokens_kept) {
  return method.has_budget ? std::optional(tokens_kept) : std::nullopt;
}

}  // namespace

TEST_CASE("every method over rows of a format does as over the decoded values") {
  const tensors layer = random_layer();
  for (const std::string& format : tool::row_formats()) {
    if (format == "given" || !built_without_tail(format)) continue;
    const tensors held = decoded(format, layer);
    for (const auto& method : tool::methods()) {
      if (method.rereads) continue;
      CAPTURE(format, method.name);
      // Whole rows of packed segments: an element that is left out would hide that of a row.
      const std::vector<setting> whole = tool_tests::all_elements(method);
      std::vector<setting> encoded = whole;
      encoded.push_back({"rows", format});
      const result got(layer, method, budget_of(method, 48), encoded),
          expected(held, method, budget_of(method, 48), whole);
      if (format != "bf16" || method.name == "full") {  // else q, too, and what is packed, are rounded
        check_sets(got, expected);
        check_near(got.real("out"), expected.real("out"), format == "bf16" ? 2e-2f : 2e-5f);
      }
      CHECK(got.number("bytes_full") == expected.number("bytes_full"));
      if (method.name == "full") {
        const double share = got.number("bytes_held") / got.number("bytes_full");
        const double row = format == "bf16" ? 128 : format == "int4" ? 36 : format == "int2" ? 20 : 68;
        CHECK(share >= row / 256);
        CHECK(share <= 1.12 * row / 256);  // and room for more tokens
      }
    }
  }
}

TEST_CASE("rotated rows change no product: methods keep what they kept") {
  const tensors layer = random_layer();
  for (const char* name :
       {"full", "snapkv", "ada_snapkv", "h2o", "tova", "keydiff", "knorm", "streaming_llm", "chunkkv"}) {
    CAPTURE(name);
    const tool::method_info& method = tool::find_method(name);
    const result plain(layer, method, budget_of(method, 48), {}),
        rotated(layer, method, budget_of(method, 48), {{"rotate", "hadamard"}});
    check_sets(rotated, plain);
    check_near(rotated.real("out"), plain.real("out"), 1e-5f);
    check_near(rotated.real("lse"), plain.real("lse"), 1e-4f);
  }
}

TEST_CASE("every method over rows behind a whole tail") {
  if (!tool::has_whole_tails()) return;
  const tensors layer = random_layer();
  for (const auto& method : tool::methods()) {
    if (method.rereads || method.name == "mosaickv" || method.name == "think") continue;
    CAPTURE(method.name);
    const auto run = [&](std::vector<setting> settings) {
      return result(layer, method, budget_of(method, 48), settings);
    };
    // A tail that holds all tokens leaves nothing to pack: rows are those that were given.
    const result plain = run({}), whole = run({{"rows", "int4"}, {"whole_tail", "400"}});
    check_sets(whole, plain);
    check_near(whole.real("out"), plain.real("out"), 2e-6f);
    if (method.name == "full") {  // what is stored is written in the channels that were given, mixed or not
      const result mixed = run({{"rows", "int4"}, {"whole_tail", "400"}, {"rotate", "hadamard"}});
      check_near(mixed.real("packed.k"), layer.at("k"), 2e-6f);
      check_near(mixed.real("packed.v"), layer.at("v"), 2e-6f);
    }
    const result few = run({{"rows", "int4"}, {"whole_tail", "8"}});
    CHECK(few.number("bytes_full") == plain.number("bytes_full"));
    if (method.name != "full") continue;
    CHECK(few.number("bytes_held") < 0.35 * plain.number("bytes_full"));
  }
}

TEST_CASE("rows behind a whole tail, against attention in double over what they decode to") {
  if (!tool::has_whole_tails()) return;
  const tensors layer = random_layer();
  constexpr index_t tail = 8;
  for (const std::string format : {"fp8", "int4"}) {
    const result got(layer, tool::find_method("full"), {}, {{"rows", format}, {"whole_tail", std::to_string(tail)}});
    const std::vector<float> out = got.real("out");
    for (index_t step = 0; step < steps; ++step) {
      // Rows of the prompt but the newest eight are packed, and no tail of decoded ones is full by then.
      const index_t packed = tokens - tail, all = tokens + step + 1;
      for (index_t q_head = 0; q_head < q_heads; ++q_head) {
        const index_t head = q_head / (q_heads / kv_heads);
        const auto row = [&](const char* name, index_t token) {
          const std::string decode = std::string(name) + "_decode";
          const float* data = token < tokens ? layer.at(name).data() + (head * tokens + token) * dim
                                             : layer.at(decode).data() + ((token - tokens) * kv_heads + head) * dim;
          std::vector<double> values(data, data + dim);
          if (token >= packed) return values;
          float largest = 0;
          for (int d = 0; d < dim; ++d) largest = std::max(largest, std::abs(data[d]));
          const float scale = largest / (format == "fp8" ? 448.0f : 7.0f);
          for (int d = 0; d < dim; ++d) {
            const float held = data[d] / scale;
            values[std::size_t(d)] =
                double(scale) * (format == "fp8" ? double(float(tessera::fp8(held)))
                                                 : double(std::trunc(held + std::copysign(0.5f, held))));
          }
          return values;
        };
        std::vector<double> expected(dim, 0.0);
        double sum = 0;
        const float* q = layer.at("q_decode").data() + (step * q_heads + q_head) * dim;
        for (index_t token = 0; token < all; ++token) {
          const std::vector<double> k = row("k", token), v = row("v", token);
          double product = 0;
          for (int d = 0; d < dim; ++d) product += double(q[d]) * k[std::size_t(d)];
          const double weight = std::exp(product / 8 - 4);
          sum += weight;
          for (int d = 0; d < dim; ++d) expected[std::size_t(d)] += weight * v[std::size_t(d)];
        }
        double worst = 0;
        for (int d = 0; d < dim; ++d)
          worst = std::max(worst, std::abs(double(out[std::size_t((step * q_heads + q_head) * dim + d)]) -
                                           expected[std::size_t(d)] / sum));
        CHECK(worst <= 1e-5);
      }
    }
  }
}

TEST_CASE("rows and rotate refuse what they cannot do") {
  const auto refused = [](const char* method, std::vector<setting> settings, const char* because) {
    CHECK_THROWS_WITH(tool::find_method(method).configured(settings), contains(because));
  };
  refused("full", {{"rows", "int3"}}, "rows is 'int3'; expected one of given, bf16");
  refused("full", {{"rotate", "90"}}, "rotate is '90'; expected one of none, hadamard");
  refused("expected_attention", {{"rotate", "hadamard"}}, "which turns queries by the model's RoPE");
  refused("mosaickv", {{"rotate", "hadamard"}}, "which chooses among channels itself");
  refused("think", {{"rotate", "hadamard"}}, "which chooses among channels itself");
  refused("criticalkv", {{"rotate", "hadamard"}}, "which weighs values by their channels");
  const auto built = tool::row_formats();
  for (const char* format : {"fp8", "int8", "int4", "int2"}) {
    if (std::find(built.begin(), built.end(), format) != built.end()) continue;
    refused("full", {{"rows", format}}, "build the tool with -DTESSERA_TOOL_ROWS=");
  }
  if (!tool::has_whole_tails()) {
    refused("full", {{"whole_tail", "8"}}, "build the tool with -DTESSERA_TOOL_ROWS=tailed");
    return;
  }
  refused("full", {{"whole_tail", "8"}}, "whole_tail is 8; expected 0 with rows=given");
  refused("think", {{"rows", "int4"}, {"whole_tail", "8"}}, "the method packs its rows itself");
}

TEST_CASE("rows of one variant change nothing of another's") {
  tool_tests::bench on;
  std::string text;
  for (int i = 0; i < 30; ++i) text += "The rays which differ in colour differ also in degrees of refrangibility.\n";
  const auto all = on.tokenizer.encode(text);
  const tool::text_piece piece{{all.begin(), all.begin() + 120}, {all.begin() + 120, all.begin() + 140}, 120};
  const tool::method_info &full = tool::find_method("full"), &snapkv = tool::find_method("snapkv");
  const auto divergence = [&](std::vector<tool::variant> variants) {
    variants.insert(variants.begin(), {&full, {}, {}});
    tool::agreement_run run(*on.model, on.tokenizer, variants, tool::element_type::fp32, on.workers);
    run.run(piece);
    std::vector<std::vector<double>> of;
    for (const auto& one : run.sums().front().by_variant) of.push_back(one.divergences);
    return of;
  };
  const tool::variant plain{&snapkv, 64, {}}, rounded{&snapkv, 64, {{"rows", "bf16"}}},
      rotated{&snapkv, 64, {{"rotate", "hadamard"}}};
  const auto together = divergence({plain, rounded, rotated});
  CHECK(together[1] == divergence({plain})[1]);
  CHECK(together[2] == divergence({rounded})[1]);
  CHECK(together[3] == divergence({rotated})[1]);
  CHECK(together[1] != together[2]);
}

TEST_CASE("lines of a prompt are counted whatever its rows are stored in") {
  tool_tests::bench on;
  const tool::method_info& method = tool::find_method("tri_shape");
  const std::vector<setting> few{{"init", "4"}, {"local", "16"}, {"dense_rows", "4"}};
  std::vector<setting> mixed = few;
  mixed.push_back({"rotate", "hadamard"});
  tool::evaluation evaluation = on.evaluation({{&method, {}, few}, {&method, {}, mixed, "rotate=hadamard"}});
  std::string text;
  for (int i = 0; i < 20; ++i) text += "The rays which differ in colour differ also in degrees of refrangibility.\n";
  evaluation.run("a family", on.plan({"a family", {{text, "yes"}}}));
  const auto& cells = evaluation.cells();
  REQUIRE(cells.size() == 2);
  CHECK(cells[0].pairs.visible > 0);
  CHECK(cells[0].pairs.attended < cells[0].pairs.visible);
  CHECK(cells[1].pairs.attended == cells[0].pairs.attended);
  CHECK(cells[1].pairs.visible == cells[0].pairs.visible);
}

TEST_CASE("a saved conversation of rotated rows is loaded into such a cache alone") {
  const engine_tests::temporary_folder folder;
  const auto cache = [](bool rotates) {
    tool::cache_request request{{1, q_heads, kv_heads}, dim, tool::element_type::fp32, {}, {}, nullptr};
    request.workers = std::make_shared<tessera::cpu::executor>(1);
    if (rotates) request.settings = {{"rotate", "hadamard"}};
    return tool::find_method("full").make(request);
  };
  const std::string path = (folder / "saved").string();
  for (const bool rotates : {false, true}) {
    const auto held = cache(rotates);
    tool::save_session(path, 12, {{1, 2}, rotates}, *held);
    CHECK(tool::load_session(path, 12, rotates, *cache(rotates)).reply == std::vector<engine::token_t>{1, 2});
    CHECK_THROWS_WITH(tool::load_session(path, 12, !rotates, *cache(!rotates)),
                      contains("rotate of the saved conversation"));
    CHECK_THROWS_WITH(tool::load_session(path, 13, rotates, *cache(rotates)),
                      contains("model of the saved conversation"));
  }
}
