#include <cmath>
#include <fstream>
#include <map>
#include <random>
#include <tessera/cache.hpp>

#include "catch.hpp"
#include "engine/files/safetensors.hpp"
#include "examples/temporary_folder.hpp"
#include "tool/compress.hpp"
#include "tool/methods/registry.hpp"
#include "tool/profile/profile_file.hpp"
#include "tool/strategies/strategy_limits.hpp"

using engine::safetensors_file;
using engine_tests::temporary_folder;
using tessera::index_t;

namespace {

const char* const good =
    R"({"version": 1, "model": "m", "method": "snapkv", "share": 0.3, "samples": 5, "alpha": 2,
        "mean": [[0.1, 0.2, 0.3, 0.4]], "deviation": [[0.05, 0.0, 0.1, 0.4]], "budget": [[0.2, 0.25, 0.5, 1.0]]})";

std::string with(std::string from, const std::string& to) {
  std::string text = good;
  const std::size_t at = text.find(from);
  REQUIRE(at != std::string::npos);
  return text.replace(at, from.size(), to);
}

/// One layer of random tensors, [4 kv_heads, tokens].
struct layer_file {
  temporary_folder folder;
  index_t tokens;

  explicit layer_file(index_t count, index_t kv_heads = 4) : tokens(count) {
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    engine::safetensors_writer writer;
    const auto add = [&](const std::string& name, std::vector<std::int64_t> shape) {
      std::vector<float> values(std::size_t(shape[0] * shape[1] * shape[2]));
      for (float& value : values) value = normal(random);
      writer.add_rounded(name, shape, values, engine::dtype::f32);
    };
    add("k", {kv_heads, tokens, 64});
    add("v", {kv_heads, tokens, 64});
    add("q", {tokens, 2 * kv_heads, 64});
    add("q_decode", {3, 2 * kv_heads, 64});
    add("k_decode", {3, kv_heads, 64});
    add("v_decode", {3, kv_heads, 64});
    writer.write(folder / "in");
    write_profile(good);
  }
  void write_profile(const std::string& text) const { std::ofstream(folder / "profile.json") << text; }

  safetensors_file compressed(std::optional<index_t> budget, std::vector<tool::setting> settings,
                              bool profile = true) const {
    if (profile) settings.push_back({"profile", (folder / "profile.json").string()});
    tool::compress_options options{"tangram", budget, settings, std::make_shared<tessera::cpu::executor>(1)};
    tool::compress(safetensors_file::open(folder / "in"), options).file.write(folder / "out");
    return safetensors_file::open(folder / "out");
  }
};

std::vector<std::int64_t> whole(const safetensors_file& file, const std::string& name) {
  return file.to_int64(name, file.at(name).shape);
}
std::vector<std::int64_t> counts(const safetensors_file& file) {
  const auto indptr = whole(file, "keep.indptr");
  std::vector<std::int64_t> all;
  for (std::size_t h = 1; h < indptr.size(); ++h) all.push_back(indptr[h] - indptr[h - 1]);
  return all;
}
using longs = std::vector<std::int64_t>;

}  // namespace

TEST_CASE("a profile is read as it was written") {
  const tessera::profile profile = tool::parse_profile(good, "p");
  CHECK(profile.model == "m");
  CHECK(profile.samples == 5);
  CHECK(profile.layers == 1);
  CHECK(profile.kv_heads == 4);
  CHECK(profile.deviation == std::vector<double>{0.05, 0.0, 0.1, 0.4});
  const tessera::profile again = tool::parse_profile(tool::profile_text(profile), "p");
  CHECK(again.budget == profile.budget);
  CHECK(again.mean == profile.mean);
  CHECK(tool::profile_text(again) == tool::profile_text(profile));
}

