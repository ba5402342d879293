#include "row_settings.hpp"

#include <algorithm>
#include <tessera/core/error.hpp>
#include <tessera/math/hadamard.hpp>

#include "tool/methods/values.hpp"

namespace tool {
namespace {

std::string allowed_rows() {
  std::vector<std::string> all = row_formats();
  const std::string last = all.back();
  all.pop_back();
  return joined(all) + " or " + last;
}

// Errors: a format whose rows without a tail this build lacks.
void require_built(const std::string& rows) {
  bool built = false;
#define TESSERA_TOOL_KNOWS(format) built |= rows == #format;
  TESSERA_TOOL_FOR_ROWS(TESSERA_TOOL_KNOWS)
#undef TESSERA_TOOL_KNOWS
  tessera::require(built, "rows", rows + " without a whole tail", "--set whole_tail=NUMBER beside it in this build",
                   "build the tool with -DTESSERA_TOOL_ROWS=" + rows + " for those without");
}

}  // namespace

std::vector<std::string> row_formats() {
  std::vector<std::string> all{"given", "bf16"};
  const auto add = [&](const std::string& format) {
    if (std::find(all.begin(), all.end(), format) == all.end()) all.push_back(format);
  };
#define TESSERA_TOOL_NAME(format) \
  if (std::string_view(#format) != "tailed") add(#format);
  TESSERA_TOOL_FOR_ROWS(TESSERA_TOOL_NAME)
#undef TESSERA_TOOL_NAME
  if (has_whole_tails()) add("fp8"), add("int4");
  return all;
}

bool has_whole_tails() {
#ifdef TESSERA_TOOL_TAILED
  return true;
#else
  return false;
#endif
}

row_settings row_settings::taken_from(std::vector<setting>& given) {
  row_settings chosen;
  const auto take = [&](const char* name, const auto& use) {
    const auto found = std::find_if(given.begin(), given.end(), [&](const setting& one) { return one.name == name; });
    if (found == given.end()) return;
    const std::string value = found->value;
    given.erase(found);
    use(value);
  };
  take("rows", [&](const std::string& value) {
    const std::vector<std::string> built = row_formats(), all{"given", "bf16", "fp8", "int8", "int4", "int2"};
    if (std::find(built.begin(), built.end(), value) == built.end() &&
        std::find(all.begin(), all.end(), value) != all.end()) {
      tessera::fail("rows", value, allowed_rows() + " in this build",
                    "build the tool with -DTESSERA_TOOL_ROWS=" + value + ", or several, separated by semicolons");
    }
    require_one_of("rows", value, built);
    chosen.rows = value;
  });
  take("rotate", [&](const std::string& value) {
    require_one_of("rotate", value, {"none", "hadamard"});
    chosen.rotates = value == "hadamard";
  });
  take("whole_tail", [&](const std::string& value) {
    chosen.whole_tail = index_t(parse_count("whole_tail", value, 0));
    tessera::require(chosen.whole_tail == 0 || has_whole_tails(), "whole_tail", value, "0 in this build",
                     "build the tool with -DTESSERA_TOOL_ROWS=tailed");
    tessera::require(chosen.whole_tail == 0 || chosen.rows == "fp8" || chosen.rows == "int4", "whole_tail", value,
                     "0 with rows=" + chosen.rows, "pass rows=fp8 or rows=int4, or leave it out");
  });
  if (chosen.encodes() && chosen.whole_tail == 0) require_built(chosen.rows);
  return chosen;
}

std::vector<parameter_info> row_settings::shown() const {
  return {{"rows", rows, allowed_rows(), "how K and V are stored; given: as they come"},
          {"rotate", rotates ? "hadamard" : "none", "none or hadamard",
           "whether a Hadamard matrix mixes channels before they are stored"},
          {"whole_tail", value_text(whole_tail), tessera::value_range<index_t>{0, tessera::max_tokens}.text(),
           "newest tokens that stay whole, of fp8 and int4 rows, which then have one scale for each vector"}};
}

cache_request row_settings::tailed(const cache_request& request) const {
  cache_request own = request;
  own.settings.push_back({"element", rows});
  own.settings.push_back({"tail", value_text(whole_tail)});
  return own;
}

input_rows row_rotation::rotated(const input_rows& rows, index_t dim) {
  if (!rotates_ || rows.data == nullptr) return rows;
  rows_.resize(std::size_t(rows.tokens) * std::size_t(rows.heads) * std::size_t(dim));
  float* target = rows_.data();
  for (index_t token = 0; token < rows.tokens; ++token) {
    for (index_t head = 0; head < rows.heads; ++head, target += dim) {
      std::copy_n(rows.row(0, token, head), dim, target);
      tessera::hadamard(target, dim);
    }
  }
  return tessera::nhd_rows(static_cast<const float*>(rows_.data()), rows.tokens, rows.heads, dim);
}

void row_rotation::restore(float* rows, offset_t count, index_t dim) const {
  for (offset_t row = 0; rotates_ && row < count; ++row) tessera::hadamard(rows + row * dim, dim);
}

}  // namespace tool
