#include "report.hpp"

#include <algorithm>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <tessera/core/error.hpp>

#include "tool/methods/registry.hpp"
#include "tool/methods/values.hpp"

namespace tool {
namespace {

/// Columns under one heading; each has a second line of heading and one text a row.
struct column {
  std::string name;
  std::vector<std::string> rows;
};
struct column_group {
  std::string heading;
  std::vector<column> columns;
};

std::string percent_text(double part, double whole) {
  if (whole <= 0) return "-";
  const double percent = 100 * part / whole;
  char text[32];
  std::snprintf(text, sizeof text, percent == double(int(percent)) ? "%.0f" : "%.1f", percent);
  return text;
}

const cell* find_cell(const std::vector<cell>& cells, std::size_t variant, const std::string& family, int turn) {
  for (const cell& cell : cells) {
    if (cell.variant == variant && cell.family == family && cell.turn == turn) return &cell;
  }
  return nullptr;
}

// One group a family: "variable" over "tracking", or the family's name over its turns.
std::vector<column_group> family_groups(const std::vector<variant>& variants, const std::vector<cell>& cells) {
  std::vector<column_group> groups;
  for (const cell& first : cells) {
    if (first.variant != 0) continue;
    column made{"turn " + std::to_string(first.turn), {}};
    for (std::size_t i = 0; i < variants.size(); ++i) {
      const cell* found = find_cell(cells, i, first.family, first.turn);
      made.rows.push_back(found ? percent_text(found->score(), double(found->questions)) : "-");
    }
    if (first.turn == 1) groups.push_back({first.family, {}});
    groups.back().columns.push_back(std::move(made));
  }
  for (column_group& group : groups) {
    if (group.columns.size() > 1) continue;
    const std::size_t cut = group.heading.find('_');
    group.columns[0].name = cut == std::string::npos ? group.heading : group.heading.substr(cut + 1);
    group.heading.resize(cut == std::string::npos ? 0 : cut);
  }
  return groups;
}

// The mean over the families, each the mean of its turns: what LongBench's and RULER's tables end with.
std::vector<column_group> average_groups(const std::vector<variant>& variants, const std::vector<cell>& cells) {
  column average{"average", {}};
  for (std::size_t i = 0; i < variants.size(); ++i) {
    std::map<std::string, std::pair<double, int>> families;  // sum of the turns' scores, and turns
    for (const cell& one : cells) {
      if (one.variant != i) continue;
      families[one.family].first += one.mean_score();
      ++families[one.family].second;
    }
    double sum = 0;
    for (const auto& [name, turns] : families) sum += turns.first / turns.second;
    average.rows.push_back(percent_text(sum, double(families.size())));
  }
  return {{"", {average}}};
}

std::vector<column_group> cost_groups(const std::vector<variant>& variants, const std::vector<cell>& cells) {
  column held{"held %", {}}, read{"per step", {}}, pairs{"pairs %", {}};
  bool lines = false;
  for (std::size_t i = 0; i < variants.size(); ++i) {
    cell sum;
    for (const cell& one : cells) {
      if (one.variant != i) continue;
      sum.bytes_held += one.bytes_held;
      sum.bytes_full += one.bytes_full;
      sum.bytes_read += one.bytes_read;
      sum.steps += one.steps;
      sum.pairs.attended += one.pairs.attended;
      sum.pairs.visible += one.pairs.visible;
    }
    lines |= sum.pairs.visible > 0;
    pairs.rows.push_back(sum.pairs.visible > 0 ? percent_text(sum.pairs.attended, sum.pairs.visible) : "100");
    held.rows.push_back(percent_text(sum.bytes_held, sum.bytes_full));
    read.rows.push_back(sum.steps > 0 ? bytes_text(sum.mean_read()) : "-");
  }
  std::vector<column_group> groups{{"memory", {held}}, {"read", {read}}};
  if (lines) groups.push_back({"prompt", {pairs}});
  return groups;
}

std::string padded(const std::string& text, std::size_t width, bool left) {
  const std::string blanks(width > text.size() ? width - text.size() : 0, ' ');
  return left ? text + blanks : blanks + text;
}

}  // namespace

std::string table_text(const std::vector<variant>& variants, const std::vector<cell>& cells, bool averages) {
  std::vector<column_group> groups{{"", {{"method", {}}}}, {"", {{"budget", {}}}}};
  for (const variant& row : variants) {
    groups[0].columns[0].rows.push_back(row.method->name + (row.differs.empty() ? "" : " " + row.differs));
    groups[1].columns[0].rows.push_back(row.budget ? std::to_string(*row.budget) : "-");
  }
  const auto means = averages ? average_groups(variants, cells) : std::vector<column_group>{};
  for (const auto& more : {family_groups(variants, cells), means, cost_groups(variants, cells)}) {
    groups.insert(groups.end(), more.begin(), more.end());
  }
  constexpr std::size_t gap = 2;
  std::string over, under;
  std::vector<std::string> rows(variants.size());
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const bool left = g == 0;  // names to the left, numbers to the right
    const std::string space(left ? 0 : gap, ' ');
    std::vector<std::size_t> widths;
    std::size_t total = 0;
    for (const column& shown : groups[g].columns) {
      std::size_t width = shown.name.size();
      for (const std::string& row : shown.rows) width = std::max(width, row.size());
      total += width + (widths.empty() ? 0 : gap);
      widths.push_back(width);
    }
    if (groups[g].heading.size() > total) widths[0] += groups[g].heading.size() - total;
    over += space +
            padded(groups[g].heading, std::max(total, groups[g].heading.size()), left || groups[g].columns.size() > 1);
    for (std::size_t c = 0; c < widths.size(); ++c) {
      const column& shown = groups[g].columns[c];
      const std::string before(c > 0 ? gap : space.size(), ' ');
      under += before + padded(shown.name, widths[c], left);
      for (std::size_t i = 0; i < rows.size(); ++i) rows[i] += before + padded(shown.rows[i], widths[c], left);
    }
  }
  std::string text = over + "\n" + under + "\n" + std::string(under.size(), '-') + "\n";
  for (const std::string& row : rows) text += row + "\n";
  return text;
}

