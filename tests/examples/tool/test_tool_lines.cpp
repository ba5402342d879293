// What compress writes of methods whose prompts attend lines: against attention in double along the written lines.
#include <algorithm>
#include <map>
#include <random>

#include <tessera/core/types.hpp>

#include "catch.hpp"
#include "engine/files/safetensors.hpp"
#include "examples/temporary_folder.hpp"
#include "support/oracle.hpp"
#include "support/tolerance.hpp"
#include "tool/compress.hpp"

using engine::dtype;
using engine::safetensors_file;
using engine_tests::temporary_folder;
using tessera::index_t;

namespace {

constexpr index_t kv_heads = 2, q_heads = 6, tokens = 190, turn = 60, dim = 64, steps = 20;

/// A layer of fp32 tensors, its turns, and what compress makes of it.
class lines_case {
 public:
  std::map<std::string, std::vector<float>> values;
  std::vector<std::int64_t> turns{0, turn};
  std::string turns_name = "turns";
  index_t n_q = tokens;

  lines_case() {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (const auto& [name, rows] : shapes()) {
      auto& all = values[name];
      all.resize(std::size_t(rows[0] * rows[1] * rows[2]));
      for (float& value : all) value = (name == "q" || name == "q_decode" ? 2.5f : 1.0f) * normal(random);
    }
  }
  std::map<std::string, std::vector<std::int64_t>> shapes() const {
    return {{"k", {kv_heads, tokens, dim}},       {"v", {kv_heads, tokens, dim}},
            {"q", {n_q, q_heads, dim}},           {"q_decode", {steps, q_heads, dim}},
            {"k_decode", {steps, kv_heads, dim}}, {"v_decode", {steps, kv_heads, dim}}};
  }
  void run(const std::string& method, std::optional<index_t> budget, std::vector<tool::setting> settings = {}) {
    engine::safetensors_writer writer;
    for (const auto& [name, shape] : shapes()) {
      if (n_q == 0 && name == "q") continue;
      const std::size_t count = std::size_t(shape[0] * shape[1] * shape[2]);
      const auto& all = values[name];
      writer.add_rounded(name, shape, {all.end() - std::ptrdiff_t(count), all.end()}, dtype::f32);
    }
    writer.add(turns_name, {std::int64_t(turns.size())}, std::span<const std::int64_t>(turns));
    writer.write(folder_ / "in");
    tool::compress_options options{method, budget, std::move(settings), std::make_shared<tessera::cpu::executor>(1)};
    unused = [&] {
      tool::compressed made = tool::compress(safetensors_file::open(folder_ / "in"), options);
      made.file.write(folder_ / "out");
      return made.unused;
    }();
  }
  safetensors_file file() const { return safetensors_file::open(folder_ / "out"); }
  std::vector<std::int64_t> whole(const std::string& name) const {
    const auto opened = file();
    return opened.to_int64(name, opened.at(name).shape);
  }
  std::vector<float> real(const std::string& name) const {
    const auto opened = file();
    return opened.to_fp32(name, opened.at(name).shape);
  }
  std::vector<index_t> list(const std::string& name, index_t row) const {
    const auto indptr = whole(name + ".indptr"), indices = whole(name + ".indices");
    return {indices.begin() + indptr[std::size_t(row)], indices.begin() + indptr[std::size_t(row) + 1]};
  }
  support::oracle::attended attend(index_t row, index_t q_head, const std::vector<index_t>& positions) const {
    std::vector<const float*> keys, rows;
    for (const index_t at : positions) {
      const index_t line = (q_head / (q_heads / kv_heads)) * tokens + at;
      keys.push_back(values.at("k").data() + line * dim);
      rows.push_back(values.at("v").data() + line * dim);
    }
    return support::oracle::attend(values.at("q").data() + (row * q_heads + q_head) * dim, row, keys, rows, positions,
                                   dim, dim);
  }
  /// The worst error of the written outputs of the last turn against dense attention masked to the written lines.
  double worst_error() const {
    const auto out = real("prefill_out"), lse = real("prefill_lse");
    const auto dense = file().contains("lines.dense_rows") ? whole("lines.dense_rows") : std::vector<std::int64_t>{};
    const index_t first = tokens - index_t(file().at("prefill_out").shape[0]);
    double worst = 0;
    for (index_t h = 0; h < q_heads; ++h) {
      const auto vertical = list("lines.vertical", h), slash = list("lines.slash", h);
      for (index_t row = first; row < tokens; ++row) {
        std::vector<index_t> read;
        for (index_t at = 0; at <= row; ++at) {
          if (std::binary_search(vertical.begin(), vertical.end(), at) ||
              std::binary_search(slash.begin(), slash.end(), row - at) ||
              std::binary_search(dense.begin(), dense.end(), std::int64_t(row)))
            read.push_back(at);
        }
        const auto expected = attend(row, h, read);
        const std::size_t line = std::size_t((row - first) * q_heads + h);
        worst = std::max({worst, support::row_error(out.data() + line * dim, expected.out),
                          support::number_error(lse[line], expected.lse)});
      }
    }
    return worst;
  }

