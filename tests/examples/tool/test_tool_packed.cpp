// compress with methods that leave elements of vectors out: packed.k and packed.v.
#include <cmath>
#include <random>

#include "catch.hpp"
#include "engine/files/safetensors.hpp"
#include "examples/temporary_folder.hpp"
#include "tool/compress.hpp"

using engine::safetensors_file;
using tessera::index_t;

namespace {

constexpr index_t kv_heads = 2, q_heads = 4, tokens = 150, dim = 64, steps = 3;

/// A layer of random tensors, and what compress makes of it.
class compressed_layer {
 public:
  compressed_layer(const std::string& method, std::optional<index_t> budget, std::vector<tool::setting> settings = {}) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    engine::safetensors_writer writer;
    const auto make = [&](const char* name, index_t first, index_t second) {
      std::vector<float> values(std::size_t(first * second * dim));
      for (float& value : values) value = normal(random);
      writer.add(name, {first, second, dim}, std::span<const float>(values));
      return values;
    };
    k = make("k", kv_heads, tokens);
    v = make("v", kv_heads, tokens);
    q = make("q", tokens, q_heads);
    make("q_decode", steps, q_heads);
    make("k_decode", steps, kv_heads);
    make("v_decode", steps, kv_heads);
    writer.write(folder_ / "in");
    tool::compress_options options{method, budget, std::move(settings), std::make_shared<tessera::cpu::executor>(1)};
    tool::compress(safetensors_file::open(folder_ / "in"), options).file.write(folder_ / "out");
  }
  std::vector<float> packed(const char* name) const {
    return safetensors_file::open(folder_ / "out").to_fp32(name, std::vector<std::int64_t>{kv_heads, tokens, dim});
  }
  std::vector<std::int64_t> whole(const char* name) const {
    const auto file = safetensors_file::open(folder_ / "out");
    return file.to_int64(name, file.at(name).shape);
  }
  bool has(const char* name) const { return safetensors_file::open(folder_ / "out").contains(name); }
  std::string metadata(const char* key) const { return safetensors_file::open(folder_ / "out").metadata().at(key); }

  std::vector<float> q, k, v;

 private:
  engine_tests::temporary_folder folder_;
};

double worst_difference(const std::vector<float>& a, const std::vector<float>& b) {
  REQUIRE(a.size() == b.size());
  double worst = 0;
  for (std::size_t i = 0; i < a.size(); ++i) worst = std::max(worst, std::abs(double(a[i]) - double(b[i])));
  return worst;
}

}  // namespace

TEST_CASE("mosaickv at full rates gives the vectors back; by default it has its paper's parameters") {
  const compressed_layer all("mosaickv", 1000, {{"channels", "1"}, {"truncate", "0"}, {"group", "4"}});
  CHECK(worst_difference(all.packed("packed.k"), all.k) < 1e-5);
  CHECK(worst_difference(all.packed("packed.v"), all.v) < 1e-5);
  CHECK(all.whole("keep.indptr") == std::vector<std::int64_t>{0, tokens, 2 * tokens});

  CHECK(compressed_layer("mosaickv", 48).metadata("segment") == "65536");  // of which so few tokens have no basis
  const compressed_layer usual("mosaickv", 48, {{"segment", "128"}});
  const std::vector<std::pair<const char*, const char*>> defaults{
      {"channels", "0.25"}, {"group", "1"},    {"block", "8"},      {"truncate", "0.25"},
      {"tail", "32"},       {"reduce", "sum"}, {"element", "same"}, {"strategy", "fixed"}};
  for (const auto& [name, value] : defaults) CHECK(usual.metadata(name) == value);
  // 128 tokens are packed; a step reads 48 of them, the first and the last block among them, and the tail.
  const auto attended = usual.whole("attend.indices");
  CHECK(usual.whole("attend.indptr")[1] == 48 + tokens - 128 + 1);
  CHECK(attended.front() == 0);
  CHECK(std::find(attended.begin(), attended.end(), 127) != attended.end());
  // Random rows lose much: a search gives them the most channels.
  const compressed_layer searched("mosaickv", 48,
                                  {{"segment", "128"}, {"strategy", "searched"}, {"least_segment", "64"}});
  CHECK(searched.metadata("strategy") == "searched");
  // The tail is as it was, and what is packed is shorter than it was.
  const auto packed = usual.packed("packed.k"), more = searched.packed("packed.k");
  double before = 0, after = 0, after_search = 0;
  for (index_t token = 0; token < tokens; ++token) {
    for (index_t d = 0; d < dim; ++d) {
      const auto at = std::size_t(token * dim + d);
      if (token >= 128) CHECK(packed[at] == usual.k[at]);
      if (token < 128) before += double(usual.k[at]) * double(usual.k[at]);
      if (token < 128) after += double(packed[at]) * double(packed[at]);
      if (token < 128) after_search += double(more[at]) * double(more[at]);
    }
  }
  CHECK(after < 0.95 * before);
  CHECK(after > 0.3 * before);
  CHECK(after_search > 1.02 * after);
  CHECK(after_search < 0.97 * before);
}

