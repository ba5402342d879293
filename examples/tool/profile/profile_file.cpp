#include "profile_file.hpp"

#include "engine/files/input_file.hpp"
#include "table_file.hpp"

namespace tool {
namespace {

nlohmann::ordered_json json_of(const tessera::profile& profile) {
  return {{"version", 1},
          {"model", profile.model},
          {"method", profile.method},
          {"share", profile.share},
          {"samples", profile.samples},
          {"alpha", profile.alpha},
          {"mean", rows_of(profile.mean, profile.kv_heads)},
          {"deviation", rows_of(profile.deviation, profile.kv_heads)},
          {"budget", rows_of(profile.budget, profile.kv_heads)}};
}

}  // namespace

tessera::profile parse_profile(std::string_view text, std::string_view source) {
  table_file file(text, source, "version, model, method, share, samples, alpha, mean, deviation and budget",
                  "tessera calibrate");
  file.require_version(1);
  tessera::profile result;
  result.model = file.text("model");
  result.method = file.text("method");
  result.share = file.number("share");
  result.samples = file.count("samples");
  result.alpha = file.number("alpha");
  result.mean = file.table("mean");
  result.deviation = file.table("deviation");
  result.budget = file.table("budget");
  result.layers = file.layers();
  result.kv_heads = file.kv_heads();
  try {
    result.check();
  } catch (const tessera::error& problem) {
    throw tessera::error(file.source() + ": " + problem.what());
  }
  return result;
}

tessera::profile read_profile(const std::filesystem::path& path) {
  return parse_profile(engine::read_text_file(path), path.native());
}

std::string profile_text(const tessera::profile& profile) { return table_text(json_of(profile)); }

std::string profile_text(const tessera::profile& profile, const rank_stability& stability) {
  nlohmann::ordered_json all = json_of(profile);
  all["stability"] = {{"mean", stability.mean}, {"least", stability.least}, {"families", stability.families}};
  all["stability"]["between_families"] = stability.between;
  all["stability"]["family_mean"] = nlohmann::ordered_json::array();
  for (const auto& shares : stability.family_shares)
    all["stability"]["family_mean"].push_back(rows_of(shares, profile.kv_heads));
  return table_text(all);
}

}  // namespace tool