  std::vector<std::string> unused;

 private:
  temporary_folder folder_;
};

}  // namespace

TEST_CASE("compress writes loopserve's lines and what the last turn's rows attended along them") {
  lines_case given;
  given.run("loopserve", 32, {{"sampled_rows", "20"}, {"sampling", "random"}, {"seed", "3"}, {"alpha", "0.9"}});
  const auto file = given.file();
  CHECK(file.at("lines.rows").type == dtype::i32);
  CHECK(file.at("lines.vertical.indptr").type == dtype::i64);
  CHECK(file.at("lines.slash.indices").type == dtype::i32);
  CHECK(file.at("prefill_out").type == dtype::f32);
  CHECK(file.at("prefill_out").shape == std::vector<std::int64_t>{tokens - turn, q_heads, dim});
  CHECK(file.at("prefill_lse").shape == std::vector<std::int64_t>{tokens - turn, q_heads});
  CHECK(file.at("lines.vertical.indptr").shape == std::vector<std::int64_t>{q_heads + 1});
  CHECK(given.whole("lines.dense_rows").size() == 16);
  CHECK(given.unused.empty());
  const auto rows = given.whole("lines.rows");
  CHECK(
      (rows.size() == 20 && rows.front() >= turn && rows.back() < tokens && std::is_sorted(rows.begin(), rows.end())));
  CHECK(given.worst_error() < 1e-5);
  bool sparse = false;
  for (index_t h = 0; h < q_heads; ++h) {
    const auto vertical = given.list("lines.vertical", h), slash = given.list("lines.slash", h);
    for (index_t distance = 0; distance < 64; ++distance) REQUIRE(slash[std::size_t(distance)] == distance);
    for (index_t at = 0; at < 4; ++at) REQUIRE(vertical[std::size_t(at)] == at);
    double covered = 0;  // at least alpha of the sampled rows, in double
    for (const std::int64_t row : rows) {
      std::vector<index_t> all(std::size_t(row) + 1);
      for (std::size_t at = 0; at < all.size(); ++at) all[at] = index_t(at);
      const auto seen = given.attend(index_t(row), h, all);
      for (const index_t at : all) {
        if (std::binary_search(vertical.begin(), vertical.end(), at) ||
            std::binary_search(slash.begin(), slash.end(), index_t(row) - at)) {
          covered += seen.probabilities[std::size_t(at)];
        } else {
          sparse = true;
        }
      }
    }
    CHECK(covered >= double(0.9f) * 20);
  }
  CHECK(sparse);
  CHECK(given.whole("keep.indptr").back() == kv_heads * tokens);
  CHECK(given.whole("attend.indptr").size() == std::size_t(steps * kv_heads + 1));
  // Steps 0 to 15 read everything; the first choice falls at the end of step 15.
  CHECK(given.list("attend", 0).size() == tokens + 1);
  CHECK(given.list("attend", 15 * kv_heads).size() == tokens + 16);
  CHECK(given.list("attend", 16 * kv_heads).size() == 33);
  CHECK(given.list("attend", 19 * kv_heads).size() == 36);
  const auto metadata = file.metadata();
  for (const auto& [name, value] : std::map<std::string, std::string>{{"alpha", "0.9"},
                                                                      {"sampled_rows", "20"},
                                                                      {"first", "16"},
                                                                      {"every", "16"},
                                                                      {"sampling", "random"},
                                                                      {"seed", "3"},
                                                                      {"per", "kv_head"},
                                                                      {"algorithm", "coverage"},
                                                                      {"observed", "16"},
                                                                      {"lines", "off"},
                                                                      {"budget", "32"}}) {
    CAPTURE(name);
    REQUIRE(metadata.count(name) == 1);
    CHECK(metadata.at(name) == value);
  }
}