TEST_CASE("profiles that are none are refused with what is wrong and where") {
  const auto refused = [](const std::string& text, const std::string& why) {
    CHECK_THROWS_WITH(tool::parse_profile(text, "p.json"), contains("profile p.json") && contains(why));
  };
  refused("{", "no JSON");
  refused("[1]", "expected a JSON object with version");
  refused(with("\"version\": 1", "\"version\": 2"), "\"version\" is 2; expected 1; use a newer tessera");
  refused(with("\"version\": 1", "\"version\": 1.5"), "\"version\" is 1.5; expected a whole number");
  refused(with("\"version\": 1,", ""), "\"version\" is missing");
  refused(with("\"budget\": [[0.2, 0.25, 0.5, 1.0]]", "\"budget\": [[0.2, 0.25, 0.5]]"),
          "KV heads of profile p.json: \"budget\", layer 0 is 3; expected those of the first layer of \"mean\", which "
          "are 4");
  refused(with("[[0.2, 0.25, 0.5, 1.0]]", "[[0.2, 0.25, 0.5, 1.0], [0.2, 0.25, 0.5, 1.0]]"),
          "layers of profile p.json: \"budget\" is 2; expected those of \"mean\", which are 1");
  refused(with("[[0.2, 0.25, 0.5, 1.0]]", "[]"), "\"budget\" is empty");
  refused(with("0.25", "1.25"), "budget of layer 0, kv_head 1 is 1.25; expected in (0, 1]");
  refused(with("0.25", "0"), "budget of layer 0, kv_head 1 is 0; expected in (0, 1]");
  refused(with("0.25", "null"), "\"budget\", layer 0, KV head 1 is null; expected a number");
  refused(with("0.25", "NaN"), "no JSON");
  refused(with("0.05", "-0.05"), "deviation of layer 0, kv_head 0 is -0.05");
  refused(with("\"share\": 0.3", "\"share\": 3"), "share of the profile is 3");
  refused(with("\"samples\": 5", "\"samples\": 0"), "samples of the profile is 0");
  refused(with("\"alpha\": 2", "\"alpha\": \"two\""), "\"alpha\" is string; expected a number");
}

TEST_CASE("compress keeps each head's share of the profile, and says which pages that takes") {
  const layer_file layer(400);
  // 80, 100, 200 and 400 tokens: one group of four heads has pages for the longest.
  const auto out = layer.compressed({}, {});
  CHECK(counts(out) == longs{80, 100, 200, 400});
  CHECK(whole(out, "pages.used") == longs{25});
  CHECK(whole(out, "pages.reserved") == longs{25});
  CHECK(out.at("out").shape == longs{3, 8, 64});
  CHECK(out.metadata().at("alpha") == "2");
  CHECK(out.metadata().count("budget") == 0);
  // Two heads a group, sorted by their shares.
  const auto pairs = layer.compressed(7, {{"heads", "2"}});  // a budget beside a profile says nothing
  CHECK(whole(pairs, "pages.used") == longs{7, 25});
  const auto unsorted = layer.compressed({}, {{"heads", "2"}, {"cluster", "none"}, {"page", "8"}});
  CHECK(whole(unsorted, "pages.reserved") == longs{13, 50});
  const auto filled = layer.compressed({}, {{"heads", "2"}, {"slack", "fill"}});
  CHECK(counts(filled) == longs{100, 100, 400, 400});
  CHECK(whole(filled, "pages.used") == longs{7, 25});
  // alpha makes the budgets of mean and deviation: 0.1, 0.2, 0.3, 0.4 where it is 0.
  CHECK(counts(layer.compressed({}, {{"alpha", "0"}})) == longs{40, 80, 120, 160});
  CHECK(counts(layer.compressed({}, {{"alpha", "2"}})) == longs{80, 80, 200, 400});
  // In chunks there are as many, and others.
  const auto chunks = layer.compressed({}, {{"chunk", "96"}});
  CHECK(counts(chunks) == longs{80, 100, 200, 400});
  CHECK(whole(chunks, "keep.indices") != whole(out, "keep.indices"));
  // The window is inside a head's count, and stays whole.
  CHECK(counts(layer.compressed({}, {{"window", "90"}})) == longs{90, 100, 200, 400});
}