TEST_CASE("think drops the channels with the smallest product of query and key energy, and keeps the last 32 keys") {
  const compressed_layer thin("think", {});
  CHECK(thin.metadata("channels") == "0.6");
  const auto k = thin.packed("packed.k");
  CHECK(thin.packed("packed.v") == thin.v);
  for (index_t head = 0; head < kv_heads; ++head) {
    std::vector<std::pair<double, index_t>> energy;
    for (index_t d = 0; d < dim; ++d) {
      double queries = 0, keys = 0;
      for (index_t t = tokens - 32; t < tokens; ++t) {
        for (index_t g = 0; g < 2; ++g)
          queries += std::pow(double(thin.q[std::size_t((t * q_heads + head * 2 + g) * dim + d)]), 2);
      }
      for (index_t t = 0; t < tokens - 32; ++t)  // of those that are thinned
        keys += std::pow(double(thin.k[std::size_t((head * tokens + t) * dim + d)]), 2);
      energy.emplace_back(queries * keys, d);
    }
    std::sort(energy.begin(), energy.end());
    std::vector<bool> dropped(std::size_t(dim), false);
    for (index_t i = 0; i < 25; ++i) dropped[std::size_t(energy[std::size_t(i)].second)] = true;  // int(0.4 * 64)
    for (index_t t = 0; t < tokens; ++t) {
      for (index_t d = 0; d < dim; ++d) {
        const auto at = std::size_t((head * tokens + t) * dim + d);
        REQUIRE(k[at] == (t < tokens - 32 && dropped[std::size_t(d)] ? 0.0f : thin.k[at]));
      }
    }
  }
}

TEST_CASE("methods over whole vectors write none of them, and senseless strategies are refused") {
  const compressed_layer plain("snapkv", 40);
  CHECK_FALSE(plain.has("packed.k"));
  const auto refused = [](std::vector<tool::setting> settings, index_t budget = 64) {
    return [=] { compressed_layer("mosaickv", budget, settings); };
  };
  CHECK_THROWS_WITH(refused({{"channels", "0.001"}})(), contains("at least 1 element"));
  CHECK_THROWS_WITH(refused({{"channels", "0.9"}})(), contains("what truncate leaves"));
  CHECK_THROWS_WITH(refused({{"element", "int8"}})(), contains("same, bf16, fp16, fp8, int4"));
  CHECK_THROWS_WITH(refused({{"reduce", "mean"}})(), contains("one of sum, max"));
  CHECK_THROWS_WITH(refused({{"strategy", "best"}})(), contains("one of fixed, searched"));
  CHECK_THROWS_WITH(refused({{"strategy", "searched"}, {"truncate", "0.7"}})(), contains("what truncate leaves"));
  CHECK_THROWS_WITH(refused({{"block", "5"}})(), contains("a divisor of the tail"));
  CHECK_THROWS_WITH(refused({}, 15)(), contains("at least two blocks"));
}
