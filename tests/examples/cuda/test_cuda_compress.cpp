// `tessera compress` on the GPU against itself on the CPU, over random files for every method of the tool.
#include "catch.hpp"

#ifdef TESSERA_TOOL_CUDA
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <tessera/core/error.hpp>

#include "../gates_file.hpp"
#include "../temporary_folder.hpp"
#include "built_dims.hpp"
#include "engine/cuda/kv_cache.hpp"
#include "engine/cuda/model.hpp"
#include "support/random.hpp"
#include "tool/backend.hpp"
#include "tool/compress.hpp"
#include "tool/methods/registry.hpp"

using support::rng;
using tessera::index_t;
using tool::backend;

namespace {

constexpr index_t files_of_a_method = 200;
constexpr index_t packed_tail = 32;  // tokens of a full tail of packed rows, unless a parameter says otherwise

bool no_device() {
  try {
    engine::cuda::require_device();
    return false;
  } catch (const tessera::error&) {
    WARN("skipped: no CUDA device on this machine");
    return true;
  }
}

struct layer_shape {
  index_t kv_heads, q_heads, tokens, steps, dim;
};

/// An element type that both backends have.
engine::dtype random_type(rng& random) {
  static const bool has_bf16 = tool_tests::has_element(tool::element_type::bf16);
  static const bool has_fp16 = tool_tests::has_element(tool::element_type::fp16);
  const bool is_bf16 = random.chance(0.5);
  return (is_bf16 ? has_bf16 : !has_fp16) ? engine::dtype::bf16 : engine::dtype::f16;
}

/// `step_segments`: with the boundaries of the steps' tokens.
layer_shape write_random_layer(rng& random, const std::filesystem::path& path, bool step_segments) {
  const index_t kv_heads = random.between(1, 3);
  const layer_shape shape{kv_heads, kv_heads * random.pick({1, 2, 3, 4, 8}), random.between(1, 300),
                          random.between(0, 4), random.pick({tool_tests::small_dim, tool_tests::large_dim})};
  const auto type = random_type(random);
  engine::safetensors_writer writer;
  const auto add = [&](const char* name, index_t first, index_t second, float deviation) {
    const auto values = support::normals(random, std::size_t(first) * std::size_t(second * shape.dim), deviation);
    writer.add_rounded(name, {first, second, shape.dim}, values, type);
  };
  add("k", kv_heads, shape.tokens, 1);
  add("v", kv_heads, shape.tokens, 1);
  add("q", shape.tokens, shape.q_heads, 1.5f);
  if (shape.steps > 0) {
    add("q_decode", shape.steps, shape.q_heads, 1.5f);
    add("k_decode", shape.steps, kv_heads, 1);
    add("v_decode", shape.steps, kv_heads, 1);
  }
  std::vector<std::uint8_t> boundaries(static_cast<std::size_t>(shape.tokens));
  for (auto& ends : boundaries) ends = random.chance(0.1);
  writer.add("boundaries", {shape.tokens}, std::span<const std::uint8_t>(boundaries));
  std::vector<float> scores;  // drawn from nothing, as those of steps
  for (index_t i = 0; i < kv_heads * shape.tokens; ++i) scores.push_back(float(i * 7919 % 1009) / 1009);
  writer.add("scores", {kv_heads, shape.tokens}, std::span<const float>(scores));
  std::vector<std::uint8_t> ends_of_steps;  // drawn from nothing: the files stay the same for every method
  for (index_t step = 0; step < shape.steps; ++step) ends_of_steps.push_back(step % 2);
  if (step_segments && shape.steps > 0)
    writer.add("boundaries_decode", {shape.steps}, std::span<const std::uint8_t>(ends_of_steps));
  writer.write(path);
  return shape;
}

/// What `compress` says of a file: its lists and outputs, or the sentence by which it refuses.
struct outcome {
  std::vector<std::int64_t> kept, attended, kept_of_head, attended_of_head;
  std::vector<std::int64_t> used, reserved;    ///< pages of each group of heads, of a method whose heads share pages
  std::vector<float> out, packed_k, packed_v;  ///< `packed_*`: of packed rows alone
  std::string refusal;
};

outcome run(const tool::compress_options& options, const std::filesystem::path& in, const std::filesystem::path& out,
            const layer_shape& shape) {
  outcome result;
  try {
    tool::compress(engine::safetensors_file::open(in), options).file.write(out);
  } catch (const tessera::error& problem) {
    result.refusal = problem.what();
    return result;
  }
  const auto file = engine::safetensors_file::open(out);
  const auto list = [&](const char* name) { return file.to_int64(name, std::vector<std::int64_t>{engine::any_size}); };
  result.kept = list("keep.indices");
  result.attended = list("attend.indices");
  result.kept_of_head = list("keep.indptr");
  result.attended_of_head = list("attend.indptr");
  if (file.contains("pages.used")) result.used = list("pages.used"), result.reserved = list("pages.reserved");
  result.out = file.to_fp32("out", std::vector<std::int64_t>{shape.steps, shape.q_heads, shape.dim});
  const std::vector<std::int64_t> all{shape.kv_heads, engine::any_size, shape.dim};
  if (file.contains("packed.k")) result.packed_k = file.to_fp32("packed.k", all);
  if (file.contains("packed.v")) result.packed_v = file.to_fp32("packed.v", all);
  return result;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i])) return 1e9;
    difference += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
    size += double(b[i]) * b[i];
  }
  return std::sqrt(difference / std::max(size, 1e-30));
}