TEST_CASE("without a profile every head keeps the budget, in one piece and in chunks") {
  const layer_file layer(400);
  CHECK(counts(layer.compressed(70, {}, false)) == longs{70, 70, 70, 70});
  const auto chunks = layer.compressed(70, {{"chunk", "64"}}, false);
  CHECK(counts(chunks) == longs{70, 70, 70, 70});
  CHECK(whole(chunks, "pages.used") == whole(chunks, "pages.reserved"));
  CHECK(counts(layer.compressed(1'000, {}, false)) == longs{400, 400, 400, 400});
  CHECK(counts(layer.compressed(70, {{"profile", "none"}}, false)) == longs{70, 70, 70, 70});
  for (const tool::setting& alone : {tool::setting{"alpha", "3"}, {"layer", "0"}, {"slack", "fill"}}) {
    const std::string sentence = alone.name + " is set without a profile; expected a profile beside it";
    CHECK_THROWS_WITH(layer.compressed(70, {alone}, false), contains(sentence));
    CHECK_THROWS_WITH(layer.compressed(70, {alone, {"profile", "none"}}, false), contains(sentence));
  }
  CHECK(!tool::names_profile(tool::find_method("tangram"), {{"profile", "none"}}));
  CHECK(tool::names_profile(tool::find_method("tangram"), {{"profile", "p.json"}}));
  CHECK(!tool::names_profile(tool::find_method("snapkv"), {{"profile", "p.json"}}));
}

TEST_CASE("compress refuses profiles and groups that do not fit the layer") {
  const layer_file layer(100), small(100, 2);
  CHECK_THROWS_WITH(small.compressed({}, {}),
                    contains("kv_heads of the profile is 4; expected those of the model, which "
                             "are 2"));
  CHECK_THROWS_WITH(layer.compressed({}, {{"heads", "3"}}), contains("heads is 3; expected a divisor of the 4"));
  CHECK_THROWS_WITH(layer.compressed({}, {{"layer", "1"}}), contains("layer is 1; expected 0"));
  CHECK_THROWS_WITH(layer.compressed({}, {{"alpha", "-1"}}), contains("alpha is -1; expected 0 to"));
  CHECK_THROWS_WITH(layer.compressed({}, {{"alpha", "nan"}}), contains("alpha is 'nan'"));
  CHECK_THROWS_WITH(layer.compressed({}, {{"slack", "full"}}),
                    contains("slack is 'full'; expected one of empty, fill"));
  CHECK_THROWS_WITH(layer.compressed({}, {{"cluster", "row"}}), contains("cluster is 'row'"));
  CHECK_THROWS_WITH(layer.compressed({}, {{"chunk", "0"}}), contains("chunk is 0; expected 1 to"));
  CHECK_THROWS_WITH(layer.compressed({}, {{"window", "101"}, {"chunk", "8"}, {"profil", "x"}}),
                    contains("did you mean profile?"));
  layer.write_profile(with("\"version\": 1", "\"version\": 9"));
  CHECK_THROWS_WITH(layer.compressed({}, {}), contains("\"version\" is 9; expected 1"));
}

TEST_CASE("limits of a search are in the middle of those by which most segments choose what is wanted") {
  // Three segments: what 25 % in groups of 1 lose, and groups of 2, which come before them.
  tool::measured_segments segments;
  for (const auto& [wanted, before] : {std::pair{0.2, 0.3}, {0.24, 0.28}, {0.5, 0.6}}) {
    tessera::strategy_measures one;
    for (auto& share : one.losses) share.fill(0.9);
    one.losses[1][2] = wanted, one.losses[1][1] = before;
    one.losses[2] = {wanted, wanted, wanted / 2};
    one.inside = {wanted * 2, wanted, wanted / 2}, one.outside = 2;
    segments.add(one);
  }
  const auto loss = segments.channel_loss(0.25f, 1);
  CHECK(loss.segments == 2);
  CHECK(loss.value == Approx(0.26));
  std::size_t choose = 0;
  for (const auto& one : segments.all())
    choose += one.best(float(loss.value), 0, 32) == tessera::segment_strategy{0.25f, 1, 4};
  CHECK(choose == 2);
  const auto spread = segments.block_spread(8);
  CHECK(spread.segments == 2);
  CHECK(spread.value == Approx(0.16));
  CHECK(segments.all()[0].best(0, float(spread.value), 32).block == 8);
  CHECK(segments.block_spread(4).segments == 3);
  const auto fallback = segments.channel_loss(0.375f, 1);  // chosen wherever nothing before it qualifies
  CHECK(fallback.segments == 3);
  for (const auto& one : segments.all())
    CHECK(one.best(float(fallback.value), 0, 32) == tessera::segment_strategy{0.375f, 1, 4});
  CHECK_THROWS_WITH(segments.channel_loss(0.3f, 1), contains("--channels is 0.3"));
  CHECK_THROWS_WITH(segments.channel_loss(0.25f, 3), contains("--group is 3"));
  CHECK_THROWS_WITH(segments.block_spread(32), contains("--block is 32"));
  CHECK(tool::measured_segments().channel_loss(0.25f, 1).segments == 0);
}
