// JSON files that hold a number for each KV head of a model, read member by member.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <tessera/core/types.hpp>
#include <vector>

namespace tool {

/// What every such file has: "version", and tables [layers][kv_heads] of one shape. Names that nobody asks for are left alone.
/// Errors: each call names the file, the member and the place in it.
class table_file {
 public:
  /// `members`: those that the file needs, in words; `maker`: the command that writes one. Errors: text that is no JSON object.
  table_file(std::string_view text, std::string_view source, const std::string& members, const std::string& maker);

  void require_version(tessera::index_t newest) const;
  void require_kind(const std::string& kind) const;

  std::string text(const char* name) const;
  double number(const char* name) const;
  tessera::index_t count(const char* name) const;
  /// By layer and KV head. The first table that is read says how many there are; the others must have as many.
  std::vector<double> table(const char* name);

  tessera::index_t layers() const { return layers_; }
  tessera::index_t kv_heads() const { return kv_heads_; }
  /// The file, and a member of it, as messages name them.
  const std::string& source() const { return source_; }
  std::string place(const char* name) const;
  const std::string& cure() const { return cure_; }

 private:
  const nlohmann::json& member(const char* name) const;
  double number(const nlohmann::json& value, const std::string& place) const;

  std::string source_, cure_, first_table_;
  nlohmann::json object_;
  tessera::index_t layers_ = 0, kv_heads_ = 0;
};

/// A table as the file has it.
nlohmann::ordered_json rows_of(const std::vector<double>& table, tessera::index_t kv_heads);
/// The file's text.
std::string table_text(const nlohmann::ordered_json& all);

}  // namespace tool