/// How many of the vectors of `dim` elements are not the same but for rounding: packed rows keep the largest elements of
/// each, and of two that are nearly as large one backend may keep the one, the other the other.
std::size_t other_vectors(const std::vector<float>& a, const std::vector<float>& b, index_t dim) {
  REQUIRE(a.size() == b.size());
  std::size_t others = 0;
  for (std::size_t begin = 0; begin < a.size(); begin += std::size_t(dim)) {
    const auto vector = [&](const std::vector<float>& of) {
      return std::vector<float>(of.begin() + std::ptrdiff_t(begin), of.begin() + std::ptrdiff_t(begin) + dim);
    };
    others += distance(vector(a), vector(b)) > 0.01;
  }
  return others;
}

/// One method over random files, on both backends.
void compress_on_both(const tool::method_info& method) {
  const engine_tests::temporary_folder folder;
  rng random(200);  // the same files for every method
  index_t differ = 0, refused = 0;
  const index_t files = support::scaled(files_of_a_method);
  for (index_t i = 0; i < files; ++i) {
    const layer_shape shape = write_random_layer(random, folder / "in", method.needs_step_segments);
    tool::compress_options options;
    options.method = method.name;
    options.budget = random.between(16, 300);
    options.settings = tool_tests::needed_settings(method.name, 1, shape.kv_heads);
    if (tool::has_parameter(method, "cluster")) {  // of pages that heads share
      constexpr const char *pages[] = {"16", "1", "32"}, *clusters[] = {"layer", "none", "model", "fitted"};
      options.settings.push_back({"heads", std::to_string(i % 5 == 4 ? 1 : shape.kv_heads)});
      options.settings.push_back({"page", pages[i % 3]});
      options.settings.push_back({"cluster", clusters[i % 4]});
    }
    if (method.needs_rope) options.rope_theta = 10'000.0f;
    options.workers = std::make_shared<tessera::cpu::executor>(1);
    INFO(method.name << ", file " << i << ": " << shape.kv_heads << " kv_heads, " << shape.q_heads << " q_heads, "
                     << shape.tokens << " tokens, " << shape.steps << " steps, dim " << shape.dim << ", budget "
                     << *options.budget);
    const outcome expected = run(options, folder / "in", folder / "out", shape);
    options.where = backend::cuda;
    const outcome got = run(options, folder / "in", folder / "out", shape);
    REQUIRE(got.refusal == expected.refusal);
    if (!expected.refusal.empty()) {
      ++refused;
      continue;
    }
    // Sums in another order may turn a near tie: then the lists differ by what was chosen in its place.
    if (got.kept != expected.kept || got.attended != expected.attended) {
      ++differ;
      continue;
    }
    REQUIRE(got.kept_of_head == expected.kept_of_head);
    REQUIRE(got.attended_of_head == expected.attended_of_head);
    REQUIRE(got.used == expected.used);
    REQUIRE(got.reserved == expected.reserved);
    REQUIRE(got.used.empty() == !tool::has_parameter(method, "cluster"));
    const std::size_t others = other_vectors(got.packed_k, expected.packed_k, shape.dim) +
                               other_vectors(got.packed_v, expected.packed_v, shape.dim);
    // Of a hundred vectors one may be cut otherwise, where elements are alike but for rounding; a file has as many as chance gives it.
    const double usual = double(got.packed_k.size() + got.packed_v.size()) / double(shape.dim) / 100;
    REQUIRE(double(others) <= usual + 4 * std::sqrt(usual));
    // A basis that was found from fewer rows than it has channels is free in the others: rows that steps pack by it differ.
    const index_t packed = shape.tokens / packed_tail * packed_tail;
    const bool free_basis =
        !got.packed_k.empty() && packed < shape.dim && shape.tokens % packed_tail + shape.steps >= packed_tail;
    if (free_basis) continue;
    REQUIRE(distance(got.out, expected.out) < (others == 0 ? 0.01 : 0.1));
  }
  std::printf("compress, %-13s: %d of %d files differ by a near tie, %d refused on both\n", method.name.c_str(), differ,
              files, refused);
  CHECK(differ <= files / 100);
  CHECK(refused < files / 2);
}

}  // namespace

TEST_CASE("compress on CUDA equals the CPU on random files, for every method") {
  if (no_device()) return;
  for (const auto& method : tool::methods()) {
    if (!method.on_cuda || method.rereads) continue;
    DYNAMIC_SECTION(method.name) { compress_on_both(method); }  // -c NAME: this method alone
  }
}

#else

TEST_CASE("compress on CUDA is not part of this build") { SUCCEED(); }

#endif