TEST_CASE("compress writes a list for every query head where each reads its own") {
  lines_case given;
  given.turns_name = "turn";
  given.run("loopserve", 32,
            {{"per", "q_head"}, {"algorithm", "paper"}, {"lines", "vertical"}, {"alpha", "0.4"}, {"first", "0"}});
  CHECK(given.whole("attend.indptr").size() == std::size_t(steps * q_heads + 1));
  CHECK(given.list("attend", 0) != given.list("attend", 1));
  CHECK(given.whole("keep.indptr").size() == std::size_t(kv_heads + 1));
  CHECK(given.worst_error() < 1e-5);
  // The columns of both turns' lines are read, the last turn's among them.
  for (index_t h = 0; h < q_heads; ++h) {
    const auto read = given.list("attend", h);
    for (const index_t at : given.list("lines.vertical", h)) REQUIRE(std::binary_search(read.begin(), read.end(), at));
    CHECK(read.size() > 33);
  }
  CHECK(given.unused.empty());
}

TEST_CASE("alpha 1 and the other patterns attend what they say that they do") {
  lines_case given;
  given.run("loopserve_prefill", {}, {{"alpha", "1"}});
  CHECK(given.worst_error() < 1e-5);
  CHECK(given.list("lines.vertical", 3).size() == tokens);
  CHECK(given.list("attend", 0).size() == tokens + 1);
  given.run("minference", {}, {{"vertical", "40"}, {"slash", "110"}});
  CHECK(given.worst_error() < 1e-5);
  CHECK((given.list("lines.vertical", 0).size() == 40 && given.list("lines.slash", 0).size() == 110));
  CHECK(given.whole("lines.rows").size() == 64);
  given.run("a_shape", {}, {{"init", "5"}, {"local", "30"}});
  CHECK(given.worst_error() < 1e-5);
  CHECK(given.whole("lines.rows").empty());
  CHECK((given.list("lines.vertical", 5).size() == 5 && given.list("lines.slash", 5).size() == 30));
  given.run("tri_shape", {}, {{"init", "5"}, {"local", "30"}, {"dense_rows", "7"}});
  CHECK(given.worst_error() < 1e-5);
  CHECK(given.whole("lines.dense_rows") == std::vector<std::int64_t>{183, 184, 185, 186, 187, 188, 189});
  given.run("a_shape", {}, {{"dense_layers", "1"}});
  CHECK(given.worst_error() < 1e-5);
  CHECK(given.whole("lines.dense_rows").size() == std::size_t(tokens - turn));
  given.run("loopserve_decode", 40);
  CHECK_FALSE(given.file().contains("prefill_out"));
  CHECK_FALSE(given.file().contains("lines.rows"));
}

TEST_CASE("what lines need and the file or the settings lack is named") {
  lines_case given;
  given.n_q = tokens - 1;
  CHECK_THROWS_WITH(given.run("loopserve", 32), contains("n_q") && contains("190") && contains("every prompt token"));
  CHECK_THROWS_WITH(given.run("a_shape", {}), contains("n_q"));
  CHECK_NOTHROW(given.run("loopserve_decode", 32));
  given.n_q = 0;
  CHECK_THROWS_WITH(given.run("minference", {}), contains("n_q"));
  given.n_q = tokens;
  const auto refused = [&](const char* name, const char* value, const std::string& because) {
    CHECK_THROWS_WITH(given.run("loopserve", 32, {{name, value}}), contains(because));
  };
  refused("alpha", "0", "alpha is 0; expected ");
  refused("alpha", "1.5", "alpha is 1.5; expected ");
  refused("sampled_rows", "0", "sampled_rows is 0; expected 1");
  refused("every", "0", "every is 0; expected 1");
  refused("first", "-1", "first is -1; expected 0");
  refused("observed", "33", "observed is 33; expected at most the budget");
  refused("per", "head", "one of kv_head, q_head");
  refused("sampling", "newest", "one of even, random");
  refused("algorithm", "greedy", "one of coverage, paper");
  refused("lines", "slash", "one of off, vertical");
  CHECK_THROWS_WITH(given.run("loopserve", 15), contains("observed is 16; expected at most the budget, which is 15"));
}