std::string json_text(const std::vector<variant>& variants, const std::vector<cell>& cells, const scoring& how) {
  auto list = nlohmann::ordered_json::array();
  for (const cell& cell : cells) {
    const variant& variant = variants[cell.variant];
    nlohmann::ordered_json item;
    item["method"] = variant.method->name;
    item["budget"] = variant.budget ? nlohmann::ordered_json(*variant.budget) : nlohmann::ordered_json(nullptr);
    item["parameters"] = nlohmann::ordered_json::object();
    const auto settings = with_answer_limit(*variant.method, variant.settings, std::max<index_t>(1, cell.most_limit));
    for (const parameter_info& parameter : variant.method->configured(settings)) {
      item["parameters"][parameter.name] = nlohmann::ordered_json::parse(parameter.value, nullptr, false);
      if (item["parameters"][parameter.name].is_discarded()) item["parameters"][parameter.name] = parameter.value;
    }
    if (!variant.differs.empty()) item["differs"] = variant.differs;
    item["family"] = cell.family;
    item["turn"] = cell.turn;
    item["questions"] = cell.questions;
    item["right"] = cell.right;
    item["metric"] = how.text();
    item["score"] = cell.mean_score();
    item["bytes_held"] = cell.mean_held();
    item["bytes_full"] = cell.mean_full();
    item["bytes_read_per_step"] = cell.mean_read();
    item["prompt_tokens"] = cell.prompt_tokens;
    item["prompt_tokens_reused"] = cell.reused_tokens;
    item["prompt_pairs"] = cell.pairs.visible > 0 ? cell.pairs.attended / cell.pairs.visible : 1;
    item["answers"] = cell.answers;
    item["verdicts"] = cell.verdicts;
    if (!how.is_yes_or_no()) item["scores"] = cell.scores;
    list.push_back(std::move(item));
  }
  // A generated text may end inside a character.
  return list.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

std::string limits_text(const std::vector<variant>& variants, const std::vector<cell>& cells) {
  std::vector<std::string> names;
  index_t least = 0, most = 0;
  for (const cell& cell : cells) {
    const variant& row = variants[cell.variant];
    if (with_answer_limit(*row.method, row.settings, 1).size() == row.settings.size()) continue;
    if (std::ranges::find(names, row.method->name) == names.end()) names.push_back(row.method->name);
    least = most == 0 ? cell.least_limit : std::min(least, cell.least_limit);
    most = std::max(most, cell.most_limit);
  }
  if (names.empty()) return {};
  const std::string range = std::to_string(least) + (least == most ? "" : " to " + std::to_string(most));
  return "max_new of " + joined(names) + ": " + range + ", the longest that an answer may get.\n";
}

std::string prefix_text(const prefix_use& use) {
  const auto mean = [](const char* what, const read_parts& parts) {
    char text[160];
    std::snprintf(text, sizeof text, "%s took %.3g s.", what, parts.mean_seconds());
    return std::string(text);
  };
  const auto tokens = [](const read_parts& parts) {
    char text[40];
    std::snprintf(text, sizeof text, "%.0f tokens", parts.mean_tokens());
    return std::string(text);
  };
  const auto names = [](const std::set<std::string>& all) { return joined({all.begin(), all.end()}); };
  std::string text;
  if (use.beginnings.count > 0) {
    const std::int64_t all = use.beginnings.tokens + use.forks.tokens + use.rest.tokens + use.rest_of_fork.tokens;
    text += "Prefix cache: " + std::to_string(use.forks.tokens) + " of " + std::to_string(all) +
            " prompt tokens were not read again. On average, to read a shared beginning of " +
            mean(tokens(use.beginnings).c_str(), use.beginnings) + " The " +
            mean((tokens(use.rest) + " behind it").c_str(), use.rest);
    if (use.forks.count > 0)
      text += mean(" A fork", use.forks) + " The " +
              mean((tokens(use.rest_of_fork) + " behind a fork").c_str(), use.rest_of_fork);
    text += "\n";
    if (use.beginning_bytes > 0)
      text += "Memory: " + bytes_text(double(use.beginning_bytes)) + " of a shared beginning; " +
              bytes_text(double(use.most_bytes)) + " at most with the question behind it, before it is compressed.\n";
  }
  if (!use.need_length.empty())
    text += "Read anew for every question: " + names(use.need_length) +
            " (prompts are compressed while they come in, or stored in another format).\n";
  if (!use.need_answer_limit.empty())
    text += "Read anew where the longest answers differ: " + names(use.need_answer_limit) +
            " (max_new is part of the plan).\n";
  if (!use.dissimilar.empty())
    text += "Read anew because prompts begin alike for less than a third: " + names(use.dissimilar) + ".\n";
  return text;
}

std::string bytes_text(double bytes) {
  const char* unit = "B";
  for (const char* larger : {"KiB", "MiB", "GiB"}) {
    if (bytes < 1024) break;
    bytes /= 1024;
    unit = larger;
  }
  char text[32];
  std::snprintf(text, sizeof text, bytes < 10 ? "%.2f %s" : bytes < 100 ? "%.1f %s" : "%.0f %s", bytes, unit);
  return text;
}

}  // namespace tool
