#include "table_file.hpp"

#include <tessera/core/error.hpp>
#include <tessera/core/parameters.hpp>

#include "engine/files/input_file.hpp"

namespace tool {

using nlohmann::json;
using tessera::index_t;
using tessera::require;

table_file::table_file(std::string_view text, std::string_view source, const std::string& members,
                       const std::string& maker)
    : source_("profile " + engine::printable(source)),
      cure_("write one with `" + maker + "`"),
      object_(json::parse(text, nullptr, false)) {
  require(object_.is_object(), source_, object_.is_discarded() ? "no JSON" : object_.type_name(),
          "a JSON object with " + members, cure_);
}

std::string table_file::place(const char* name) const { return source_ + ": \"" + name + "\""; }

const json& table_file::member(const char* name) const {
  const auto found = object_.find(name);
  require(found != object_.end(), place(name), "missing", "a value", cure_);
  return *found;
}

double table_file::number(const json& value, const std::string& where) const {
  require(value.is_number(), where, value.type_name(), "a number", cure_);
  return value.get<double>();
}

void table_file::require_version(index_t newest) const {
  const index_t version = count("version");
  require(version >= 1 && version <= newest, place("version"), version, tessera::value_range<index_t>{1, newest}.text(),
          version > newest ? "use a newer tessera, or make the file again" : cure_);
}

void table_file::require_kind(const std::string& kind) const {
  const std::string found = text("kind");
  require(found == kind, place("kind"), "'" + engine::printable(found, 40) + "'", "'" + kind + "'", cure_);
}

std::string table_file::text(const char* name) const {
  const json& value = member(name);
  require(value.is_string(), place(name), value.type_name(), "text", cure_);
  return value.get<std::string>();
}

double table_file::number(const char* name) const { return number(member(name), place(name)); }

index_t table_file::count(const char* name) const {
  const json& value = member(name);
  const bool whole = value.is_number_integer() && value >= 0 && value <= tessera::max_tokens;
  require(whole, place(name), engine::printable(value.dump(-1, ' ', false, json::error_handler_t::replace), 40),
          "a whole number, 0 to " + std::to_string(tessera::max_tokens), cure_);
  return value.get<index_t>();
}

std::vector<double> table_file::table(const char* name) {
  const std::string where = place(name);
  const json& rows = member(name);
  require(rows.is_array() && !rows.empty(), where, rows.is_array() ? "empty" : rows.type_name(),
          "one row of numbers for each layer", cure_);
  if (layers_ == 0) {
    layers_ = index_t(rows.size());
    first_table_ = name;
  }
  require(rows.size() == std::size_t(layers_), "layers of " + where, rows.size(),
          "those of \"" + first_table_ + "\", which are " + std::to_string(layers_), cure_);
  std::vector<double> result;
  for (std::size_t layer = 0; layer < rows.size(); ++layer) {
    const std::string row_place = where + ", layer " + std::to_string(layer);
    const json& row = rows[layer];
    require(row.is_array() && !row.empty(), row_place, row.is_array() ? "empty" : row.type_name(),
            "a number for each KV head", cure_);
    if (kv_heads_ == 0) kv_heads_ = index_t(row.size());
    require(row.size() == std::size_t(kv_heads_), "KV heads of " + row_place, row.size(),
            "those of the first layer of \"" + first_table_ + "\", which are " + std::to_string(kv_heads_), cure_);
    for (std::size_t head = 0; head < row.size(); ++head)
      result.push_back(number(row[head], row_place + ", KV head " + std::to_string(head)));
  }
  return result;
}

nlohmann::ordered_json rows_of(const std::vector<double>& table, index_t kv_heads) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (auto first = table.begin(); first != table.end(); first += kv_heads)
    rows.push_back(std::vector<double>(first, first + kv_heads));
  return rows;
}

std::string table_text(const nlohmann::ordered_json& all) {
  return all.dump(1, ' ', false, json::error_handler_t::replace) + "\n";
}

}  // namespace tool
