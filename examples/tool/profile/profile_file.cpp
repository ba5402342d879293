#include "profile_file.hpp"

#include <nlohmann/json.hpp>

#include "engine/files/input_file.hpp"

namespace tool {
namespace {

using nlohmann::json;
constexpr const char* calibrate = "write one with `tessera calibrate`";

const json& member(const json& object, const char* name, const std::string& place) {
  const auto found = object.find(name);
  tessera::require(found != object.end(), place + ": \"" + name + "\"", "missing", "a value", calibrate);
  return *found;
}

double number(const json& value, const std::string& place) {
  tessera::require(value.is_number(), place, value.type_name(), "a number", calibrate);
  return value.get<double>();
}

tessera::index_t count(const json& value, const std::string& place) {
  const bool whole = value.is_number_integer() && value >= 0 && value <= tessera::most_tokens;
  tessera::require(whole, place, value.dump(), "a whole number, 0 to " + std::to_string(tessera::most_tokens),
                   calibrate);
  return value.get<tessera::index_t>();
}

std::string text(const json& value, const std::string& place) {
  tessera::require(value.is_string(), place, value.type_name(), "text", calibrate);
  return value.get<std::string>();
}

// A table [layers][kv_heads]; the first one read says how many there are.
std::vector<double> table(const json& object, const char* name, const std::string& source, tessera::profile& of) {
  const std::string place = source + ": \"" + name + "\"";
  const json& rows = member(object, name, source);
  tessera::require(rows.is_array() && !rows.empty(), place, rows.is_array() ? "empty" : rows.type_name(),
                   "one row of numbers for each layer", calibrate);
  if (of.layers == 0) of.layers = tessera::index_t(rows.size());
  tessera::require(rows.size() == std::size_t(of.layers), "layers of " + place, rows.size(),
                   "those of \"mean\", which are " + std::to_string(of.layers), calibrate);
  std::vector<double> result;
  for (std::size_t layer = 0; layer < rows.size(); ++layer) {
    const std::string row_place = place + ", layer " + std::to_string(layer);
    const json& row = rows[layer];
    tessera::require(row.is_array() && !row.empty(), row_place, row.is_array() ? "empty" : row.type_name(),
                     "a number for each KV head", calibrate);
    if (of.kv_heads == 0) of.kv_heads = tessera::index_t(row.size());
    tessera::require(row.size() == std::size_t(of.kv_heads), "KV heads of " + row_place, row.size(),
                     "those of the first layer of \"mean\", which are " + std::to_string(of.kv_heads), calibrate);
    for (std::size_t head = 0; head < row.size(); ++head)
      result.push_back(number(row[head], row_place + ", KV head " + std::to_string(head)));
  }
  return result;
}

nlohmann::ordered_json rows_of(const std::vector<double>& table, tessera::index_t kv_heads) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (std::size_t first = 0; first < table.size(); first += std::size_t(kv_heads)) {
    rows.push_back(std::vector<double>(table.begin() + std::ptrdiff_t(first),
                                       table.begin() + std::ptrdiff_t(first + std::size_t(kv_heads))));
  }
  return rows;
}

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

std::string dumped(const nlohmann::ordered_json& all) {
  return all.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

}  // namespace

tessera::profile parse_profile(std::string_view content, std::string_view source_name) {
  const std::string source = "profile " + std::string(source_name);
  const json object = json::parse(content, nullptr, false);
  tessera::require(object.is_object(), source, object.is_discarded() ? "no JSON" : object.type_name(),
                   "a JSON object with version, model, method, share, samples, alpha, mean, deviation and budget",
                   calibrate);
  const tessera::index_t version = count(member(object, "version", source), source + ": \"version\"");
  tessera::require(version == 1, source + ": \"version\"", version, "1",
                   version > 1 ? "use a newer tessera, or calibrate again" : "calibrate again");
  tessera::profile result;
  result.model = text(member(object, "model", source), source + ": \"model\"");
  result.method = text(member(object, "method", source), source + ": \"method\"");
  result.share = number(member(object, "share", source), source + ": \"share\"");
  result.samples = count(member(object, "samples", source), source + ": \"samples\"");
  result.alpha = number(member(object, "alpha", source), source + ": \"alpha\"");
  result.mean = table(object, "mean", source, result);
  result.deviation = table(object, "deviation", source, result);
  result.budget = table(object, "budget", source, result);
  try {
    result.check();
  } catch (const tessera::error& problem) {
    throw tessera::error(source + ": " + problem.what());
  }
  return result;
}

tessera::profile read_profile(const std::filesystem::path& path) {
  return parse_profile(engine::read_text_file(path), engine::printable(path.native()));
}

std::string profile_text(const tessera::profile& profile) { return dumped(json_of(profile)); }

std::string profile_text(const tessera::profile& profile, const rank_stability& stability) {
  nlohmann::ordered_json all = json_of(profile);
  all["stability"] = {{"mean", stability.mean}, {"least", stability.least}, {"families", stability.families}};
  all["stability"]["between_families"] = stability.between;
  all["stability"]["family_mean"] = nlohmann::ordered_json::array();
  for (const auto& shares : stability.family_shares)
    all["stability"]["family_mean"].push_back(rows_of(shares, profile.kv_heads));
  return dumped(all);
}

}  // namespace tool
