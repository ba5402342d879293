#include "gates.hpp"

#include <list>
#include <nlohmann/json.hpp>
#include <tessera/core/error.hpp>
#include <tessera/core/parameters.hpp>

#include "engine/files/input_file.hpp"

namespace tool {
namespace {

using nlohmann::ordered_json;
using tessera::index_t;
using tessera::require;

constexpr const char* kind = "tessera head gates";
constexpr std::int64_t newest_version = 1;
constexpr const char* cure = "make it with `tessera heads`";

std::string shown(const ordered_json& object, const char* key) {
  return object.contains(key)
             ? engine::printable(object[key].dump(-1, ' ', false, ordered_json::error_handler_t::replace), 40)
             : "missing";
}

index_t read_count(const ordered_json& object, const char* key, index_t least, const std::string& file) {
  const tessera::value_range<std::int64_t> allowed{least, tessera::most_tokens};
  const bool whole = object.contains(key) && object[key].is_number_integer();
  require(whole && allowed.holds(object[key].get<std::int64_t>()), std::string(key) + " of " + file, shown(object, key),
          "a whole number, " + allowed.text(), cure);
  return object[key].get<index_t>();
}

struct loaded {
  std::string source;
  head_gates found;
};

std::list<loaded>& all_loaded() {
  static std::list<loaded> all;
  return all;
}

}  // namespace

std::string gates_text(const head_gates& found) {
  ordered_json file;
  file["kind"] = kind;
  file["version"] = newest_version;
  file["model"] = found.model;
  file["layers"] = found.layers;
  file["kv_heads"] = found.kv_heads;
  file["sinks"] = found.sinks;
  file["recent"] = found.recent;
  file["questions"] = found.questions;
  file["gates"] = ordered_json::array();
  for (index_t layer = 0; layer < found.layers; ++layer) {
    const auto first = found.gates.begin() + layer * found.kv_heads;
    file["gates"].push_back(std::vector<double>(first, first + found.kv_heads));
  }
  return file.dump(1, ' ', false, ordered_json::error_handler_t::replace) + "\n";
}

head_gates parse_gates(std::string_view text, std::string_view source) {
  const std::string file = engine::printable(source);
  const ordered_json object = ordered_json::parse(text, nullptr, false);
  require(object.is_object(), file, "no JSON object", "a profile of head gates", cure);
  require(object.contains("kind") && object["kind"] == kind, "kind of " + file, shown(object, "kind"),
          "\"" + std::string(kind) + "\"", cure);
  const index_t version = read_count(object, "version", 1, file);
  require(version <= newest_version, "version of " + file, version,
          "at most " + std::to_string(newest_version) + ", the newest that this build reads",
          "take a newer build, or make the profile again with this one");
  head_gates found;
  if (object.contains("model") && object["model"].is_string()) found.model = object["model"].get<std::string>();
  found.layers = read_count(object, "layers", 1, file);
  found.kv_heads = read_count(object, "kv_heads", 1, file);
  found.sinks = read_count(object, "sinks", 0, file);
  found.recent = read_count(object, "recent", 1, file);
  found.questions = read_count(object, "questions", 1, file);
  const auto& rows = object.contains("gates") ? object["gates"] : ordered_json();
  require(rows.is_array() && rows.size() == std::size_t(found.layers), "gates of " + file,
          rows.is_array() ? std::to_string(rows.size()) + " layers" : shown(object, "gates"),
          "a list for each layer, which are " + std::to_string(found.layers), cure);
  for (std::size_t layer = 0; layer < rows.size(); ++layer) {
    const std::string row = "gates of layer " + std::to_string(layer) + " of " + file;
    require(rows[layer].is_array() && rows[layer].size() == std::size_t(found.kv_heads), row,
            rows[layer].is_array() ? std::to_string(rows[layer].size()) : "no list",
            "one for each KV head, which are " + std::to_string(found.kv_heads), cure);
    for (const auto& gate : rows[layer]) {
      const bool holds = gate.is_number() && gate.get<double>() >= 0 && gate.get<double>() <= 1;
      require(holds, row, engine::printable(gate.dump(-1, ' ', false, ordered_json::error_handler_t::replace), 40),
              "numbers in [0, 1]", cure);
      found.gates.push_back(gate.get<double>());
    }
  }
  return found;
}

tessera::share_table load_gates(const std::filesystem::path& path) {
  const std::string source = path.string();
  for (const loaded& known : all_loaded()) {
    if (known.source == source) return {known.found.gates.data(), known.found.layers, known.found.kv_heads};
  }
  all_loaded().push_back({source, parse_gates(engine::read_text_file(path), source)});
  const head_gates& found = all_loaded().back().found;
  return {found.gates.data(), found.layers, found.kv_heads};
}

std::string gates_source(const tessera::share_table& table) {
  for (const loaded& known : all_loaded()) {
    if (known.found.gates.data() == table.data) return known.source;
  }
  return "none";
}

}  // namespace tool
