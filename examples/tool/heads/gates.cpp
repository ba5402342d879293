#include "gates.hpp"

#include <list>
#include <tessera/core/error.hpp>

#include "engine/files/input_file.hpp"
#include "tool/profile/table_file.hpp"

namespace tool {
namespace {

constexpr const char* kind = "tessera head gates";

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
  return table_text({{"kind", kind},
                     {"version", 1},
                     {"model", found.model},
                     {"sinks", found.sinks},
                     {"recent", found.recent},
                     {"questions", found.questions},
                     {"gates", rows_of(found.gates, found.kv_heads)}});
}

head_gates parse_gates(std::string_view text, std::string_view source) {
  table_file file(text, source, "kind, version, model, sinks, recent, questions and gates", "tessera heads");
  file.require_kind(kind);
  file.require_version(1);
  head_gates found;
  found.model = file.text("model");
  found.sinks = file.count("sinks");
  found.recent = file.count("recent");
  found.questions = file.count("questions");
  found.gates = file.table("gates");
  found.layers = file.layers();
  found.kv_heads = file.kv_heads();
  for (std::size_t i = 0; i < found.gates.size(); ++i) {
    tessera::require(found.gates[i] >= 0 && found.gates[i] <= 1,
                     file.place("gates") + ", layer " + std::to_string(i / std::size_t(found.kv_heads)) + ", KV head " +
                         std::to_string(i % std::size_t(found.kv_heads)),
                     found.gates[i], "in [0, 1]", file.cure());
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
